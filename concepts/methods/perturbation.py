"""Methods that change the input and look: many variants of a prompt in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from icebear.concepts.methods.common import ROWS, log_probability, value, without
from icebear.concepts.methods.method import Method
from icebear.concepts.models.model import Model
from icebear.concepts.models.objective import Objective
from icebear.concepts.passes.sites import hooks
from icebear.errors import InputError


@dataclass(frozen=True, repr=False)
class Occlusion(Method):
    """What the explained logit loses when a token's embedding is zero (Zeiler & Fergus 2014; leave one out)."""

    per_token = True

    def scores(self, model: Model, objective: Objective) -> list[Tensor]:
        rows = []
        for row in range(len(objective.positions)):
            count = len(objective.batch.columns(row))
            removed = torch.cat((torch.zeros(1, count), torch.eye(count))).bool()
            measured = without(model, objective, row, removed, value).float().cpu()
            rows.append(measured[0] - measured[1:])
        return rows


@dataclass(frozen=True, repr=False)
class AtMan(Method):
    """What the explained log-probability loses when attention to a token is scaled down (Deiseroth et al. 2023).

    A key times 1 - p is its column of scores times 1 - p.
    """

    p: float = 0.9

    per_token = True

    def scores(self, model: Model, objective: Objective) -> list[Tensor]:
        if model.task.stacks == 2:
            raise InputError(f"AtMan is for one stack of layers, not for {model.name}, an encoder-decoder.")
        modules = (name.rpartition(".")[2] for name, _ in model.layer_modules[0].named_modules())
        if {"k_norm", "k_layernorm"} & set(modules):
            raise InputError(f"{model.name} normalises its keys, so attention cannot be scaled by them.")
        return [_scaled_down(model, objective, row, self.p) for row in range(len(objective.positions))]

    def variants(self) -> Sequence[Method]:
        return [AtMan(p) for p in (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)]


def _scaled_down(model: Model, objective: Objective, row: int, p: float) -> Tensor:
    length = objective.batch.lengths[row]
    keys = [("k", layer) for layer in range(model.layers)]
    measured = []
    # The first variant is the prompt as it is.
    for part in torch.cat((torch.zeros(1, length), torch.eye(length))).split(ROWS):
        factor = (1 - p * part).to(model.device, model.dtype)[..., None]  # (N, T, 1)

        def scale(site: str, layer: int, x: Tensor, factor: Tensor = factor) -> Tensor:
            return x * factor

        with model.lock, torch.no_grad(), hooks(model, keys, scale):
            measured.append(log_probability(model, objective.rows([row] * len(part))))
    scores = torch.cat(measured).cpu()
    return scores[0] - scores[1:]
