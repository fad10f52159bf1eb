"""Seeded samples of train, validation and test sentences from the documents of an index, and their topics: groups of
sentences with similar vectors, named by their words. The activations of neurons at their tokens."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from icebear.actmax.reading import counted_length
from icebear.concepts.passes.run import first_layers
from icebear.concepts.passes.sites import by_site_layer, eager, hooks
from icebear.db.store import Store
from icebear.db.vectors import unit
from icebear.errors import StoreError
from icebear.models.model import Model
from icebear.records import Neuron, Sentence
from icebear.values import stable_hash

SPLITS = ("train", "validation", "test")
SENTENCES = {"train": 300, "validation": 300, "test": 600}
"""The number of sentences of each part. One forward pass over them serves all neurons."""
SHORTEST = 4
"""A sentence of a sample has more counted tokens than this."""
SENTENCES_PER_PASS = 32
TOPICS = 48
TOPIC_SENTENCES = 20_000
"""The largest number of sentences to cluster."""
TOPIC_WORDS = 4
DISTINCT = 1.96
"""The z-score of its log-odds from which a term is typical."""
FREQUENT = 0.05
"""The share of sentences above which a word cannot name a topic."""

_WORD = re.compile(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)?")
SampleRow = tuple[Sentence, list[int], int]
"""A sentence, its token ids, and its length without special tokens at the end."""


def split_of(title: str) -> str:
    """Return the part of a document, which depends only on its title."""
    return SPLITS[stable_hash(f"part {title}") % 3]


class Sample:
    """Sentences as flat arrays over all their tokens (N,)."""

    def __init__(self, rows: Sequence[SampleRow], codes: dict[str, int]) -> None:
        """codes: integer codes of tokens (in lower case, with their space), which all parts share."""
        self.sentences, self.ids, self.codes = [row[0] for row in rows], [row[1] for row in rows], codes
        counted, ids = [row[2] for row in rows], self.ids
        lengths = np.array([len(row) for row in ids])
        self.ends = lengths.cumsum()
        self.starts = self.ends - lengths
        self.sentence = np.repeat(np.arange(len(ids)), lengths)
        """The index of the sentence of each token."""
        self.position = np.arange(len(self.sentence)) - self.starts[self.sentence]
        self.counted = (self.position > 0) & (self.position < np.repeat(counted, lengths))
        self.weights = np.bincount(self.sentence[self.counted], minlength=len(ids))
        """The number of counted tokens of each sentence."""
        pieces = (piece.lower() for sentence in self.sentences for piece in sentence.tokens)
        self.token = np.array([codes.setdefault(piece, len(codes)) for piece in pieces])
        self.topics: dict[tuple[str, ...], np.ndarray] = {}
        """The words of a topic -> its cosine with each sentence (S,)."""
        self.vectors = np.zeros((len(ids), 0), dtype=np.float32)
        """(S, D) the vectors of the sentences, of length 1."""
        self.described: dict[tuple[str, ...], np.ndarray] = {}
        """A description, by itself -> its cosine with each sentence (S,)."""
        self._beside: dict[int, np.ndarray] = {}
        self.seen: dict[Any, Any] = {}
        """topics -> `icebear.actmax.labels.scores.label_truth`, which all neurons share."""

    def __len__(self) -> int:
        return len(self.sentence)

    def beside(self, step: int) -> np.ndarray:
        """Return the code (N,) of the token `step` tokens after each token; -1 outside its sentence."""
        if step not in self._beside:
            codes, position = np.roll(self.token, -step), self.position + step
            inside = (position >= 0) & (position < (self.ends - self.starts)[self.sentence])
            self._beside[step] = np.where(inside, codes, -1)
        return self._beside[step]

    @cached_property
    def token_counts(self) -> np.ndarray:
        """How often each code is that of a counted token."""
        return np.bincount(self.token[self.counted], minlength=len(self.codes))

    def means(self, x: np.ndarray) -> np.ndarray:
        """Return the mean (K, S) over each sentence of x (K, C), which is at the counted tokens."""
        return np.add.reduceat(x, self._first_counted, axis=1, dtype=np.float64) / self.weights

    @cached_property
    def _first_counted(self) -> np.ndarray:
        """The first counted token of each sentence, among all counted ones."""
        return self.weights.cumsum() - self.weights


def words(text: str) -> set[str]:
    """Return the words of a text in lower case."""
    return {match[0].lower() for match in _WORD.finditer(text)}


def distinctive(items: Iterable[Any], background: Counter, total: int, k: int) -> list[Any]:
    """Return the k items that are most typical against the background, by the z-score of their log-odds (Monroe et
    al. 2008). Each occurs at least twice."""
    counts = Counter(items)
    terms = [term for term, count in counts.items() if count > 1]
    known = np.array([[counts[term], background[term]] for term in terms]).reshape(-1, 2).T
    z = dict(zip(terms, distinction(known[0], sum(counts.values()), known[1], total).tolist(), strict=True))
    return sorted((term for term in terms if z[term] > DISTINCT), key=lambda term: (-z[term], str(term)))[:k]


def distinction(counts: np.ndarray, size: Any, background: np.ndarray, total: int) -> np.ndarray:
    """Return the z-score of the log-odds of terms from their counts among `size` and, as background, among `total`."""
    odds = (counts + 0.5) / (size - counts + 0.5)
    other = (background + 0.5) / (total - background + 0.5)
    return np.log(odds / other) / np.sqrt(1 / (counts + 0.5) + 1 / (background + 0.5))


def prepare_samples(model: Model, store: Store, seed: int = 0) -> dict[str, Sample]:
    """Return a sample for each part, with the similarity of its sentences to each topic.

    Sentences are drawn by their ids, which are hashes, so all neurons share them. The topics of a store are made once:
    k-means clusters of the vectors of train sentences.

    Raises `StoreError` if the index has less than a quarter of the sentences of a part, or is of images.
    """
    store.check_texts("Labels are scored on sentences")
    limit, special = store.facts.get("max_tokens"), model.special_ids()
    rows: dict[str, list[SampleRow]] = {part: [] for part in SENTENCES}
    for sentence in store.sentences.starting_at(stable_hash(f"sample {seed}") >> 2):  # ids are a ring of 62 bits
        part = split_of(sentence.title)
        if len(rows[part]) < SENTENCES[part]:
            ids = model.token_ids(sentence.text, limit)
            counted = counted_length(ids, special)
            if counted > SHORTEST:
                rows[part].append((sentence, ids, counted))
        elif all(len(drawn) == SENTENCES[part] for part, drawn in rows.items()):
            break
    is_chosen = store.facts.find("from") == "neuronpedia"
    advice = "Name an index of other texts (--store)." if is_chosen else "Index more documents (--limit)."
    for part, drawn in rows.items():
        if 4 * len(drawn) < SENTENCES[part]:
            raise StoreError(
                f"{store.path} is too small to score labels: the {part} part has {len(drawn)} of {SENTENCES[part]} "
                f"sentences, and needs at least {-(-SENTENCES[part] // 4)}. {advice}"
            )
    codes: dict[str, int] = {}
    samples = {part: Sample(rows[part], codes) for part in rows}
    name = topics_name(store)
    if store.controls.get(name) is None:
        store.controls.set({name: _topics(store)})
    topics = store.controls.get(name)
    for sample in samples.values():
        vectors = sample.vectors = unit_vectors(store, [sentence.id for sentence in sample.sentences])
        centers = np.array(topics["centers"], dtype=np.float32).reshape(-1, vectors.shape[1])  # of no topic, too
        sample.topics = dict(zip(map(tuple, topics["words"]), (vectors @ centers.T).T, strict=True))
    return samples


def topics_name(store: Store) -> str:
    """Return the name of the topics in the store, which are of the vectors that it has."""
    encoder = store.facts.find("encoder")
    return f"topics {encoder['fingerprint'][:8]}" if encoder else "topics"


def _topics(store: Store) -> dict[str, Any]:
    """Return the words and the unit vector (K, D) of each topic."""
    import faiss

    sentences = [s for s in store.sentences.starting_at(0) if split_of(s.title) == "train"][:TOPIC_SENTENCES]
    rows = unit_vectors(store, [sentence.id for sentence in sentences])
    count = max(1, min(TOPICS, len(rows) // 40))
    learner = faiss.Kmeans(
        rows.shape[1], count, niter=25, seed=1, spherical=True, max_points_per_centroid=TOPIC_SENTENCES
    )
    learner.train(rows)
    centers = np.array(learner.centroids)
    nearest = (rows @ centers.T).argmax(1)
    vocabularies = [words("".join(sentence.tokens)) for sentence in sentences]
    background = Counter(word for row in vocabularies for word in row)
    vocabularies = [{word for word in row if background[word] <= FREQUENT * len(vocabularies)} for row in vocabularies]
    total = sum(background.values())
    names = []
    for topic in range(count):
        topic_words = [word for row in np.flatnonzero(nearest == topic) for word in vocabularies[row]]
        names.append(tuple(distinctive(topic_words, background, total, TOPIC_WORDS)))
    able = [number for number, name in enumerate(names) if name]
    return {"words": [names[number] for number in able], "centers": centers[able].astype(float).round(5).tolist()}


def unit_vectors(store: Store, sentences: list[int]) -> np.ndarray:
    """Return the vectors (S, D) that examples are compared by, less the mean, at length 1; zeros for a sentence without
    vector."""
    known = dict(zip(*store.sentence_vectors(sentences), strict=True))
    center = store.vectors.center()
    rows = np.array([known[i].astype(np.float32) - center if i in known else 0 * center for i in sentences])
    return unit(rows)


# --- activations at the tokens of a sample -------------------------------------------------------------------


def read_activations(
    model: Model,
    sample: Sample,
    neurons: Sequence[Neuron],
    advance: Callable[[int], None] = lambda sentences: None,
) -> np.ndarray:
    """Return the activations (P, N) of P neurons at the tokens of a sample.

    For heads, return the attention that each token gets, averaged over the later tokens of its sentence. Layers above
    the neurons are not computed.
    """
    for neuron in neurons:
        model.check(neuron)
    activations = np.zeros((len(neurons), len(sample)), dtype=np.float32)
    heads = neurons[0].site == "head"
    for part in model.batches_by_length(sample.ids, SENTENCES_PER_PASS):
        with ExitStack() as stack:  # for each batch, so that nobody waits longer
            stack.enter_context(model.lock)
            stack.enter_context(torch.no_grad())
            if model.task.stacks == 1:
                stack.enter_context(first_layers(model, 1 + max(neuron.layer for neuron in neurons)))
            if heads:
                stack.enter_context(eager(model))
            (_read_attention if heads else _read_neurons)(model, sample, neurons, part, activations)
        advance(len(part))
    return activations


def _read_neurons(
    model: Model, sample: Sample, neurons: Sequence[Neuron], part: list[int], activations: np.ndarray
) -> None:
    by_layer = by_site_layer(neurons)

    def visit(site: str, layer: int, x: Tensor) -> None:
        rows = by_layer[site, layer]
        values = x[..., [neurons[row].index for row in rows]].float().cpu().numpy()  # (B, T, P of the layer)
        for row, number in enumerate(part):
            span = slice(sample.starts[number], sample.ends[number])
            activations[rows, span] = values[row, : span.stop - span.start].T

    with hooks(model, by_layer, visit):
        model.final_stream(model.read([sample.ids[number] for number in part]))


def _read_attention(
    model: Model, sample: Sample, heads: Sequence[Neuron], part: list[int], activations: np.ndarray
) -> None:
    maps = model.task.forward(
        model, model.read([sample.ids[number] for number in part]), output_attentions=True
    ).attentions
    for row, number in enumerate(part):
        span = slice(sample.starts[number], sample.ends[number])
        count = span.stop - span.start
        later = torch.arange(count - 1, -1, -1).clamp(min=1)
        for index, head in enumerate(heads):
            weights = maps[head.layer][row, head.index, :count, :count].float().cpu()
            activations[index, span] = ((weights.tril(-1).sum(0)) / later).numpy()
