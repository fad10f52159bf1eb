"""Baselines that change the input and look: many variants of a prompt in one batch."""

from __future__ import annotations

import torch
from torch import Tensor

from icebear.concepts.baselines.common import ROWS, log_probability, value, without
from icebear.concepts.baselines.methods import AtMan
from icebear.concepts.models.model import Model
from icebear.concepts.models.plan import Plan
from icebear.concepts.passes.sites import visiting
from icebear.errors import InputError


def occlusion(model: Model, plan: Plan, method: object) -> list[Tensor]:
    found = []
    for row in range(len(plan.positions)):
        count = len(plan.batch.columns(row))
        removed = torch.cat((torch.zeros(1, count), torch.eye(count))).bool()
        measured = without(model, plan, row, removed, value).float().cpu()
        found.append(measured[0] - measured[1:])
    return found


def atman(model: Model, plan: Plan, method: AtMan) -> list[Tensor]:
    if model.task.stacks == 2:
        raise InputError(f"AtMan is for one stack of layers, not for {model.name}, an encoder-decoder.")
    if any(name.rpartition(".")[2] in ("k_norm", "k_layernorm") for name, _ in model.layer_modules[0].named_modules()):
        raise InputError(f"{model.name} normalises its keys, so attention cannot be scaled by them.")
    return [_atman(model, plan, row, method.p) for row in range(len(plan.positions))]


def _atman(model: Model, plan: Plan, row: int, p: float) -> Tensor:
    length = plan.batch.lengths[row]
    keys = [("k", layer) for layer in range(model.layers)]
    found = []
    # The first variant is the prompt as it is.
    for part in torch.cat((torch.zeros(1, length), torch.eye(length))).split(ROWS):
        factor = (1 - p * part).to(model.device, model.dtype)[..., None]  # (N, T, 1)

        def scale(site: str, layer: int, x: Tensor, factor: Tensor = factor) -> Tensor:
            return x * factor

        with model.lock, torch.no_grad(), visiting(model, keys, scale):
            found.append(log_probability(model, plan.repeated(row, len(part))))
    measured = torch.cat(found).cpu()
    return measured[0] - measured[1:]
