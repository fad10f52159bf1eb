"""How clear the meanings of a layer's neurons are, how many are alike, and how many have none in this corpus."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_matrix

from icebear.actmax.atlas.neighbor_map import neighbors, principal
from icebear.actmax.atlas.side_data import SideData
from icebear.db.vectors import unit

RANDOM_DRAWS = 2000
"""The number of random sets of sentences."""
SHUFFLED_SIDES = 100
"""The number of sides of a layer whose partner is looked for among shuffled ones."""
CLARITY_PERCENTILE = 95
"""The percentile of the clarity of random sentences above which a side has a meaning."""
IDENTICAL_COSINE = 0.9
"""From this cosine of their vectors on, two sides are near-identical."""


@dataclass(frozen=True)
class LayerMeanings:
    """The sides of a layer's neurons, and the same numbers by chance."""

    site: str
    layer: int
    sides: int
    clarity: float
    """The mean cosine of a side's sentences with one another; the mean over sides."""
    clarity_by_chance: float
    """Of random sentences."""
    without_meaning: float
    """The share of sides whose clarity is not above that of 95 % of sets of random sentences."""
    without_meaning_by_chance: float
    redundant: float
    """The share of sides with a near-identical partner, in any layer."""
    redundant_by_chance: float
    """After the sentences were shuffled among the sides of each layer."""


def clarity(examples: csr_matrix, sentence_vectors: np.ndarray) -> np.ndarray:
    """Return the mean cosine (N,) of each side's sentences with one another; 0 for a single sentence.

    examples: (N, S) the sentences of each side. sentence_vectors: (S, D), of length 1.
    """
    counts = examples.getnnz(1)
    squares = ((examples @ sentence_vectors) ** 2).sum(1)
    return (squares - counts) / (counts * (counts - 1)).clip(1)


def clarity_by_chance(counts: np.ndarray, sentence_vectors: np.ndarray, seed: int) -> dict[int, np.ndarray]:
    """Return the number of sentences of a side -> the clarity of as many random sentences, `RANDOM_DRAWS` times."""
    generator, size = np.random.default_rng(seed), len(sentence_vectors)

    def drawn(count: int) -> np.ndarray:
        sentences = np.concatenate([generator.choice(size, count, replace=False) for _ in range(RANDOM_DRAWS)])
        starts = np.arange(RANDOM_DRAWS + 1) * count
        examples = csr_matrix((np.ones(len(sentences)), sentences, starts), shape=(RANDOM_DRAWS, size))
        return clarity(examples, sentence_vectors)

    return {int(count): drawn(int(count)) for count in np.unique(counts)}


def layer_meanings(data: SideData, seed: int) -> tuple[LayerMeanings, ...]:
    """Return the layers of each site."""
    counts, clear = data.examples.getnnz(1), clarity(data.examples, data.sentence_vectors)
    chance = clarity_by_chance(counts, data.sentence_vectors, seed)
    least = {count: np.percentile(values, CLARITY_PERCENTILE) for count, values in chance.items()}
    unclear = clear <= np.array([least[count] for count in counts.tolist()])
    alike = partners(data.vectors, neighbors(principal(data.vectors))[0]) >= IDENTICAL_COSINE
    chosen, reached = partners_by_chance(data, seed)
    rows = []
    for site, layer in sorted({*zip(data.site.tolist(), data.layer.tolist(), strict=True)}):
        inside = (data.site == site) & (data.layer == layer)
        random = np.concatenate([chance[count] for count in np.unique(counts[inside]).tolist()])
        alike_by_chance = float((reached[inside[chosen]] >= IDENTICAL_COSINE).mean())
        shares = float(unclear[inside].mean()), CLARITY_PERCENTILE / 100, float(alike[inside].mean()), alike_by_chance
        clarities = float(clear[inside].mean()), float(random.mean())
        rows.append(LayerMeanings(site, layer, int(inside.sum()), *clarities, *shares))
    return tuple(rows)


def partners(vectors: np.ndarray, near: np.ndarray) -> np.ndarray:
    """Return the largest cosine (N,) of each row (N, D) with its nearest rows, by id (N, K)."""
    rows, largest = unit(vectors), np.full(len(vectors), -1.0)
    for ids in near.T:
        np.maximum(largest, np.einsum("nd,nd->n", rows, rows[ids]), out=largest)
    return largest


def partners_by_chance(data: SideData, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return some sides of each layer (M,), and the largest cosine (M,) of each with any other side, after the
    sentences were shuffled among the sides of each layer."""
    counts, generator = data.examples.getnnz(1), np.random.default_rng(seed)
    _, group = np.unique(np.stack([data.site, data.layer.astype(str)]), axis=1, return_inverse=True)
    indices, of_row, chosen = data.examples.indices.copy(), np.repeat(group, counts), []
    for number in range(group.max() + 1):
        inside = of_row == number
        indices[inside] = generator.permutation(indices[inside])
        chosen.append(generator.permutation(np.flatnonzero(group == number))[:SHUFFLED_SIDES])
    examples = csr_matrix((data.examples.data, indices, data.examples.indptr), data.examples.shape)
    rows = unit(examples @ data.sentence_vectors)

    def largest(sides: np.ndarray) -> np.ndarray:
        cosines = rows[sides] @ rows.T
        cosines[np.arange(len(sides)), sides] = -1
        return cosines.max(1)

    return np.concatenate(chosen), np.concatenate([largest(sides) for sides in chosen])
