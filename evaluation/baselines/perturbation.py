"""Methods that change the input and measure the effect: many variants of a prompt in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from icebear.concepts.methods.common import explained_numbers, log_probability, measure_variants, measure_without
from icebear.concepts.methods.method import Method
from icebear.concepts.passes.sites import hooks
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.models.objective import Objective


@dataclass(frozen=True, repr=False)
class Occlusion(Method):
    """The decrease of the explained logit when the embedding of a token is zero (Zeiler & Fergus 2014)."""

    per_token = True

    def scores(self, model: Model, objective: Objective) -> list[Tensor]:
        rows = []
        for row in range(len(objective.positions)):
            count = len(objective.batch.columns(row))
            measured = measure_without(model, objective, row, _each_token(count), explained_numbers)
            rows.append((measured[0] - measured[1:]).float().cpu())
        return rows


@dataclass(frozen=True, repr=False)
class AtMan(Method):
    """The decrease of the explained log-probability when attention to a token is scaled down (Deiseroth et al. 2023).

    A key times 1 - p scales its column of attention scores by 1 - p.
    """

    p: float = 0.9

    per_token = True

    def scores(self, model: Model, objective: Objective) -> list[Tensor]:
        if model.task.stacks == 2:
            raise InputError(f"AtMan does not support encoder-decoders such as {model.name}; choose another method.")
        modules = (name.rpartition(".")[2] for name, _ in model.layer_modules[0].named_modules())
        if {"k_norm", "k_layernorm"} & set(modules):
            raise InputError(f"{model.name} normalizes its keys, so AtMan does not work; choose another method.")
        keys = [("k", layer) for layer in range(model.layers)]
        scale = lambda part: hooks(model, keys, lambda site, layer, x: x * (1 - self.p * part[..., None]).to(x))  # noqa: E731
        rows = []
        for row, length in enumerate(objective.batch.lengths):
            measured = measure_variants(model, objective, row, _each_token(length), log_probability, scale).cpu()
            rows.append(measured[0] - measured[1:])
        return rows

    def variants(self) -> Sequence[Method]:
        return [AtMan(p) for p in (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)]


def _each_token(count: int) -> Tensor:
    """Return masks (1 + T, T) of no token, and of each token alone."""
    return torch.cat((torch.zeros(1, count), torch.eye(count))).bool()
