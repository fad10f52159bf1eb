"""Which neurons know about some words: by what they write, and by the sentences that drive them."""

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING

import numpy as np

from db import vectors
from db.errors import InputError
from db.records import Hit, Neuron

if TYPE_CHECKING:
    from db.store import Store

CANDIDATES = 200
"""Of each list before they are fused."""
RANK_CONSTANT = 60
"""Of reciprocal rank fusion (Cormack et al. 2009): a list gives 1 / (60 + rank)."""

Found = list[tuple[int, str, str]]
"""neuron id, polarity, why; best first."""


def search(store: Store, text: str, k: int = 20) -> list[Hit]:
    """The k neurons (with polarity) that best match `text`, each with the reasons.

    Two rankings, fused by reciprocal rank: the cosine between a W2 row and the unembedding of the words, and
    how many of the neuron's examples contain them.
    """
    words = re.findall(r"\w+", text)
    if not words:
        raise InputError("The search text has no words; write some.")
    fused: dict[tuple[int, str], tuple[float, list[str]]] = {}
    for ranking in (_by_output(store, words), _by_examples(store, words)):
        for rank, (identity, polarity, why) in enumerate(ranking, 1):
            score, reasons = fused.get((identity, polarity), (0.0, []))
            fused[identity, polarity] = (score + 1 / (RANK_CONSTANT + rank), [*reasons, why])
    best = sorted(fused.items(), key=lambda item: (-item[1][0], item[0]))[:k]
    names = store.neurons([identity for (identity, _), _ in best])
    return [Hit(names[identity], polarity, score, tuple(reasons)) for (identity, polarity), (score, reasons) in best]


def _by_output(store: Store, words: list[str]) -> Found:
    tokens, rows = vectors.load(store.vectors("tokens")), vectors.load(store.vectors("w2"))
    query = np.zeros(tokens.d, dtype=np.float32)
    known = []
    for word in words:
        ids = store.token_ids({prefix + form for prefix in ("", " ") for form in (word, word.lower(), word.title())})
        if ids:
            known.append(word)
            direction = np.sum([vectors.row(tokens, identity) for identity in ids], axis=0)
            query += direction / np.linalg.norm(direction)
    if not known:
        return []
    both = [
        (score, identity, polarity)
        for polarity, sign in (("+", 1), ("-", -1))
        for identity, score in vectors.search(rows, sign * query, CANDIDATES)
    ]
    both.sort(key=lambda row: (-row[0], row[1], row[2]))
    said = " ".join(known)
    return [(identity, polarity, f"writes {said!r} (cosine {score:.2f})") for score, identity, polarity in both]


def _by_examples(store: Store, words: list[str]) -> Found:
    plain = [unicodedata.normalize("NFKD", word) for word in words]
    found = store.neurons_driven_by(" OR ".join(f'"{word}"' for word in plain), CANDIDATES)
    return [
        (identity, polarity, f"{count} of its {total} examples have it") for identity, polarity, count, total in found
    ]


def similar(store: Store, neuron: Neuron, k: int = 10) -> list[tuple[Neuron, float]]:
    """The k neurons whose W2 rows point most nearly the same way, with the cosine."""
    rows = vectors.load(store.vectors("w2"))
    identity = store.statistics(neuron).id
    found = [hit for hit in vectors.search(rows, vectors.row(rows, identity), k + 1) if hit[0] != identity][:k]
    names = store.neurons([other for other, _ in found])
    return [(names[other], score) for other, score in found]
