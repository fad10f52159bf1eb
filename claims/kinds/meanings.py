"""Claims about what neurons mean: a label, a concept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Any, Literal

import numpy as np

from icebear.actmax.labels.kinds import Label
from icebear.actmax.labels.sample import prepare_samples, read_activations
from icebear.actmax.labels.scores import label_auroc, top_activations
from icebear.claims.kind import Draft, Kind, Measured, others_of
from icebear.concepts.statistics import auroc, auroc_error
from icebear.convert import CONVERTER
from icebear.db.store import open_store
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.records import Meaning, Neuron
from icebear.steering.concept.concept import Concept, ConceptNeuron
from icebear.steering.concept.finding import prepared
from icebear.steering.concept.reading import read

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
    by: Literal["token", "sentence"]
    kind = "label"
    value_is = "AUROC of the label on test documents"
    control_is = "that for other neurons of the layer"

    def measure(self, model: Model, seed: int = 0) -> Measured:
        with open_store(self.store) as store:
            sample = prepare_samples(model, store, seed)["test"]
        if any(len(ids) != len(row.tokens) for ids, row in zip(sample.ids, sample.sentences, strict=True)):
            raise InputError(f"{model.name} has another tokenizer than the store; build a store of {model.name}.")
        neurons = [model.check(self.neuron), *others_of(model, self.neuron, seed, OTHERS)]
        activations = read_activations(model, sample, neurons) * (1 if self.polarity == "+" else -1)
        each = [top_activations(sample, row) for row in activations]
        score, *others = [label_auroc(self.label, top)[self.by] if top.active else 0.5 for top in each]
        units = each[0].tokens if self.by == "token" else each[0].sentences
        positive = max(1, int(units.sum()))
        return Measured(score, fmean(others), auroc_error(score, positive, len(units) - positive))

    @classmethod
    def of(cls, path: str, meanings: Iterable[Meaning]) -> list[Draft]:
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
    control_is = "that of random neurons of the same layers"

    def measure(self, model: Model, seed: int = 0) -> Measured:
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
    def of(cls, concept: Concept, examples: Sequence[str], others: Sequence[str], seed: int) -> list[Draft]:
        """Return the claim of a concept on the texts that test it."""
        texts, positive, part = prepared(examples, others, seed)
        tested = [number for number in range(len(texts)) if part[number] == 2]
        with_it, without = (tuple(texts[i] for i in tested if bool(positive[i]) is kind) for kind in (True, False))
        return [(cls(concept.name, concept.parts, with_it, without), None)]

    def __str__(self) -> str:
        return f"{self.name} by {len(self.parts)} neurons on {len(self.examples)} and {len(self.others)} texts"
