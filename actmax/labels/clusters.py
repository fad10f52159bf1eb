"""TopicClusters: groups of a corpus's sentences that the model takes for alike, named by their words."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from icebear.actmax.labels.evidence import common
from icebear.actmax.labels.sample import part_of, words
from icebear.db.store import Store

COUNT = 48
LEARNT = 20_000
"""Sentences at most that they are learnt from."""
WORDS = 4
FREQUENT = 0.05
"""A word in more sentences than this names no topic."""


@dataclass(frozen=True)
class TopicClusters:
    words: tuple[tuple[str, ...], ...]
    """Of each topic, those that tell it from the others."""
    centres: np.ndarray
    """(K, D) unit vectors."""

    def likeness(self, store: Store, sentences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cosines of sentences (S,), by id, with the topics (S, K), and with each other (S, S)."""
        rows = _unit(store, sentences)
        return rows @ self.centres.reshape(len(self.words), rows.shape[1]).T, rows @ rows.T  # of no topic, too

    def to_dict(self) -> dict[str, Any]:
        return {"words": self.words, "centres": self.centres.astype(float).round(5).tolist()}

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> TopicClusters:
        return cls(tuple(map(tuple, found["words"])), np.array(found["centres"], dtype=np.float32))


def topic_clusters(store: Store) -> TopicClusters:
    """Those of the store, made once of the sentences of the train part (k-means of their vectors)."""
    found = store.controls.get("topics")
    if found is None:
        store.controls.set({"topics": _made(store).to_dict()})
        found = store.controls.get("topics")  # as it is kept, rounded
    return TopicClusters.from_dict(found)


def _made(store: Store) -> TopicClusters:
    import faiss

    sentences = [s for s in store.sentences.starting_at(0) if part_of(s.title) == "train"][:LEARNT]
    rows = _unit(store, np.array([sentence.id for sentence in sentences]))
    count = max(1, min(COUNT, len(rows) // 40))
    learner = faiss.Kmeans(rows.shape[1], count, niter=25, seed=1, spherical=True, max_points_per_centroid=LEARNT)
    learner.train(rows)
    centres = np.array(learner.centroids)
    nearest = (rows @ centres.T).argmax(1)
    said = [{word for word, _ in words(sentence.tokens)} for sentence in sentences]
    background = Counter(word for row in said for word in row)
    said = [{word for word in row if background[word] <= FREQUENT * len(said)} for row in said]
    total = sum(background.values())
    names = [
        tuple(common([w for row in np.flatnonzero(nearest == topic) for w in said[row]], background, total, WORDS))
        for topic in range(count)
    ]
    able = [number for number, name in enumerate(names) if name]
    return TopicClusters(tuple(names[number] for number in able), centres[able])


def _unit(store: Store, sentences: np.ndarray) -> np.ndarray:
    """(S, D) their vectors off the corpus's mean, of length 1; zero for one without tokens that count."""
    known = dict(zip(*store.sentences.vectors(sentences.tolist()), strict=True))
    centre = store.vectors.centre()
    rows = np.array([known[i].astype(np.float32) - centre if i in known else 0 * centre for i in sentences.tolist()])
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-6)
