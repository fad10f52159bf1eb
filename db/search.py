"""Search for neurons by words, or by similarity to another neuron."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from icebear.db import vectors
from icebear.errors import InputError
from icebear.records import POLARITIES, Hit, Neuron, Projection, Promotion, as_neuron
from icebear.values import one_of, shown, whole

if TYPE_CHECKING:
    from icebear.db.store import Store

CANDIDATES = 200
MATCHING = 50
RANK_CONSTANT = 60
"""The constant of reciprocal rank fusion (Cormack et al. 2009): a ranking adds 1 / (60 + rank)."""
NEAR = {"writes": "w_out", "reads": "w_in", "examples": "examples"}
"""The comparison of neurons -> the vector index."""
DRAWS = 20
"""The number of random neurons whose nearest neighbors are the control."""

Candidates = list[tuple[int, str, str]]
Neighbours = list[tuple[int, str, float]]


def by_words(store: Store, text: str, k: int = 20) -> list[Hit]:
    k = whole(k, "The number of neurons")
    store.facts.get("finished")
    words = re.findall(r"\w+", text) if isinstance(text, str) else []
    if not words:
        raise InputError(f"The search text {shown(text)} has no words; give at least one.")
    query = " OR ".join(f'"{unicodedata.normalize("NFKD", word)}"' for word in words)
    rankings = (
        (1.0, _by_output(store, words)),
        (0.5, _by_examples(store, query)),
        (0.5, _by_vectors(store, query)),
        (1.0, _by_labels(store, words)),
    )
    scores: dict[tuple[int, str], float] = defaultdict(float)
    reasons: dict[tuple[int, str], list[str]] = defaultdict(list)
    for weight, ranking in rankings:
        for rank, (identity, polarity, why) in enumerate(ranking, 1):
            scores[identity, polarity] += weight / (RANK_CONSTANT + rank)
            reasons[identity, polarity].append(why)
    best = sorted(scores, key=lambda side: (-scores[side], side))[:k]
    names = store.neurons.of([identity for identity, _ in best])
    return [Hit(names[side[0]], side[1], scores[side], tuple(reasons[side])) for side in best]


def _by_output(store: Store, words: list[str]) -> Candidates:
    tokens, rows = (
        store.vectors.get("tokens"),
        store.vectors.get(vectors.LENS if store.vectors.has(vectors.LENS) else "w_out"),
    )
    query = np.zeros(tokens.d, dtype=np.float32)
    known = []
    for word in words:
        forms = {prefix + form for prefix in ("", " ") for form in (word, word.lower(), word.title())}
        ids = store.vectors.token_ids(forms)
        if ids:
            known.append(word)
            written = np.array([tokens.reconstruct(identity) for identity in ids])
            direction = (written / np.linalg.norm(written, axis=1, keepdims=True)).sum(0)
            query += direction / np.linalg.norm(direction)
    if not known:
        return []
    return [
        (identity, polarity, f"promotes {' '.join(known)!r} (cosine {cosine:.2f})")
        for identity, polarity, cosine in _both_signs(rows, query, CANDIDATES)
    ]


def _by_examples(store: Store, query: str) -> Candidates:
    rows, examples = store.example_tables.matching(query, CANDIDATES), _examples_text(store)
    return [
        (number, polarity, f"{count} of {total} {examples} contain the words")
        for number, polarity, count, total in rows
    ]


def _by_vectors(store: Store, query: str) -> Candidates:
    rows = store.sentences.vectors(store.sentences.matching(query, MATCHING))[1]
    if not len(rows):
        return []
    query_vector = rows.mean(0, dtype=np.float32) - store.vectors.center()
    nearest = vectors.nearest(store.vectors.get("examples"), query_vector, CANDIDATES)
    examples = _examples_text(store)
    why = f"{examples} are similar to sentences with the words"
    return [(i // 2, "+-"[i % 2], f"{why} (cosine {cosine:.2f})") for i, cosine in nearest]


def _by_labels(store: Store, words: list[str]) -> Candidates:
    wanted = {word.lower() for word in words}
    return [
        (identity, polarity, f"label {text!r} ({score:.2f})")
        for identity, polarity, text, score in store.labels.significant()
        if wanted & set(re.findall(r"\w+", text.lower()))
    ][:CANDIDATES]


def _examples_text(store: Store) -> str:
    return "examples" if store.by == "activation" else f"examples by {store.by}"


def similar(store: Store, neuron: Neuron | str, k: int, by: str, polarity: str) -> list[Hit]:
    one_of(by, "kind of similarity", NEAR)
    one_of(polarity, "polarity", POLARITIES)
    k = whole(k, "The number of neurons")
    identity, sign = store.neurons.id(neuron), 1 if polarity == "+" else -1
    index = store.vectors.get(NEAR[by])
    if by == "examples":
        query = index.reconstruct(2 * identity + (sign < 0))
        nearest: Neighbours = [(i // 2, "+-"[i % 2], cosine) for i, cosine in vectors.nearest(index, query, k + 2)]
    elif by == "reads" and store.facts.all().get("gated", True):
        nearest = [(i, "", cosine) for i, cosine in vectors.nearest(index, index.reconstruct(identity), k + 2)]
    else:
        nearest = _both_signs(index, sign * index.reconstruct(identity), k + 2)
    # Rows of zeros, of neurons without examples or without such a matrix, have no neighbors.
    nearest = [row for row in nearest if row[0] != identity and row[2] > 1e-3][:k]
    names = store.neurons.of([other for other, _, _ in nearest])
    why = {"writes": "similar W_out row", "reads": "similar W_in row"}.get(by, f"similar {_examples_text(store)}")
    return [Hit(names[other], p, cosine, (f"{why} ({cosine:.2f})",)) for other, p, cosine in nearest]


def measure_chance(store: Store, seed: int = 0) -> None:
    """Save, for each comparison, the median and the largest cosine of random neurons to their nearest neighbor."""
    ids = np.arange(len(store.neurons.all()))
    drawn = np.random.default_rng(seed).choice(len(ids), min(DRAWS, len(ids)), replace=False)
    chance = {}
    for by in NEAR:
        nearest = [similar(store, neuron, 1, by, "+") for neuron in store.neurons.of(drawn.tolist()).values()]
        scores = [hits[0].score for hits in nearest if hits] or [0.0]
        chance[by] = (float(np.median(scores)), max(scores))
    store.controls.set({"nearest": chance})


def nearest_by_chance(store: Store, by: str) -> tuple[float, float]:
    """Return the median and the largest cosine of random neurons to their nearest neighbor."""
    measured = store.controls.get("nearest")
    if measured is None:
        raise store.vectors.missing()
    median, largest = measured[by]
    return median, largest


def vocabulary_projection(store: Store, neuron: Neuron | str, k: int, rows: str = "w_out") -> Projection:
    """Return what `Store.vocabulary` does. rows: the vector index that is projected; only W_out rows give logits."""
    neuron, k = as_neuron(neuron), whole(k, "The number of tokens")
    identity = store.neurons.id(neuron)
    direct = rows == "w_out"
    row = (store.vectors.w_out_norm(neuron) if direct else 1.0) * store.vectors.get(rows).reconstruct(identity)
    tokens = store.vectors.get("tokens")
    ids, logits = vectors.products(tokens, row, tokens.ntotal)
    z = (logits - logits.mean()) / max(logits.std(ddof=1), 1e-12)
    typical = store.vectors.typical(neuron.layer) if direct else None

    def promotions(places: slice) -> tuple[Promotion, ...]:
        chosen = ids[places].tolist()
        texts = store.vectors.token_texts(chosen)
        columns = zip(chosen, texts, logits[places].tolist(), z[places].tolist(), strict=True)
        return tuple(Promotion(id, text, logit if typical else None, z) for id, text, logit, z in columns)

    lens = "direct" if direct else "mean"
    return Projection(neuron, promotions(slice(k)), promotions(slice(None, -k - 1, -1)), typical, lens=lens)


def _both_signs(index: Any, query: np.ndarray, k: int) -> Neighbours:
    """Return the k rows with the largest cosine to the query (polarity +) or to its negative (polarity -)."""
    both = [
        (cosine, identity, polarity)
        for polarity, sign in (("+", 1), ("-", -1))
        for identity, cosine in vectors.nearest(index, sign * query, k)
    ]
    both.sort(key=lambda row: (-row[0], row[1], row[2]))
    return [(identity, polarity, cosine) for cosine, identity, polarity in both[:k]]
