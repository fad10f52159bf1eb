"""Which neurons know about some words, or are like another neuron: by what they write, read and are driven by."""

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING, Any

import numpy as np

from icebear.db import vectors
from icebear.errors import InputError
from icebear.records import POLARITIES, Hit, Neuron, Projection, Promotion, as_neuron
from icebear.values import one_of, shown, whole

if TYPE_CHECKING:
    from icebear.db.store import Store

CANDIDATES = 200
"""Of each list before they are fused."""
MATCHING = 50
"""Sentences of the corpus that stand for a text."""
RANK_CONSTANT = 60
"""Of reciprocal rank fusion (Cormack et al. 2009): a list gives 1 / (60 + rank)."""

Found = list[tuple[int, str, str]]
"""neuron id, polarity, why; best first."""


def search(store: Store, text: str, k: int = 20) -> list[Hit]:
    """The k neurons (with polarity) that best match `text`, each with the reasons, cosines in brackets.

    Two kinds of evidence count the same: what a neuron writes (the cosine between its W2 row and the unembedding of
    the words), and what drives it: how many of its examples contain the words, and the cosine between the mean vector
    of its examples and that of the sentences of the corpus that match the words best. (That mean finds neurons better
    than the model's vector of the bare words, which is far from that of any sentence.) An automatic label that holds
    and has one of the words counts as much as either. Fused by reciprocal rank.
    In an index by relevance the polarity of examples is the sign of a relevance.
    """
    k = whole(k, "The number of neurons")
    store.fact("finished")
    words = re.findall(r"\w+", text) if isinstance(text, str) else []
    if not words:
        raise InputError(f"The search text {shown(text)} has no words; write some.")
    query = " OR ".join(f'"{unicodedata.normalize("NFKD", word)}"' for word in words)
    rankings = (
        (1.0, _by_output(store, words)),
        (0.5, _by_examples(store, query)),
        (0.5, _by_vectors(store, query)),
        (1.0, _by_labels(store, words)),
    )
    fused: dict[tuple[int, str], tuple[float, list[str]]] = {}
    for weight, ranking in rankings:
        for rank, (identity, polarity, why) in enumerate(ranking, 1):
            score, reasons = fused.get((identity, polarity), (0.0, []))
            fused[identity, polarity] = (score + weight / (RANK_CONSTANT + rank), [*reasons, why])
    best = sorted(fused.items(), key=lambda item: (-item[1][0], item[0]))[:k]
    names = store.neurons([identity for (identity, _), _ in best])
    return [Hit(names[identity], polarity, score, tuple(reasons)) for (identity, polarity), (score, reasons) in best]


def _by_output(store: Store, words: list[str]) -> Found:
    tokens, rows = store.vectors("tokens"), store.vectors("w2")
    query = np.zeros(tokens.d, dtype=np.float32)
    known = []
    for word in words:
        ids = store.token_ids({prefix + form for prefix in ("", " ") for form in (word, word.lower(), word.title())})
        if ids:
            known.append(word)
            found = np.array([vectors.row(tokens, identity) for identity in ids])
            direction = (found / np.linalg.norm(found, axis=1, keepdims=True)).sum(0)
            query += direction / np.linalg.norm(direction)
    if not known:
        return []
    said = " ".join(known)
    return [
        (identity, polarity, f"writes {said!r} ({cosine:.2f})")
        for identity, polarity, cosine in _both_signs(rows, query, CANDIDATES)
    ]


def _by_examples(store: Store, query: str) -> Found:
    found, examples = store.neurons_driven_by(query, CANDIDATES), _examples(store)
    return [(number, polarity, f"{count} of {total} {examples} have it") for number, polarity, count, total in found]


def _by_vectors(store: Store, query: str) -> Found:
    rows = store.sentence_vectors(store.matching(query, MATCHING))[1]
    if not len(rows):
        return []
    query_vector = rows.mean(0, dtype=np.float32) - store.centre()
    found = vectors.search(store.vectors("examples"), query_vector, CANDIDATES)
    examples = _examples(store)
    return [(i // 2, "+-"[i % 2], f"{examples} like it ({cosine:.2f})") for i, cosine in found]


def _by_labels(store: Store, words: list[str]) -> Found:
    wanted = {word.lower() for word in words}
    return [
        (identity, polarity, f"means {text!r} ({score:.2f})")
        for identity, polarity, text, score in store.clear_labels()
        if wanted & set(re.findall(r"\w+", text.lower()))
    ][:CANDIDATES]


def _examples(store: Store) -> str:
    return "examples" if store.by == "activation" else f"examples by {store.by}"


def _both_signs(index: Any, query: np.ndarray, k: int) -> list[tuple[int, str, float]]:
    """Id, polarity and cosine of the k rows that point most nearly along the query, or (polarity -) against it."""
    both = [
        (cosine, identity, polarity)
        for polarity, sign in (("+", 1), ("-", -1))
        for identity, cosine in vectors.search(index, sign * query, k)
    ]
    both.sort(key=lambda row: (-row[0], row[1], row[2]))
    return [(identity, polarity, cosine) for cosine, identity, polarity in both[:k]]


def vocabulary(store: Store, neuron: Neuron | str, k: int) -> Projection:
    """The k tokens that the neuron promotes and suppresses, from the store alone (`icebear.concepts.project` has the
    model).

    The rows are kept in float16, so logits differ from the model's by some 0.1 %.
    """
    neuron, k = as_neuron(neuron), whole(k, "The number of tokens")
    identity = store.neuron_id(neuron)
    row = store.w2_norm(neuron) * vectors.row(store.vectors("w2"), identity)
    tokens = store.vectors("tokens")
    ids, logits = vectors.products(tokens, row, tokens.ntotal)
    z = (logits - logits.mean()) / max(logits.std(ddof=1), 1e-12)

    typical = store.typical(neuron.layer)

    def promotions(places: slice) -> tuple[Promotion, ...]:
        chosen = ids[places].tolist()
        rows = zip(chosen, store.token_texts(chosen), logits[places].tolist(), z[places].tolist(), strict=True)
        return tuple(Promotion(id, text, logit if typical else None, z) for id, text, logit, z in rows)

    return Projection(neuron, promotions(slice(k)), promotions(slice(None, -k - 1, -1)), typical)


NEAR = {"writes": "w2", "reads": "w1", "examples": "examples"}
"""What neurons are compared by -> the vectors' name."""


def similar(store: Store, neuron: Neuron | str, k: int = 10, by: str = "writes", polarity: str = "+") -> list[Hit]:
    """The k neurons nearest to this one at this polarity, each at the polarity that is near; the score is the cosine.

    by: ``writes`` (W2 rows), ``reads`` (W1 or gate rows), ``examples`` (mean vectors of the sentences that drive them).
    A gate opens a neuron, but the sign of its activation is another matter: with a gated FFN in the index, ``reads``
    has no polarity, and near is what points the same way.
    """
    one_of(by, "comparison of neurons", NEAR)
    one_of(polarity, "polarity", POLARITIES)
    k = whole(k, "The number of neurons")
    identity, sign = store.neuron_id(neuron), 1 if polarity == "+" else -1
    index = store.vectors(NEAR[by])
    if by == "examples":
        query = vectors.row(index, 2 * identity + (sign < 0))
        found = [(i // 2, "+-"[i % 2], cosine) for i, cosine in vectors.search(index, query, k + 2)]
    elif by == "reads" and store.gated:
        found = [(i, "", cosine) for i, cosine in vectors.search(index, vectors.row(index, identity), k + 2)]
    else:
        found = _both_signs(index, sign * vectors.row(index, identity), k + 2)
    # Zeros (of neurons that nothing drives, or that do not read or write) are near to nothing.
    found = [row for row in found if row[0] != identity and row[2] > 1e-3][:k]
    names = store.neurons([other for other, _, _ in found])
    does = {"writes": "writes the same", "reads": "reads the same", "examples": f"has {_examples(store)} like it"}[by]
    return [Hit(names[other], p, cosine, (f"{does} ({cosine:.2f})",)) for other, p, cosine in found]


DRAWS = 20
"""Random neurons."""


def by_chance(store: Store, by: str, seed: int = 0) -> tuple[float, float]:
    """The median and the largest cosine between `DRAWS` random neurons and the nearest to each: what a list of the
    nearest has to be compared with."""
    count = store.count("neurons")
    drawn = np.random.default_rng(seed).choice(count, min(DRAWS, count), replace=False)
    nearest = [similar(store, neuron, 1, by) for neuron in store.neurons(drawn.tolist()).values()]
    scores = [hits[0].score for hits in nearest if hits] or [0.0]
    return float(np.median(scores)), max(scores)
