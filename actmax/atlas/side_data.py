"""What a map is made of: the sides of neurons, and the sentences that are their examples."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.sparse import csr_matrix

from icebear.db.store import Store
from icebear.db.vectors import unit
from icebear.errors import StoreError
from icebear.records import Sentence
from icebear.values import stable_hash

FEWEST_SIDES = 16
"""The number of sides that a map has at least."""


@dataclass(frozen=True, eq=False)
class SideData:
    """N sides of neurons that have examples, and S sentences."""

    sides: np.ndarray
    """(N,) 2 * neuron id + (polarity is -), ascending."""
    site: np.ndarray
    layer: np.ndarray
    vectors: np.ndarray
    """(N, D) the mean vectors of examples."""
    examples: csr_matrix
    """(N, S) 1 where a sentence is an example of a side."""
    sentence_vectors: np.ndarray
    """(S, D), of length 1."""
    sentences: list[Sentence]

    @cached_property
    def chosen_from(self) -> np.ndarray:
        """Whether a sentence (S,) is of the documents that the map and its names are made from. The other documents
        test them."""
        return np.array([stable_hash(f"atlas {sentence.title}") % 2 == 0 for sentence in self.sentences])

    def half(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean vectors (N, D) of the sentences that the map is made from, and which sides (N,) have any.
        The others keep the mean of all their sentences."""
        examples = self.examples[:, self.chosen_from]
        any_examples = examples.getnnz(1) > 0
        means = examples @ self.sentence_vectors[self.chosen_from]
        return np.where(any_examples[:, None], means, self.vectors), any_examples


def read_sides(store: Store) -> SideData:
    """Read the sides of all neurons, heads left out. Raises `StoreError` if they are too few or have no vectors."""
    store.check_finished()
    store.check_texts("A map groups neurons by what their sentences are about")
    ids, sentence_vectors = store.sentence_vectors()
    order = np.argsort(ids)
    ids, sentence_vectors = ids[order], store.vectors.standardized(sentence_vectors[order].astype(np.float32))
    sides, examples = read_examples(store, ids)
    if len(sides) < FEWEST_SIDES:
        raise StoreError(f"{store.path} has too few neurons with vectors of sentences for a map; run icebear index.")
    layer, site, _ = side_columns(store, sides)
    index, sentences = store.vectors.get("examples"), store.sentences.of(ids.tolist())
    return SideData(
        sides,
        site,
        layer,
        index.reconstruct_n(0, index.ntotal)[sides],
        examples,
        unit(sentence_vectors),
        [sentences[identity] for identity in ids.tolist()],
    )


def read_examples(store: Store, ids: np.ndarray) -> tuple[np.ndarray, csr_matrix]:
    """Return the sides (N,) that have examples among sentences (S,), and which they are (N, S). ids: ascending."""
    rows = store.example_tables.columns()
    rows = rows[(rows.key < 2 * store.neurons.count_without_heads()) & np.isin(rows.sentence, ids)]
    sides, side = np.unique(rows.key, return_inverse=True)
    where = side, np.searchsorted(ids, rows.sentence)
    return sides, csr_matrix((np.ones(len(rows), np.float32), where), shape=(len(sides), len(ids)))


def side_columns(store: Store, sides: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the layers, sites and indices (N,) of the neurons of sides (N,)."""
    columns = store.neurons.columns()
    layer, site, index = (np.array(columns[name])[sides // 2] for name in ("layer", "site", "idx"))
    return layer, site, index
