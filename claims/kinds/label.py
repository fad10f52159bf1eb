"""The score of a label on held-out documents."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from icebear.actmax.labels.kinds import Label
from icebear.actmax.labels.sample import Sample, prepare_samples, read_activations
from icebear.actmax.labels.scores import label_auroc, top_activations
from icebear.claims.kind import Kind, Measured, others_of
from icebear.concepts.statistics import auroc_error
from icebear.db.store import open_store
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.records import Neuron

OTHERS = 8


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
        _check_tokens(sample, model)
        neurons = [model.check(self.neuron), *others_of(model, self.neuron, seed, OTHERS)]
        activations = read_activations(model, sample, neurons) * (1 if self.polarity == "+" else -1)
        each = [top_activations(sample, row) for row in activations]
        own, *others = [label_auroc(self.label, one)[self.by] if one.active else 0.5 for one in each]
        units = each[0].tokens if self.by == "token" else each[0].sentences
        positive = max(1, int(units.sum()))
        return Measured(own, fmean(others), auroc_error(own, positive, len(units) - positive))

    def __str__(self) -> str:
        return f"{self.neuron} {self.polarity}: {self.text}"


def _check_tokens(sample: Sample, model: Model) -> None:
    if any(len(ids) != len(sentence.tokens) for ids, sentence in zip(sample.ids, sample.sentences, strict=True)):
        raise InputError(f"{model.name} has another tokenizer than the store; build a store of {model.name}.")
