"""A neuron at one polarity: the evidence for its labels, and the activations that they must predict."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from icebear.actmax.labels import kinds, scores
from icebear.actmax.labels.kinds import Evidence, Label
from icebear.actmax.labels.sample import Sample, part_of
from icebear.actmax.labels.scores import TopActivations
from icebear.db.store import Store
from icebear.records import Neuron

PROMOTED = 5


@dataclass(frozen=True)
class Side:
    """A neuron at a polarity, in each part of the documents."""

    neuron: Neuron
    polarity: str
    fired: dict[str, TopActivations]
    """part -> the activations in its sample; negated for polarity ``-``."""
    evidence: Evidence

    @property
    def active(self) -> bool:
        """Whether the neuron is active at this polarity in each part."""
        return all(one.active for one in self.fired.values())

    def candidates(self) -> list[Label]:
        return [label for kind in kinds.KINDS.values() for label in kind.candidates(self.evidence)]

    def shifted(self, seed: str) -> Side:
        """Return the neuron with circularly shifted activations, and random tokens as its examples."""
        name = f"{self.neuron} {self.polarity} {seed}"
        generator = np.random.default_rng(list(hashlib.blake2b(name.encode(), digest_size=16).digest()))
        fired = {}
        for part, one in self.fired.items():
            moved, counted = one.values.copy(), one.sample.counted
            count = int(counted.sum())
            moved[counted] = np.roll(moved[counted], int(generator.integers(count // 4, 3 * count // 4)))
            fired[part] = scores.top_activations(one.sample, moved)
        sample, evidence = fired["train"].sample, self.evidence
        rows = generator.choice(np.flatnonzero(sample.counted), len(evidence.examples))
        examples = tuple(sample.place(row) for row in rows)
        evidence = replace(evidence, values=fired["train"].values, examples=examples)
        return replace(self, fired=fired, evidence=evidence)


def sides(
    store: Store, samples: dict[str, Sample], neurons: Sequence[Neuron], activations: dict[str, np.ndarray]
) -> Iterator[Side]:
    """Yield both polarities of each neuron. activations: part -> (P, N)."""
    for row, neuron in enumerate(neurons):
        projection = store.vocabulary(neuron, PROMOTED) if neuron.site in ("ffn", "attn", "mixer") else None
        promoted = {"+": projection.promoted, "-": projection.suppressed} if projection else {"+": (), "-": ()}
        for polarity, sign in (("+", 1), ("-", -1)):
            fired = {
                part: scores.top_activations(sample, sign * activations[part][row]) for part, sample in samples.items()
            }
            examples = store.examples(neuron, polarity) if neuron.site != "head" else []  # an index has no heads
            examples = [example for example in examples if part_of(example.sentence.title) == "train"]
            places = tuple((example.sentence.tokens, example.token) for example in examples)
            train, writes = fired["train"], tuple(token.text for token in promoted[polarity])
            evidence = Evidence(train.sample, train.values, places, writes)
            yield Side(neuron, polarity, fired, evidence)
