"""`compare_indexes`: which neurons have other sentences in a second model, such as a tuned one, and what they mean.

1. Both indexes hold the same sentences, with vectors of the same encoder.
2. `exchanged` is the share of a side's sentences that it does not have in the other model. It tells changed neurons
   from others best (docs/atlas.md).
3. A side's sentences are averaged in each model. `moved` is the squared distance of the two means, less what it is if
   the signs of all differences are random: sentences that are exchanged for others with the same meaning move nothing.
4. `by_chance` is the same number with random signs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from icebear.actmax.atlas.side_data import read_examples
from icebear.db.store import Store
from icebear.db.vectors import unit
from icebear.errors import StoreError, need
from icebear.records import POLARITIES
from icebear.values import seed_of, typed

MOVED_PERCENTILE = 99.9
"""The percentile of what is moved by chance above which a side's meaning has moved."""
LISTED = 100
"""The number of neurons with other sentences that `exchanged_sides` lists."""


@dataclass(frozen=True, eq=False)
class IndexComparison:
    """How far the sentences of each side moved from one model to the other. N sides have sentences in both."""

    sides: np.ndarray
    """(N,) 2 * neuron id + (polarity is -), ascending."""
    moved: np.ndarray
    """(N,) a squared distance: 0 if the meaning is the same, 2 if no meaning is common to the sentences of a model."""
    by_chance: np.ndarray
    """(N,) the same with random signs."""
    exchanged: np.ndarray
    """(N,) the share of a side's sentences that the other model does not have for it."""
    made_with: tuple[dict[str, Any], dict[str, Any]]
    """See `Store.made_with`, of both indexes."""

    @property
    def least(self) -> float:
        """What 99.9 % of the sides do not reach in `by_chance`."""
        return float(np.percentile(self.by_chance, MOVED_PERCENTILE))

    @property
    def order(self) -> np.ndarray:
        """The numbers of the sides, those with most exchanged sentences first, and of these that moved farthest."""
        return np.lexsort((-self.moved, -self.exchanged))


@dataclass(frozen=True)
class ExchangedSide:
    """A neuron at one polarity that has other sentences in the other model."""

    neuron: str
    polarity: str
    exchanged: float
    """The share of its sentences that it does not have in the other model."""
    moved: float
    """See `IndexComparison.moved`."""
    lost: str
    """The strongest of the exchanged sentences."""
    new: str
    """The strongest sentence that it has in the other model only."""


@typed
def compare_indexes(store: Store, other: Store, seed: int = 0) -> IndexComparison:
    """Find the neurons that have other maximally activating sentences in another model, and whether these mean another
    thing.

    Parameters
    ----------
    store, other : Store
        Finished indexes of two models with the same neurons, of the same texts and with the same sentence encoder.
    seed : int
        Of the random signs.

    Returns
    -------
    IndexComparison

    Raises
    ------
    InputError
        If a package is missing.
    StoreError
        If a scan is not finished, or the indexes cannot be compared.
    """
    need("index")
    _check(store, other)
    ids, vectors = (
        np.concatenate(both) for both in zip(store.sentence_vectors(), other.sentence_vectors(), strict=True)
    )
    ids, rows = np.unique(ids, return_index=True)
    sentence_vectors = unit(store.vectors.standardized(vectors[rows].astype(np.float32)))
    (sides, mine), (their_sides, theirs) = read_examples(store, ids), read_examples(other, ids)
    common, rows, their_rows = np.intersect1d(sides, their_sides, return_indices=True)
    mine, theirs = mine[rows], theirs[their_rows]
    lost = mine.getnnz(1) - mine.multiply(theirs).getnnz(1)
    moved, by_chance = _moved(_shares(mine) - _shares(theirs), sentence_vectors, np.random.default_rng(seed_of(seed)))
    made_with = store.made_with(), other.made_with()
    return IndexComparison(common, moved, by_chance, lost / mine.getnnz(1), made_with)


def _check(store: Store, other: Store) -> None:
    """Raise `StoreError` unless both have the same neurons, sentences and encoder."""
    for opened in (store, other):
        opened.check_finished()
    facts = [opened.facts.all() for opened in (store, other)]
    encoders = [(known.get("encoder") or {}).get("fingerprint") for known in facts]
    if not all(encoders) or encoders[0] != encoders[1]:
        raise StoreError("Both indexes need vectors of one sentence encoder: make them with icebear index --encoder.")
    neurons, sentences = (
        [list(opened.database.execute(query)) for opened in (store, other)]
        for query in ("SELECT id, layer, site, idx FROM neurons", "SELECT id, text FROM sentences ORDER BY id")
    )
    if neurons[0] != neurons[1]:
        raise StoreError(f"{store.path} and {other.path} do not have the same neurons: compare models of one shape.")
    if sentences[0] != sentences[1]:
        raise StoreError(
            f"{store.path} and {other.path} do not hold the same sentences: use the same corpus and --limit."
        )


def _shares(examples: csr_matrix) -> csr_matrix:
    """Return examples (N, S), each divided by the number of examples of its side."""
    return csr_matrix(examples.multiply(1 / examples.getnnz(1)[:, None]))


def _moved(
    differences: csr_matrix, sentence_vectors: np.ndarray, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return the squared length of each difference of means (N, S), less what random signs give, and with them."""
    differences.eliminate_zeros()
    noise = np.asarray(differences.multiply(differences).sum(1))[:, 0]
    signs = generator.choice([-1, 1], differences.nnz)
    random = csr_matrix((differences.data * signs, differences.indices, differences.indptr), differences.shape)
    moved, by_chance = (((shares @ sentence_vectors) ** 2).sum(1) - noise for shares in (differences, random))
    return moved, by_chance


def exchanged_sides(comparison: IndexComparison, store: Store, other: Store) -> list[ExchangedSide]:
    """Return the sides with the most exchanged sentences, with the strongest sentence that is only in each model."""
    order = comparison.order[:LISTED]
    order = order[comparison.exchanged[order] > 0]
    neurons, sides = store.neurons.of((comparison.sides[order] // 2).tolist()), []
    for number, side in zip(order.tolist(), comparison.sides[order].tolist(), strict=True):
        neuron, polarity = neurons[side // 2], POLARITIES[side % 2]
        texts = [[e.sentence.text for e in opened.examples(neuron, polarity)] for opened in (store, other)]
        lost, new = (next((text for text in texts[i] if text not in texts[1 - i]), "") for i in (0, 1))
        numbers = float(comparison.exchanged[number]), float(comparison.moved[number])
        sides.append(ExchangedSide(str(neuron), polarity, *numbers, lost, new))
    return sides
