"""A neuron at one polarity: what its labels are made from, and what they have to predict."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from icebear.actmax.labels import kinds, scores
from icebear.actmax.labels.evidence import TokenPlace, evidence
from icebear.actmax.labels.label import Label
from icebear.actmax.labels.sample import Sample, part_of, words
from icebear.actmax.labels.scores import Fires
from icebear.db.store import Store
from icebear.records import Example, Neuron

PROMOTED = 5
MARKED = 3


@dataclass(frozen=True)
class Side:
    """A neuron at a polarity, in each part of the documents."""

    neuron: Neuron
    polarity: str
    samples: dict[str, Sample]
    values: dict[str, np.ndarray]
    """part -> (N,) activations of its sample, of polarity ``-`` negated."""
    fired: dict[str, Fires]
    """part -> where it is most active; empty where the neuron is hardly active at this polarity."""
    places: tuple[TokenPlace, ...]
    """Its examples in the index, of the documents to train on."""
    marked: tuple[str, ...]
    """The words that the relevance of annotated examples finds in at least two of them, beside the token itself."""
    promoted: tuple[str, ...]
    """Tokens that it promotes; none of a site that does not write."""

    @classmethod
    def of(cls, neuron: Neuron, polarity: str, samples: dict[str, Sample], values: dict[str, np.ndarray]) -> Side:
        """Without what an index knows."""
        return cls(neuron, polarity, samples, values, _fired(samples, values), (), (), ())

    @property
    def train(self) -> list[tuple[Sample, np.ndarray]]:
        """Samples and values of the parts that are not reported on."""
        return [(self.samples[part], self.values[part]) for part in ("train", "validation")]

    def candidates(self) -> list[Label]:
        """What the neuron may mean."""
        sample, values = self.samples["train"], self.values["train"]
        return kinds.candidates(evidence(sample, values, self.places, self.marked, self.promoted))

    def shifted(self, seed: str) -> Side:
        """Its activations moved onto other documents, in their order; and as many examples, anywhere."""
        name = f"{self.neuron} {self.polarity} {seed}"
        generator = np.random.default_rng(list(hashlib.blake2b(name.encode(), digest_size=16).digest()))
        values = {part: _moved(sample, self.values[part], generator) for part, sample in self.samples.items()}
        moved = replace(self, values=values, fired=_fired(self.samples, values), marked=())
        if not moved.fired:
            return moved
        sample = self.samples["train"]
        rows = generator.choice(np.flatnonzero(sample.counted), len(self.places))
        return replace(moved, places=tuple(sample.place(row) for row in rows))


def sides(
    store: Store, samples: dict[str, Sample], neurons: Sequence[Neuron], activations: dict[str, np.ndarray]
) -> Iterator[Side]:
    """Both polarities of each neuron. activations: part -> (P, N)."""
    for row, neuron in enumerate(neurons):
        promoted = _promoted(store, neuron)
        for polarity, values in both_polarities(activations, row):
            side = Side.of(neuron, polarity, samples, values)
            examples = _examples(store, side)
            places = tuple((example.sentence.tokens, example.token) for example in examples)
            yield replace(side, places=places, marked=_marked(examples), promoted=promoted[polarity])


def both_polarities(activations: dict[str, np.ndarray], row: int) -> list[tuple[str, dict[str, np.ndarray]]]:
    """polarity and values of one of the neurons."""
    return [(p, {part: sign * x[row] for part, x in activations.items()}) for p, sign in (("+", 1), ("-", -1))]


def _fired(samples: dict[str, Sample], values: dict[str, np.ndarray]) -> dict[str, Fires]:
    fired = {part: scores.fires(sample, values[part]) for part, sample in samples.items()}
    active = {part: one for part, one in fired.items() if one is not None}
    return active if len(active) == len(fired) else {}


def _moved(sample: Sample, values: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    count, moved = int(sample.counted.sum()), values.copy()
    moved[sample.counted] = np.roll(values[sample.counted], int(generator.integers(count // 4, 3 * count // 4)))
    return moved


def _examples(store: Store, side: Side) -> list[Example]:
    """Of the documents to train on; none of a head, which no index has."""
    if side.neuron.site == "head":
        return []
    examples = store.examples(side.neuron, side.polarity)
    return [example for example in examples if part_of(example.sentence.title) == "train"]


def _marked(examples: Sequence[Example]) -> tuple[str, ...]:
    counts: Counter[str] = Counter()
    for example in examples:
        if example.relevance is not None:
            shares = {
                word: example.relevance[end]
                for word, end in words(example.sentence.tokens)
                if end < example.token and example.relevance[end] > 0
            }
            counts.update(sorted(shares, key=lambda word: -shares[word])[:MARKED])
    return tuple(word for word, count in counts.most_common(MARKED) if count > 1)


def _promoted(store: Store, neuron: Neuron) -> dict[str, tuple[str, ...]]:
    if neuron.site not in ("ffn", "attn"):
        return {"+": (), "-": ()}
    projection = store.vocabulary(neuron, PROMOTED)
    ends = (("+", projection.promoted), ("-", projection.suppressed))
    return {polarity: tuple(token.text for token in tokens) for polarity, tokens in ends}
