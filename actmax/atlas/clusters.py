"""Clusters of the map: dense groups of sides, named by the words of their sentences if the name passes a test.

The map and the names are made from the sentences of half of the documents, and the names are tested on the other half:
their words must be more particular to the cluster there than the words of any shuffled cluster, which has as many
random sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override
from scipy.sparse import csr_matrix

from icebear.actmax.atlas.side_data import SideData
from icebear.convert import CONVERTER
from icebear.records import Sentence

SMALLEST = 50
"""The number of sides of the smallest cluster."""
NEIGHBORS = 10
"""HDBSCAN's min_samples: a point is in a dense place if this many others are near."""
NAME_WORDS = 3
SHUFFLES = 99
"""A name passes if its score is above that of all shuffled clusters of its size: p = 0.01."""
FREQUENT = 0.05
"""The share of sentences above which a word names nothing."""
RARE = 3
"""A word in fewer sentences names nothing."""
LETTERS = r"(?u)[^\W\d_]{2,}"


@dataclass(frozen=True)
class Cluster:
    """A cluster of the map."""

    size: int
    """The number of sides."""
    words: tuple[str, ...]
    """Its name; empty if the words do not pass the test."""
    score: float
    """The sum of the words' c-TF-IDF in the half of the documents that they were not chosen in."""
    by_chance: float
    """The largest score of shuffled clusters of this size."""
    tested_words: tuple[str, ...]
    """The words that were tested (``strongest`` in JSON)."""

    @property
    def name(self) -> str:
        return ", ".join(self.words)


SAVED_NAME = override(rename="strongest")
"""The name of `Cluster.tested_words` in saved maps and in JSON."""
CONVERTER.register_unstructure_hook(Cluster, make_dict_unstructure_fn(Cluster, CONVERTER, tested_words=SAVED_NAME))
CONVERTER.register_structure_hook(Cluster, make_dict_structure_fn(Cluster, CONVERTER, tested_words=SAVED_NAME))


def grouped(points: np.ndarray) -> np.ndarray:
    """Return the cluster (N,) of each point (N, 2), from 0, the largest first; -1 for none.

    HDBSCAN reads the distances of near points only, those of a triangulation among them, which connects all: on 92,160
    points a twelfth of the time, and nearly the same clusters. Equal points, which a triangulation lacks, are moved
    apart.
    """
    from scipy.spatial import Delaunay
    from sklearn.cluster import HDBSCAN
    from sklearn.neighbors import NearestNeighbors

    points, count = (
        points + 1e-6 * np.random.default_rng(0).standard_normal(points.shape),
        min(NEIGHBORS, len(points) - 1),
    )
    near = NearestNeighbors(n_neighbors=count + 1).fit(points).kneighbors_graph(mode="distance")
    edges = Delaunay(points).simplices[:, [0, 1, 1, 2, 2, 0]].reshape(-1, 2)
    lengths = np.linalg.norm(points[edges[:, 0]] - points[edges[:, 1]], axis=1)
    sides = csr_matrix((lengths, (edges[:, 0], edges[:, 1])), shape=near.shape)
    graph = near.maximum(near.T).maximum(sides).maximum(sides.T)
    settings = {"min_cluster_size": min(SMALLEST, len(points)), "min_samples": count, "copy": True}
    labels = HDBSCAN(metric="precomputed", cluster_selection_method="leaf", **settings).fit(graph).labels_
    sizes = np.bincount(labels[labels >= 0])
    order = np.append(np.argsort(np.argsort(-sizes, kind="stable"), kind="stable"), -1)
    return order[labels]


class Words:
    """The words that can name a cluster: which sentence has which, in two halves of the documents."""

    def __init__(self, sentences: Sequence[Sentence], chosen_from: np.ndarray) -> None:
        from sklearn.feature_extraction.text import CountVectorizer

        reader = CountVectorizer(binary=True, stop_words="english", token_pattern=LETTERS)
        table = reader.fit_transform([sentence.text for sentence in sentences])  # (S, W)
        shares = np.asarray(table.mean(0))[0]
        telling = (shares <= FREQUENT) & (shares >= RARE / len(sentences))
        self.names = reader.get_feature_names_out()[telling]
        halves = chosen_from, ~chosen_from
        self.halves = [csr_matrix(table[:, telling].multiply(half[:, None])) for half in halves]

    def scores(self, members: csr_matrix, examples: csr_matrix) -> tuple[np.ndarray, np.ndarray]:
        """Return the words (C, 3) with the largest c-TF-IDF in one half, and its sum (C,) in the other half.

        members: (C, N) the sides of each cluster. examples: (N, S) the sentences of each side.
        """
        sentences = members @ examples
        choosing, testing = (_particular((sentences @ half).toarray(), examples.sum(0) @ half) for half in self.halves)
        words = np.argpartition(-choosing, min(NAME_WORDS, choosing.shape[1]) - 1, axis=1)[:, :NAME_WORDS]
        order = np.argsort(-np.take_along_axis(choosing, words, 1), axis=1, kind="stable")
        words = np.take_along_axis(words, order, 1)
        return words, np.take_along_axis(testing, words, 1).sum(1)


def _particular(counts: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Return the c-TF-IDF (C, W) of words from their counts in each cluster (C, W) and among all sides (W,)."""
    sums = counts.sum(1, keepdims=True)
    return counts / sums.clip(1) * np.log1p(sums.mean() / np.asarray(totals).clip(1))


def named(cluster: np.ndarray, data: SideData, seed: int) -> tuple[Cluster, ...]:
    """Return the clusters, with the names that pass the test. cluster: (N,) the number of each side's, -1 for none."""
    count, generator, words = cluster.max() + 1, np.random.default_rng(seed), Words(data.sentences, data.chosen_from)
    if not count:
        return ()

    def scores(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        inside = np.flatnonzero(labels >= 0)
        shape = count, len(labels)
        return words.scores(csr_matrix((np.ones(len(inside)), (labels[inside], inside)), shape=shape), data.examples)

    chosen, reached = scores(cluster)
    chance = np.max([scores(generator.permutation(cluster))[1] for _ in range(SHUFFLES)], axis=0)
    tested = map(tuple, words.names[chosen].tolist())
    return tuple(
        Cluster(int(size), names if score > least else (), float(score), float(least), names)
        for size, names, score, least in zip(np.bincount(cluster[cluster >= 0]), tested, reached, chance, strict=True)
    )
