"""Search for neurons by words, or by similarity to another neuron."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from statistics import NormalDist
from typing import Any

import numpy as np

from icebear.db import vectors
from icebear.db.sqlite import reads
from icebear.db.stop_words import STOP_WORDS
from icebear.db.tables import Tables
from icebear.db.terms import padded, query_of, terms, words_of
from icebear.records import POLARITIES, Hit, Neuron, Projection, Promotion, as_neuron, sign_of
from icebear.values import check_int, one_of

MATCHING = 50
"""Sentences with the words whose mean vector the examples of a neuron are compared with."""
STRONGEST = 6
"""Sentences of each side whose meaning a text is compared with: those that a card shows first."""
NEAR = {"writes": "w_out", "reads": "w_in", "examples": "examples"}
"""The comparison of neurons -> the vector index."""
CHANCE_NEURONS = 20
"""The number of random neurons whose nearest neighbors are the control."""
NULL_VECTORS = 400
"""The number of random tokens, and of random sentences, that give each row the null of its cosines."""
DEVIATION = "deviation"
"""The name of the standard deviation of the similarity of two sentences, among the controls of a store."""
KURTOSIS = "kurtosis"
"""The name of the null of `Projection.kurtosis` among the controls of a store."""
DIRECTIONS = 100
"""The number of random directions."""
OF_TOKENS = 2000
"""The number of tokens whose rows give the random directions their covariance."""
NULL_PERCENTILE = 95
"""The percentile of the largest z of random directions, above which a neuron's output is similar to a word."""
OUTPUT = 0.5
"""The weight of the output beside the two numbers about sentences: by itself it finds a topic less often than they do
(benchmarks/search.py)."""
LIKE_IMAGE = "By images: neurons whose strongest images are like this one"
"""The heading of a search by an image."""
BY = {
    "sentences": "By sentences: neurons with the words in their sentences, or with sentences about the text",
    "weights": "By the weights alone: neurons with an output similar to the words",
}
"""`Hit.by` of a search by words -> the heading."""
NO_NEURON_LIKE = "No neuron of this index has strongest images that are more like this one than random images are."
NO_NEURON = (
    "No neuron of this index has the words in its strongest sentences, or sentences or an output similar to them."
)
NOTABLE = 2.0
"""The similarity of sentences is a reason that is named from this z on."""

Neighbors = list[tuple[int, str, float]]


@reads
def by_words(store: Tables, text: str, k: int = 20, text_vector: np.ndarray | None = None) -> list[Hit]:
    """Return up to k results by sentences and then up to k by weights (`BY`), each the best first; see `Store.search`.
    With `text_vector`, those of several words are in the order of their meaning alone.

    text_vector: the vector (D,) of the text by the encoder of the index; else the mean of sentences with the words.
    Arrays have a number for each side, at 2 * neuron id + (polarity is -).
    """
    k = check_int(k, "The number of neurons")
    store.check_finished()
    words = words_of(text)
    query = query_of(words)
    sides = 2 * store.count("neurons")
    counts, totals = store.example_tables.matching(query, sides), store.example_tables.totals(sides)
    outputs, least = _by_output(store, words), store.controls.get("outputs") or math.inf
    labels, least_about = _by_labels(store, words), math.inf
    if text_vector is None:
        sentences = _by_sentences(store, query)
    else:
        sentences, least_about = _by_meaning(store, text_vector, sides)
    scores: np.ndarray = sentences
    if text_vector is None or len({word.lower() for word in words} - STOP_WORDS) < 2:
        chance = totals * (store.sentences.count(query) / store.count("sentences"))
        scores = (counts - chance) / np.sqrt(chance + 1) + sentences + OUTPUT * outputs
        for side, (_, z) in labels.items():
            scores[side] += z
    matched = counts > 0
    matched[list(labels)] = True
    matched |= sentences > least_about
    alone = ~matched & (outputs > least) & (totals > 0)

    def hit(side: int) -> Hit:
        neuron, by = store.neurons.of([side // 2])[side // 2], "sentences" if matched[side] else "weights"
        why = [f"{counts[side]} of {totals[side]} examples contain the words"] if counts[side] else []
        if sentences[side] > NOTABLE:
            similar_to = "sentences with the words" if text_vector is None else "the text"
            why.append(f"examples are similar to {similar_to} (z {sentences[side]:.1f})")
        if outputs[side] > least:
            why.append(f"output is similar to the words (z {outputs[side]:.1f})")
        why += [labels[side][0]] if side in labels else []
        return Hit(neuron, POLARITIES[side % 2], float((scores if matched[side] else outputs)[side]), tuple(why), by)

    hits: list[Hit] = []
    for chosen, values in ((matched & (totals > 0), scores), (alone, outputs)):
        order = np.flatnonzero(chosen)[np.argsort(-values[chosen], kind="stable")].tolist()
        hits += map(hit, order[:k])
    return hits


@reads
def by_image(store: Tables, vector: np.ndarray, k: int = 20) -> list[Hit]:
    """Return the k neurons, heads and polarities whose strongest images are most like an image: the cosine of their
    mean vector with it. Those are returned whose cosine is above that of each of as many random sets of images.

    vector: (D,) of the image, as `Tables.sentence_vectors` has them. Neurons with fewer examples than others are left
    out.
    """
    k = check_int(k, "The number of neurons")
    store.check_finished()
    totals, size = store.example_tables.totals(2 * store.count("neurons")), int(store.facts.get("k"))
    query = vectors.unit(store.vectors.standardized(vector[None].astype(np.float32)))[0]
    rows = store.vectors.standardized(store.sentence_vectors()[1].astype(np.float32))
    least = _largest_of_random_sets(rows, query, int((totals == size).sum()), size)
    index = store.vectors.get("examples")
    ids, cosines = vectors.products(index, query, index.ntotal)
    sides = [(side, cosine) for side, cosine in zip(ids.tolist(), cosines.tolist(), strict=True) if cosine > least]
    sides = [(side, cosine) for side, cosine in sides if totals[side] == size][:k]
    names = store.neurons.of({side // 2 for side, _ in sides})

    def hit(side: int, cosine: float) -> Hit:
        why = f"its images are like this one (cosine {cosine:.2f}; random images at most {least:.2f})"
        return Hit(names[side // 2], POLARITIES[side % 2], cosine, (why,), "image")

    return [hit(*row) for row in sides]


def _largest_of_random_sets(rows: np.ndarray, query: np.ndarray, count: int, size: int) -> float:
    """Return the largest cosine with a query (D,) of the means of random sets of rows (N, D)."""
    generator, largest = np.random.default_rng(0), 0.0
    for start in range(0, count, vectors.BLOCK):
        drawn = generator.integers(len(rows), size=(size, min(vectors.BLOCK, count - start)))
        means = vectors.unit(reduce(np.add, (rows[numbers] for numbers in drawn)))
        largest = max(largest, float((means @ query).max()))
    return largest


@reads
def nearest_images(store: Tables, vector: np.ndarray, k: int = 5) -> list[tuple[str, float]]:
    """Return the names of the k images of an index that are most like an image, with their cosines."""
    ids, rows = store.sentence_vectors()
    standardized = (store.vectors.standardized(part.astype(np.float32)) for part in (rows, vector[None]))
    images, query = map(vectors.unit, standardized)
    cosines = images @ query[0]
    order = np.argsort(-cosines, kind="stable")[: check_int(k, "The number of images")]
    names = store.sentences.of(ids[order].tolist())
    return [(names[identity].text, float(cosines[at])) for at, identity in zip(order, ids[order].tolist(), strict=True)]


@reads
def absent_words(store: Tables, text: str) -> list[str]:
    """Return the words of a text that no sentence of the index has, neither as a word nor inside of one; of stop words
    nothing is said."""
    lacking = {word: terms(word) for word in words_of(text) if not store.sentences.count(query_of([word]))}
    for sentence in map(terms, store.sentences.texts() if lacking else ()):
        lacking = {word: part for word, part in lacking.items() if part not in sentence}
    return list(lacking)


def absent_line(words: Sequence[str]) -> str:
    """Say that no sentence has these words; nothing if there are none."""
    return f"No sentence of this index has {' or '.join(map(repr, words))}." if words else ""


@reads
def with_and_without(store: Tables, text: str, k: int) -> tuple[list[str], list[str]]:
    """Return the k sentences of the index that match the words of a text best, and for each another sentence, without
    these words, of the nearest length."""
    query = query_of(words_of(text))
    matched = store.sentences.matching(query, store.sentences.count(query))
    best = store.sentences.of(matched[:k])
    having = [best[id].text for id in matched[:k]]
    taken = set(matched)
    others = [sentence.text for sentence in store.sentences.starting_at(0) if sentence.id not in taken]
    lacking = []
    for sentence in having[: len(others)]:
        lacking.append(min(others, key=lambda other: abs(len(other) - len(sentence))))
        others.remove(lacking[-1])
    return having, lacking


def _by_output(store: Tables, words: list[str]) -> np.ndarray:
    """Return how similar the output of each side is to the words, as z over random tokens; 0 without such tokens."""
    tokens, query = store.vectors.get("tokens"), np.zeros(0, dtype=np.float32)
    for word in words:
        forms = {prefix + form for prefix in ("", " ") for form in (word, word.lower(), word.title())}
        ids = store.vectors.token_ids(forms)
        if ids:
            direction = _directions(tokens, ids).sum(0)
            query = (query if query.size else 0) + direction / np.linalg.norm(direction)
    z = store.vectors.z(store.vectors.search_output_name, query)
    return np.stack((z, -z), 1).ravel()


def _by_sentences(store: Tables, query: str) -> np.ndarray:
    """Return how similar the examples of each side are to sentences with the words, as z over random sentences."""
    rows = store.sentence_vectors(store.sentences.matching(query, MATCHING))[1]
    mean = store.vectors.standardized(rows).mean(0) if len(rows) else np.zeros(0)
    return store.vectors.z("examples", mean)


def _by_meaning(store: Tables, text_vector: np.ndarray, sides: int) -> tuple[np.ndarray, float]:
    """Return how similar the strongest sentences of each side are to the text, as z over random sentences; and the
    largest z of as many random sets of sentences as there are sides."""
    ids, rows = store.sentence_vectors()
    order = np.argsort(ids)
    query = vectors.unit(store.vectors.standardized(text_vector[None]))[0]
    similar = (store.vectors.standardized(rows) @ query)[order]
    examples = store.example_tables.columns(STRONGEST)
    of_examples = similar[np.searchsorted(ids[order], examples.sentence)]
    sums = np.bincount(examples.key, of_examples, sides)
    counts, deviation = np.bincount(examples.key, minlength=sides), store.controls.get(DEVIATION)
    size, generator = min(STRONGEST, int(store.facts.get("k"))), np.random.default_rng(0)
    drawn = sum(similar[generator.integers(len(similar), size=sides)] for _ in range(size))
    return sums / np.sqrt(counts.clip(min=1)) / deviation, float(np.max(drawn)) / math.sqrt(size) / deviation


def _by_labels(store: Tables, words: list[str]) -> dict[int, tuple[str, float]]:
    """Return side -> a reason, and the z of a label's p, for the significant labels that have one of the words. Without
    a null, as for the heads of a small model, p is 1."""
    phrases = list(map(padded, words))
    return {
        2 * identity + POLARITIES.index(polarity): (f"label {text!r} ({score:.2f})", -NormalDist().inv_cdf(p))
        for identity, polarity, text, score, p in store.labels.significant()
        if p < 1 and any(map(padded(text).__contains__, phrases))
    }


def _directions(tokens: Any, ids: Sequence[int]) -> np.ndarray:
    """Return rows (N, D) of the unembedding, scaled to length 1."""
    return vectors.unit(np.array([tokens.reconstruct(identity) for identity in ids]))


@reads
def similar(store: Tables, neuron: Neuron | str, k: int, by: str, polarity: str) -> list[Hit]:
    one_of(by, "kind of similarity", NEAR)
    one_of(polarity, "polarity", POLARITIES)
    k = check_int(k, "The number of neurons")
    identity, sign = store.neurons.id(neuron), sign_of(polarity)
    index = store.vectors.get(NEAR[by])
    if by == "examples":
        query = index.reconstruct(2 * identity + (sign < 0))
        nearest: Neighbors = [(i // 2, POLARITIES[i % 2], cosine) for i, cosine in vectors.nearest(index, query, k + 2)]
    elif by == "reads" and store.facts.all().get("gated", True):
        nearest = [(i, "", cosine) for i, cosine in vectors.nearest(index, index.reconstruct(identity), k + 2)]
    else:
        nearest = _both_signs(index, sign * index.reconstruct(identity), k + 2)
    # Rows of zeros, of neurons without examples or without such a matrix, have no neighbors.
    nearest = [row for row in nearest if row[0] != identity and row[2] > 1e-3][:k]
    names = store.neurons.of([other for other, _, _ in nearest])
    why = {"writes": "similar W_out row", "reads": "similar W_in row"}.get(by, "similar examples")
    return [Hit(names[other], p, cosine, (f"{why} ({cosine:.2f})",), by) for other, p, cosine in nearest]


def measure_chance(store: Tables) -> None:
    """Save the nulls of searches: for each comparison of neurons, the median and the largest cosine of random neurons
    to their nearest neighbor; the cosines of each row with random tokens or sentences; and the largest z of outputs."""
    generator = np.random.default_rng(0)
    neurons = store.neurons.count_without_heads()
    drawn = generator.choice(neurons, min(CHANCE_NEURONS, neurons), replace=False)
    chance = {}
    for by in NEAR:
        nearest = [similar(store, neuron, 1, by, "+") for neuron in store.neurons.of(drawn.tolist()).values()]
        scores = [hits[0].score for hits in nearest if hits] or [0.0]
        chance[by] = (float(np.median(scores)), max(scores))
    outputs = _outputs_by_chance(store, generator) if store.count("tokens") else {}
    if not store.facts.find("encoder"):  # whose null `set_example_null` saves
        sentences = store.vectors.standardized(store.sentence_vectors()[1])
        sentences = sentences if len(sentences) else np.zeros_like(sentences, shape=(1, sentences.shape[1]))
        store.vectors.set_null("examples", generator.permutation(sentences)[:NULL_VECTORS], pooled=True)
    store.controls.set({"nearest": chance, **outputs})


def _outputs_by_chance(store: Tables, generator: np.random.Generator) -> dict[str, Any]:
    """Save the null of what neurons write, and return the controls of a search by words that rest on the vocabulary."""
    tokens = store.vectors.get("tokens")
    of_tokens = _directions(tokens, generator.permutation(tokens.ntotal)[:OF_TOKENS].tolist())
    store.vectors.set_null(store.vectors.search_output_name, of_tokens[:NULL_VECTORS])
    largest = [
        np.abs(store.vectors.z(store.vectors.search_output_name, direction)).max()
        for direction in random_rows(of_tokens)
    ]
    # That of the weights is known in an index that comes with icebear.
    known = {**(store.controls.get(KURTOSIS) or {}), vectors.LENS: None}
    kurtoses = {name: known.get(name) or _kurtosis_by_chance(store, name) for name in store.vectors.output_names}
    return {"outputs": float(np.percentile(largest, NULL_PERCENTILE)), KURTOSIS: kurtoses}


def kurtosis(logits: np.ndarray) -> np.ndarray:
    """Return the kurtosis (N,) of rows (N, V): 3 for normal numbers, more if a few words stand out."""
    squares = (logits - logits.mean(1, keepdims=True)) ** 2
    return (squares**2).mean(1) / np.maximum(squares.mean(1) ** 2, 1e-30)


def random_rows(rows: np.ndarray) -> np.ndarray:
    """Return random rows (`DIRECTIONS`, D) with the mean and covariance of rows (N, D) scaled to length 1."""
    rows = vectors.unit(rows)
    normal = np.random.default_rng(0).standard_normal((DIRECTIONS, len(rows)), dtype=np.float32)
    return rows.mean(0) + normal @ (rows - rows.mean(0)) / math.sqrt(len(rows))


def _kurtosis_by_chance(store: Tables, name: str) -> dict[str, float]:
    """Return site and layer -> the null of `Projection.kurtosis`, for the rows of a vector index."""
    index, tokens, chance = store.vectors.get(name), store.vectors.get("tokens"), {}
    for site, (layers, width) in store.neurons.sizes().items():  # the rows of heads are zeros
        for layer in range(layers):
            rows = index.reconstruct_n(store.neurons.id(Neuron(layer, site, 0)), width)
            if rows.any():
                drawn = random_rows(rows)
                logits = _logits(tokens, drawn)
                chance[f"{site}.{layer}"] = float(np.percentile(kurtosis(logits), NULL_PERCENTILE))
    return chance


@reads
def nearest_by_chance(store: Tables, by: str) -> tuple[float, float]:
    """Return the median and the largest cosine of random neurons to their nearest neighbor."""
    measured = store.controls.get("nearest")
    if measured is None:
        raise store.vectors.missing()
    median, largest = measured[by]
    return median, largest


def vocabulary_projection(store: Tables, neuron: Neuron | str, k: int, rows: str = "w_out") -> Projection:
    """Return what `Store.vocabulary` does. rows: the vector index that is projected; only W_out rows give logits."""
    return vocabulary_projections(store, [as_neuron(neuron)], k, rows)[0]


@reads
def vocabulary_projections(store: Tables, neurons: Sequence[Neuron], k: int, rows: str = "w_out") -> list[Projection]:
    """Return `vocabulary_projection` of each neuron; the vectors of the vocabulary are read once."""
    k, direct = check_int(k, "The number of tokens"), rows == "w_out"
    numbers, index = [store.neurons.id(neuron) for neuron in neurons], store.vectors.get(rows)
    norms = [store.vectors.w_out_norm(neuron) if direct else 1.0 for neuron in neurons]
    matrix = np.stack([norm * index.reconstruct(number) for norm, number in zip(norms, numbers, strict=True)])
    logits = _logits(store.vectors.get("tokens"), matrix)
    kurtoses, chance = kurtosis(logits).tolist(), (store.controls.get(KURTOSIS) or {}).get(rows, {})
    typical = {layer: store.vectors.typical(layer) if direct else None for layer in {n.layer for n in neurons}}

    def promotions(row: np.ndarray, sign: int, claims: bool) -> tuple[Promotion, ...]:
        ids = np.argpartition(-sign * row, min(k, len(row)) - 1)[:k]
        ids = ids[np.argsort(-sign * row[ids], kind="stable")]
        z = (row[ids] - row.mean()) / max(row.std(ddof=1), 1e-12)
        columns = (ids.tolist(), store.vectors.token_texts(ids.tolist()), row[ids].tolist(), z.tolist())
        return tuple(Promotion(id, text, add if claims else None, z) for id, text, add, z in zip(*columns, strict=True))

    return [
        Projection(
            neuron,
            promotions(row, +1, typical[neuron.layer] is not None),
            promotions(row, -1, typical[neuron.layer] is not None),
            typical[neuron.layer],
            lens="direct" if direct else "mean",
            kurtosis=row_kurtosis,
            kurtosis_by_chance=chance.get(f"{neuron.site}.{neuron.layer}"),
        )
        for neuron, row, row_kurtosis in zip(neurons, logits, kurtoses, strict=True)
    ]


def _logits(tokens: Any, rows: np.ndarray) -> np.ndarray:
    """Return the products (N, V) of rows (N, D) with the vectors of the vocabulary."""
    if len(rows) > 1:
        return np.concatenate([rows @ block.T for block in vectors.blocks(tokens)], axis=1)
    logits = np.empty((1, tokens.ntotal), dtype=np.float32)  # for one row, converting the vectors takes longer
    ids, scores = vectors.products(tokens, rows[0], tokens.ntotal)
    logits[0, ids] = scores
    return logits


def _both_signs(index: Any, query: np.ndarray, k: int) -> Neighbors:
    """Return the k rows with the largest cosine to the query (polarity +) or to its negative (polarity -)."""
    both = [
        (cosine, identity, polarity)
        for polarity, sign in (("+", 1), ("-", -1))
        for identity, cosine in vectors.nearest(index, sign * query, k)
    ]
    both.sort(key=lambda row: (-row[0], row[1], row[2]))
    return [(identity, polarity, cosine) for cosine, identity, polarity in both[:k]]
