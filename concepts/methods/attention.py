"""Methods from attention maps, one stack of layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from icebear.concepts.methods.method import Method
from icebear.concepts.models.model import Model, at
from icebear.concepts.models.objective import Objective
from icebear.concepts.passes.inputs import Inputs
from icebear.concepts.passes.run import forward_backward
from icebear.errors import InputError


@dataclass(frozen=True, repr=False)
class AttentionRollout(Method):
    """The product over layers of attention (mean of heads) and the residual stream (Abnar & Zuidema 2020)."""

    per_token = True

    def scores(self, model: Model, objective: Objective) -> list[Tensor]:
        maps, _ = _attention(model, objective)
        joint = torch.eye(maps[0].shape[-1], device=maps[0].device)
        for attention in maps:
            mean = attention.mean(1)  # (B, T, T)
            joint = (mean + torch.eye(mean.shape[-1], device=mean.device)) / 2 @ joint
        return _rows(objective, joint)


@dataclass(frozen=True, repr=False)
class GradientRollout(Method):
    """R + mean(gradient x attention)+ R from layer to layer, from R = 1 (Chefer et al. 2021b, "G x AttnRollout")."""

    per_token = True

    def scores(self, model: Model, objective: Objective) -> list[Tensor]:
        maps, gradients = _attention(model, objective)
        joint = torch.eye(maps[0].shape[-1], device=maps[0].device).expand(len(maps[0]), -1, -1)
        for attention, gradient in zip(maps, gradients, strict=True):
            joint = joint + (attention * gradient).clamp(min=0).mean(1) @ joint
        return _rows(objective, joint - torch.eye(joint.shape[-1], device=joint.device))


@dataclass(frozen=True, repr=False)
class GradCAM(Method):
    """The last layer's attention, its heads weighed by their mean gradient, above zero (Chefer et al. 2021)."""

    per_token = True

    def scores(self, model: Model, objective: Objective) -> list[Tensor]:
        maps, gradients = _attention(model, objective)
        parts = zip(gradients[-1], objective.batch.lengths, strict=True)  # without padding
        weights = torch.stack([g[:, :n, :n].mean((-1, -2), keepdim=True) for g, n in parts])  # (B, H, 1, 1)
        return _rows(objective, (weights * maps[-1]).mean(1).clamp(min=0))


class _Maps:
    """The number of an objective, from a pass that records attention maps (B, H, T, T) and their gradients."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.leaves: tuple[Tensor, ...] = ()
        self.gradients: list[Tensor] = []

    def reading(self, model: Model) -> AbstractContextManager[None]:
        return nullcontext()

    def numbers(self, model: Model) -> Tensor:
        output = model.task.forward(model, self.objective.batch, output_attentions=True)
        self.leaves = output.attentions
        return self.objective.evaluate(at(output.logits, self.objective.all_positions))[1]

    def finish(self, gradients: Sequence[Tensor | None]) -> None:
        self.gradients = [torch.zeros_like(x) if g is None else g for x, g in zip(self.leaves, gradients, strict=True)]


def _attention(model: Model, objective: Objective) -> tuple[list[Tensor], list[Tensor]]:
    """Attention maps (B, H, T, T) of each layer in float32, and their gradients."""
    if model.task.stacks == 2:
        raise InputError(f"The attention maps of {model.name}, an encoder-decoder, are not one chain of layers.")
    maps = _Maps(objective)
    with eager(model):
        forward_backward(model, maps, [Inputs(), maps])
    return [x.detach().float() for x in maps.leaves], [g.float() for g in maps.gradients]


def _rows(objective: Objective, joint: Tensor) -> list[Tensor]:
    """Rows of (B, T, T) at the positions explained, summed."""
    return [
        joint[row, list(places)].sum(0)[: objective.batch.lengths[row]].cpu()
        for row, places in enumerate(objective.positions)
    ]


@contextmanager
def eager(model: Model) -> Iterator[None]:
    """Fused attention gives no maps."""
    before = model.net.config._attn_implementation
    model.net.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.net.set_attn_implementation(before)
