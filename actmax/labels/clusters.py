"""Topics: groups of a corpus's sentences with similar vectors, named by their words."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from icebear.actmax.labels.kinds import distinctive
from icebear.actmax.labels.sample import Sample, draw_samples, part_of, words
from icebear.concepts.models.model import Model
from icebear.db.store import Store

COUNT = 48
LEARNT = 20_000
"""The largest number of sentences to cluster."""
WORDS = 4
FREQUENT = 0.05
"""The share of sentences above which a word cannot name a topic."""


def prepare_samples(model: Model, store: Store, seed: int = 0) -> dict[str, Sample]:
    """Return the sample of each part, with the similarity of its sentences to each topic, and to each other.

    The topics of a store are made once: k-means clusters of the vectors of train sentences.
    """
    samples = draw_samples(model, store, seed)
    if store.controls.get("topics") is None:
        store.controls.set({"topics": _made(store)})
    topics = store.controls.get("topics")
    for sample in samples.values():
        rows = _unit(store, [sentence.id for sentence in sample.sentences])
        centers = np.array(topics["centers"], dtype=np.float32).reshape(-1, rows.shape[1])  # of no topic, too
        sample.topics = dict(zip(map(tuple, topics["words"]), (rows @ centers.T).T, strict=True))
        sample.alike = rows @ rows.T
    return samples


def _made(store: Store) -> dict[str, Any]:
    """Return the words and the unit vector (K, D) of each topic."""
    import faiss

    sentences = [s for s in store.sentences.starting_at(0) if part_of(s.title) == "train"][:LEARNT]
    rows = _unit(store, [sentence.id for sentence in sentences])
    count = max(1, min(COUNT, len(rows) // 40))
    learner = faiss.Kmeans(rows.shape[1], count, niter=25, seed=1, spherical=True, max_points_per_centroid=LEARNT)
    learner.train(rows)
    centers = np.array(learner.centroids)
    nearest = (rows @ centers.T).argmax(1)
    vocabularies = [{word for word, _ in words(sentence.tokens)} for sentence in sentences]
    background = Counter(word for row in vocabularies for word in row)
    vocabularies = [{word for word in row if background[word] <= FREQUENT * len(vocabularies)} for row in vocabularies]
    total = sum(background.values())
    names = [
        tuple(
            distinctive(
                [w for row in np.flatnonzero(nearest == topic) for w in vocabularies[row]], background, total, WORDS
            )
        )
        for topic in range(count)
    ]
    able = [number for number, name in enumerate(names) if name]
    return {"words": [names[number] for number in able], "centers": centers[able].astype(float).round(5).tolist()}


def _unit(store: Store, sentences: list[int]) -> np.ndarray:
    """Return the vectors (S, D) of sentences less the corpus mean, at length 1; zeros for a sentence without vector."""
    known = dict(zip(*store.sentences.vectors(sentences), strict=True))
    center = store.vectors.center()
    rows = np.array([known[i].astype(np.float32) - center if i in known else 0 * center for i in sentences])
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-6)
