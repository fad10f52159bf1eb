"""How well a concept separates texts."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

import numpy as np

from icebear.claims.kind import Kind, Measured, others_of
from icebear.concepts.statistics import auroc, auroc_error
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.steering.concept.concept import ConceptNeuron
from icebear.steering.concept.reading import read

DRAWS = 5


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
        own = [model.check(part.neuron) for part in self.parts]
        drawn = [others_of(model, neuron, seed + place, DRAWS) for place, neuron in enumerate(own)]
        sets = list(zip(*drawn, strict=False))
        seen = read(model, [*self.examples, *self.others], [*own, *(neuron for some in sets for neuron in some)])
        positive = np.arange(len(seen.means)) < len(self.examples)
        weights = np.array([part.sign * part.weight / part.std for part in self.parts])
        count = len(own)
        score = auroc(seen.means[:, :count] @ weights, positive)
        random = []
        for start in range(count, seen.means.shape[1], count):
            values = seen.means[:, start : start + count]
            spread = values[~positive].std(0)
            standard = (values / np.where(spread > 0, spread, 1)) @ np.sign(weights)
            random.append(0.5 + abs(auroc(standard, positive) - 0.5))
        error = auroc_error(score, len(self.examples), len(self.others))
        return Measured(score, fmean(random) if random else 0.5, error)

    def __str__(self) -> str:
        return f"{self.name} by {len(self.parts)} neurons on {len(self.examples)} and {len(self.others)} texts"
