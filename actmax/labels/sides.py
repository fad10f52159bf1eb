"""Sides: neurons, each at a polarity, with their activations in the samples of all documents, and their best labels."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from icebear.actmax.labels.choice import Candidates, Chosen, best_of, better_of
from icebear.actmax.labels.kinds import Label
from icebear.actmax.labels.patterns import best_patterns
from icebear.actmax.labels.sample import Sample
from icebear.actmax.labels.scores import TopActivations, label_truth, top_activations
from icebear.records import POLARITIES, Neuron


@dataclass(frozen=True, eq=False)
class Sides:
    """P neurons, each at a polarity, in each part of the documents."""

    names: Sequence[tuple[Neuron, str]]
    """Neuron and polarity."""
    top: dict[str, TopActivations]
    """part -> the activations in its sample; negated for polarity ``-``."""

    @cached_property
    def active(self) -> np.ndarray:
        """(P,) whether a neuron is active at this polarity in each part."""
        return np.all([top.active for top in self.top.values()], axis=0)

    @property
    def candidates(self) -> list[Label]:
        return [Label("topic", words) for words in self.top["train"].sample.topics]

    def best(self) -> list[Candidates]:
        """Return the best label of each side by each unit, a topic or a token pattern; those of a side that is hardly
        active say nothing."""
        train, validation = self.top["train"], self.top["validation"]
        topics, patterns = best_of(self.candidates, validation), best_patterns(train, validation)
        return [
            {**best, "pattern": pattern} if pattern else best for best, pattern in zip(topics, patterns, strict=True)
        ]

    def choose(self) -> list[Chosen]:
        """Return the best label of each side."""
        return [better_of(best, self.top, row) for row, best in enumerate(self.best())]

    def shifted(self, seed: str) -> Sides:
        """Return the neurons with circularly shifted activations."""
        generators = []
        for neuron, polarity in self.names:
            digest = hashlib.blake2b(f"{neuron} {polarity} {seed}".encode(), digest_size=16).digest()
            generators.append(np.random.default_rng(list(digest)))
        shifted = {}
        for part, top in self.top.items():
            count = top.values.shape[1]
            steps = [int(generator.integers(count // 4, 3 * count // 4)) for generator in generators]
            moved = [np.roll(row, step) for row, step in zip(top.values, steps, strict=True)]
            shifted[part] = top_activations(top.sample, np.array(moved))
        return Sides(self.names, shifted)


def sides(samples: dict[str, Sample], neurons: Sequence[Neuron], activations: dict[str, np.ndarray]) -> Sides:
    """Return both polarities of each neuron. activations: part -> (P, N)."""
    names = [(neuron, polarity) for neuron in neurons for polarity in POLARITIES]
    signs = np.array([[1], [-1]], dtype=np.float32)
    top = {}
    for part, sample in samples.items():
        values = activations[part][:, None, sample.counted] * signs  # (P, 2, C)
        top[part] = top_activations(sample, values.reshape(len(names), -1))
    return Sides(names, top)


def true_share(label: Label, sides: Sides) -> float:
    """Return the share of validation tokens where the label is true."""
    return float(label_truth([label], sides.top["validation"].sample).tokens.mean())
