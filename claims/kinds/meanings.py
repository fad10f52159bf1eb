"""Claims about what neurons mean: a label, a concept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from math import sqrt
from statistics import fmean
from typing import Any, Literal

import numpy as np

from icebear.actmax.labels.kinds import Label
from icebear.actmax.labels.sample import prepare_samples, read_activations
from icebear.actmax.labels.scores import label_aurocs, label_truth, top_activations
from icebear.claims.kind import Draft, Kind, Measured, others_of
from icebear.concepts.statistics import auroc, auroc_error
from icebear.convert import CONVERTER
from icebear.db.store import open_store
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.records import AutomaticLabel, Neuron, sign_of
from icebear.steering.concept.concept import Concept
from icebear.steering.concept.detectors import ConceptNeuron, ConceptVector
from icebear.steering.concept.reading import read
from icebear.steering.monitor.monitor import Monitor
from icebear.steering.monitor.text_values import Unit, interval, text_values

OTHERS = 8
"""Random neurons that a label is scored on."""
SETS = 5
"""Random sets of neurons that a concept is compared with."""


@dataclass(frozen=True)
class LabelClaim(Kind):
    """A label of a neuron has this AUROC on the test documents of a store. The control is the mean AUROC of the same
    label for random other neurons of its layer."""

    store: str
    neuron: Neuron
    polarity: Literal["+", "-"]
    text: str
    label: Label
    by: Literal["token", "sentence", "pattern"]
    kind = "label"
    value_is = "AUROC of the label on test documents"
    control_is = "the mean AUROC of the label for other neurons of the layer"

    def measured(self, model: Model, seed: int = 0) -> Measured:
        with open_store(self.store) as store:
            sample = prepare_samples(model, store, seed)["test"]
        if any(len(ids) != len(row.tokens) for ids, row in zip(sample.ids, sample.sentences, strict=True)):
            raise InputError(f"{model.name} has another tokenizer than the store; build a store of {model.name}.")
        if self.label.kind == "topic" and self.label.items not in sample.topics:
            raise InputError(f"{self.store} was built again and has other topics; label {self.neuron} again.")
        neurons = [model.check(self.neuron), *others_of(model, self.neuron, seed, OTHERS)]
        activations = read_activations(model, sample, neurons) * sign_of(self.polarity)
        top = top_activations(sample, activations[:, sample.counted])
        aurocs = label_aurocs([self.label], self.by, top)[:, 0]
        score, *others = np.where(top.active, aurocs, 0.5).tolist()
        true = label_truth([self.label], sample).tokens[0]
        units = {"token": top.tokens[0], "sentence": top.sentences[0], "pattern": true}[self.by]
        positive = max(1, int(units.sum()))
        return Measured(score, fmean(others), auroc_error(score, positive, len(units) - positive))

    @classmethod
    def of(cls, path: str, meanings: Iterable[AutomaticLabel]) -> list[Draft]:
        """Return the claims of labels with a score."""
        drafts: list[Draft] = []
        for meaning in meanings:
            if meaning.record and meaning.score > 0.5:
                label = CONVERTER.structure(meaning.record["label"], Label)
                facts: Any = (meaning.neuron, meaning.polarity, meaning.text, label, meaning.by)
                drafts.append((cls(path, *facts), None))
        return drafts

    def __str__(self) -> str:
        return f"{self.neuron} {self.polarity}: {self.text}"


@dataclass(frozen=True)
class ConceptClaim(Kind):
    """The neurons of a concept separate `examples` from `others` (texts that did not choose them) with this AUROC. The
    control is that of random other neurons of the same layers, in either direction."""

    name: str
    parts: tuple[ConceptNeuron, ...]
    examples: tuple[str, ...]
    others: tuple[str, ...]
    kind = "concept"
    value_is = "AUROC of the concept"
    control_is = "the mean AUROC of random neurons of the same layers"

    def measured(self, model: Model, seed: int = 0) -> Measured:
        if not (self.parts and self.examples and self.others):
            raise InputError("A claim of a concept needs neurons, and texts with and without the concept; add them.")
        neurons = [model.check(part.neuron) for part in self.parts]
        drawn = [others_of(model, neuron, seed + number, SETS) for number, neuron in enumerate(neurons)]
        sets = list(zip(*drawn, strict=False))
        seen = read(model, [*self.examples, *self.others], [*neurons, *chain(*sets)])
        positive = np.arange(len(seen.means)) < len(self.examples)
        weights = np.array([part.sign * part.weight / part.std for part in self.parts])
        count = len(neurons)
        score = auroc(seen.means[:, :count] @ weights, positive)
        random = []
        for start in range(count, seen.means.shape[1], count):
            values = seen.means[:, start : start + count]
            spread = values[~positive].std(0)
            standard = (values / np.where(spread > 0, spread, 1)) @ np.sign(weights)
            random.append(0.5 + abs(auroc(standard, positive) - 0.5))
        error = auroc_error(score, len(self.examples), len(self.others))
        return Measured(score, fmean(random) if random else 0.5, error)

    @classmethod
    def of(cls, concept: Concept) -> list[Draft]:
        """Return the claim of a concept on the texts that test it. Raises `InputError` if there are none."""
        return [(cls(concept.name, concept.parts, *tests_of(concept)), None)]

    def __str__(self) -> str:
        return f"{self.name} by {len(self.parts)} neurons on {len(self.examples)} and {len(self.others)} texts"


@dataclass(frozen=True)
class MonitorClaim(Kind):
    """A monitor flags this share of `examples`, texts with its concept that did not find it. The control is the share
    of `others`, texts without the concept, that it flags. It breaks the claim if it is surely larger than
    `false_positive_rate`, the upper limit of the monitor."""

    name: str
    unit: Unit
    threshold: float
    false_positive_rate: float
    neurons: tuple[ConceptNeuron, ...]
    examples: tuple[str, ...]
    others: tuple[str, ...]
    vector: ConceptVector | None = None
    kind = "monitor"
    value_is = "share of texts with the concept that are flagged"
    control_is = "the share of texts without the concept that are flagged"

    def measured(self, model: Model, seed: int = 0) -> Measured:
        if not (self.examples and self.others and (self.vector or self.neurons)):
            raise InputError("A claim of a monitor needs a detector, and texts with and without the concept; add them.")
        detector = self.vector or self.neurons
        flagged = text_values(model, [detector], [*self.examples, *self.others], self.unit)[0] > self.threshold
        with_it, without = flagged[: len(self.examples)], flagged[len(self.examples) :]
        value, control = float(with_it.mean()), float(without.mean())
        why = ""
        if interval(int(without.sum()), len(without))[0] > self.false_positive_rate:
            limit = self.false_positive_rate
            why = f"It flags {control:.0%} of the texts without the concept, more than {limit:.0%}."
        return Measured(value, control, sqrt(value * (1 - value) / len(with_it)), why)

    @classmethod
    def of(cls, monitor: Monitor, concept: Concept) -> list[Draft]:
        """Return the claim of a monitor on the texts that test its concept. Raises `InputError` if there are none."""
        numbers = monitor.name, monitor.unit, monitor.threshold, monitor.interval[1]
        return [(cls(*numbers, monitor.neurons, *tests_of(concept), monitor.vector), None)]

    def __str__(self) -> str:
        return f"{self.name} above {self.threshold:.2f} in a {self.unit}"


def tests_of(concept: Concept) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if concept.texts is None:
        raise InputError(f"The concept {concept.name!r} has no texts to claim; find it again from texts.")
    return concept.texts.tests()
