"""Plain gradients: gradient x input, and integrated gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from icebear.concepts.methods import common
from icebear.concepts.methods.method import Multiplying, OnePass, Point
from icebear.concepts.passes.inputs import InputHook, Inputs
from icebear.concepts.passes.run import Logits, forward_backward
from icebear.models.model import Model
from icebear.models.objective import Objective


@dataclass(frozen=True, repr=False)
class GradientTimesInput(OnePass):
    """Gradient x embedding (Denil et al. 2014)."""


@dataclass(frozen=True, repr=False)
class IntegratedGradients(Multiplying):
    """Gradient x embedding, averaged over the midpoints of equal steps from zero, or from a counterfactual, to the
    prompt (Sundararajan et al. 2017)."""

    steps: int = 10
    known_points: ClassVar[tuple[Point, ...]] = ("path",)
    far_note: ClassVar[str] = (
        ". The sum of the tokens is not this number: near zero, where the path begins, norms divide by almost nothing; "
        "compare with a counterfactual prompt"
    )

    @property
    def scores_neurons(self) -> bool:
        return self.needs_counterfactual

    def scores(self, model: Model, objective: Objective) -> list[Tensor]:
        steps = []
        for share in self.points():
            scaled = lambda stack, x, share=share: share * x  # noqa: E731
            steps.append([(x / share * g).sum(-1) for x, g in embedding_gradients(model, objective, scaled)])
        return common.by_row(objective, [torch.stack(step).mean(0) for step in zip(*steps, strict=True)])

    def points(self) -> list[float]:
        return [(step + 0.5) / self.steps for step in range(self.steps)]


def embedding_gradients(
    model: Model, objective: Objective, change: InputHook = lambda stack, x: x
) -> list[tuple[Tensor, Tensor]]:
    """Return embeddings and gradients (B, T, D) of each stack, at changed embeddings."""
    inputs = Inputs(change)
    forward_backward(model, Logits(objective), [inputs])
    return [(x.float(), g.float()) for x, g in zip(inputs.values, inputs.gradients, strict=True)]
