"""Baselines from plain gradients, and random numbers."""

from __future__ import annotations

import hashlib
from functools import partial

import torch
from torch import Tensor

from icebear.concepts.baselines.methods import Gradient, IntegratedGradients, Random, SmoothGrad
from icebear.concepts.lrp.method import PA_LRP
from icebear.concepts.lrp.positions import Sinks, over_layers
from icebear.concepts.models.model import Model
from icebear.concepts.models.plan import Plan
from icebear.concepts.passes.inputs import Change, Inputs
from icebear.concepts.passes.run import run
from icebear.concepts.passes.targets import Logits


def random(model: Model, plan: Plan, method: Random) -> list[Tensor]:
    found = []
    for row in range(len(plan.positions)):
        ids = plan.batch.row_ids(row)
        digest = hashlib.blake2b(f"{method.seed} {ids}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        found.append(torch.rand(len(ids), generator=generator))
    return found


def gradient(model: Model, plan: Plan, method: Gradient) -> list[Tensor]:
    return _by_row(plan, [torch.linalg.vector_norm(g, method.norm, -1) for _, g in _pass(model, plan)])


def gradient_times_input(model: Model, plan: Plan, method: object) -> list[Tensor]:
    return _by_row(plan, [(x * g).sum(-1) for x, g in _pass(model, plan)])


def integrated_gradients(model: Model, plan: Plan, method: IntegratedGradients) -> list[Tensor]:
    total: list[Tensor] = []
    for step in range(method.steps):
        share = (step + 0.5) / method.steps
        parts = [(x / share * g).sum(-1) for x, g in _pass(model, plan, partial(_scaled, share))]
        total = [a + b for a, b in zip(total, parts, strict=True)] if total else parts
    return _by_row(plan, [part / method.steps for part in total])


def smoothgrad(model: Model, plan: Plan, method: SmoothGrad) -> list[Tensor]:
    rows = [torch.Generator().manual_seed(method.seed) for _ in plan.positions]  # so that a batch is one by one
    batches = (plan.batch, plan.batch.decoder)
    total: list[Tensor] = []

    def noisy(stack: int, x: Tensor) -> Tensor:
        changed = x.clone()
        for row, length in enumerate(batches[stack].lengths):  # type: ignore[union-attr]
            own = x[row, :length]
            noise = torch.randn(own.shape, generator=rows[row]).to(x.device, x.dtype)
            changed[row, :length] = own + method.noise * own.std() * noise
        return changed

    plain = [x for x, _ in _pass(model, plan)]
    for _ in range(method.samples):
        parts = [(x * g).sum(-1) for x, (_, g) in zip(plain, _pass(model, plan, noisy), strict=True)]
        total = [a + b for a, b in zip(total, parts, strict=True)] if total else parts
    return _by_row(plan, [part / method.samples for part in total])


def positions(model: Model, plan: Plan, method: object) -> list[Tensor]:
    return [over_layers(positions) for _, positions in _pa_lrp(model, plan)]


def tokens_and_positions(model: Model, plan: Plan, method: object) -> list[Tensor]:
    return [tokens + over_layers(positions, "signed") for tokens, positions in _pa_lrp(model, plan)]


def _pa_lrp(model: Model, plan: Plan) -> list[tuple[Tensor, Tensor]]:
    """For each prompt the tokens' relevance (T,), and the positions' by layer (K, T)."""
    inputs, sinks = Inputs(), Sinks(model, plan.batch)
    run(model, Logits(plan), [inputs, sinks], PA_LRP)
    tokens = _by_row(plan, [relevance.sum(-1) for relevance in inputs.relevance()])
    return [(found, sinks.relevance[row][:, plan.batch.columns(row)].cpu()) for row, found in enumerate(tokens)]


def _pass(model: Model, plan: Plan, change: Change = lambda stack, x: x) -> list[tuple[Tensor, Tensor]]:
    """(embeddings, gradients), each (B, T, D), of each stack, at changed embeddings."""
    inputs = Inputs(change)
    run(model, Logits(plan), [inputs])
    return [(x.float(), g.float()) for x, g in zip(inputs.values, inputs.gradients, strict=True)]


def _by_row(plan: Plan, stacks: list[Tensor]) -> list[Tensor]:
    """The (B, T) of each stack as one (T,) for each prompt, without padding."""
    joined = torch.cat(stacks, 1).cpu()
    return [joined[row, plan.batch.columns(row)] for row in range(len(joined))]


def _scaled(share: float, stack: int, x: Tensor) -> Tensor:
    return share * x
