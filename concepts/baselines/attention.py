"""Baselines from attention maps, one stack of layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from concepts.attribution import embedding_leaf
from concepts.baselines.common import places
from concepts.models import tasks
from concepts.models.model import Model
from concepts.models.tasks import Plan
from icebear.errors import InputError


def rollout(model: Model, plan: Plan, method: object) -> list[Tensor]:
    maps, _ = _attention(model, plan)
    joint = torch.eye(maps[0].shape[-1], device=maps[0].device)
    for attention in maps:
        mean = attention.mean(1)  # (B, T, T)
        joint = (mean + torch.eye(mean.shape[-1], device=mean.device)) / 2 @ joint
    return _rows(plan, joint)


def gradient_rollout(model: Model, plan: Plan, method: object) -> list[Tensor]:
    maps, gradients = _attention(model, plan)
    joint = torch.eye(maps[0].shape[-1], device=maps[0].device).expand(len(maps[0]), -1, -1)
    for attention, gradient in zip(maps, gradients, strict=True):
        joint = joint + (attention * gradient).clamp(min=0).mean(1) @ joint
    own = torch.eye(joint.shape[-1], device=joint.device)
    return _rows(plan, joint - own)


def gradcam(model: Model, plan: Plan, method: object) -> list[Tensor]:
    maps, gradients = _attention(model, plan)
    parts = zip(gradients[-1], plan.batch.lengths, strict=True)  # without padding
    weights = torch.stack([g[:, :n, :n].mean((-1, -2), keepdim=True) for g, n in parts])  # (B, H, 1, 1)
    return _rows(plan, (weights * maps[-1]).mean(1).clamp(min=0))


def _attention(model: Model, plan: Plan) -> tuple[list[Tensor], list[Tensor]]:
    """Attention maps (B, H, T, T) of each layer in float32, and their gradients."""
    if model.task == "seq2seq":
        raise InputError(f"The attention maps of {model.name}, an encoder-decoder, are not one chain of layers.")
    with model.lock, eager(model), torch.enable_grad(), embedding_leaf(model):
        output = model.forward(plan.batch, output_attentions=True)
        _, explained = tasks.explained(plan, tasks.at(output.logits, places(plan)), places(plan))
        gradients = torch.autograd.grad(explained.sum(), output.attentions)
    return [x.detach().float() for x in output.attentions], [g.float() for g in gradients]


def _rows(plan: Plan, joint: Tensor) -> list[Tensor]:
    """Rows of (B, T, T) at the positions explained, summed."""
    return [
        joint[row, list(at)].sum(0)[: plan.batch.lengths[row]].cpu() for row, at in enumerate(plan.positions)
    ]  # fmt: skip


@contextmanager
def eager(model: Model) -> Iterator[None]:
    """Fused attention gives no maps."""
    before = model.net.config._attn_implementation
    model.net.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.net.set_attn_implementation(before)
