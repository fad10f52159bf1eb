"""All methods that evaluations compare, by name, and the baselines that only they know."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from icebear.concepts.methods import common
from icebear.concepts.methods.attnlrp import PA_LRP
from icebear.concepts.methods.common import explained_numbers, measure_without
from icebear.concepts.methods.method import Method
from icebear.concepts.methods.registry import METHODS, method_of
from icebear.concepts.passes.sites import eager
from icebear.errors import IcebearError, InputError
from icebear.lrp.positions import Reading
from icebear.models.model import Model
from icebear.models.objective import Objective, objective_of


@dataclass(frozen=True, repr=False)
class Random(Method):
    """Uniform random numbers, which depend only on the seed and the tokens."""

    seed: int = 0

    def scores(self, model: Model, objective: Objective) -> list[Tensor]:
        rows = []
        for row in range(len(objective.positions)):
            ids = objective.batch.row_ids(row)
            digest = hashlib.blake2b(f"{self.seed} {ids}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
            rows.append(torch.rand(len(ids), generator=generator))
        return rows


@dataclass(frozen=True, repr=False)
class Positions(Method):
    """The relevance of positions in all layers together (PA-LRP, Bakish et al. 2025).

    reading: how Eq. 11 sums over layers, ``relu`` or ``signed`` (`icebear.lrp.positions.over_layers`).
    tokens: whether to add the relevance of tokens, as ``pa-lrp`` does with ``relu``.
    """

    reading: Reading = "relu"
    tokens: bool = False

    def scores(self, model: Model, objective: Objective) -> list[Tensor]:
        return common.token_relevance(model, objective, PA_LRP, self.reading, self.tokens)


@dataclass(frozen=True, repr=False)
class AttentionRollout(Method):
    """The product over layers of attention (mean of heads) and the residual stream (Abnar & Zuidema 2020)."""

    def scores(self, model: Model, objective: Objective) -> list[Tensor]:
        maps = _attention(model, objective)
        joint = torch.eye(maps[0].shape[-1], device=maps[0].device)
        for attention in maps:
            mean = attention.mean(1)  # (B, T, T)
            joint = (mean + torch.eye(mean.shape[-1], device=mean.device)) / 2 @ joint
        return explained_rows(objective, joint)


@dataclass(frozen=True, repr=False)
class Occlusion(Method):
    """The decrease of the explained logit when the embedding of a token is zero (Zeiler & Fergus 2014)."""

    def scores(self, model: Model, objective: Objective) -> list[Tensor]:
        rows = []
        for row in range(len(objective.positions)):
            count = len(objective.batch.columns(row))
            measured = measure_without(model, objective, row, each_token(count), explained_numbers)
            rows.append((measured[0] - measured[1:]).float().cpu())
        return rows


def _attention(model: Model, objective: Objective) -> list[Tensor]:
    """Return the attention maps (B, H, T, T) of each layer in float32."""
    if model.task.stacks == 2:
        raise InputError(
            f"Methods of attention maps do not support encoder-decoders such as {model.name}; choose another method."
        )
    with model.lock, torch.no_grad(), eager(model):
        return [x.float() for x in model.task.forward(model, objective.batch, output_attentions=True).attentions]


def explained_rows(objective: Objective, joint: Tensor) -> list[Tensor]:
    """Return the sum of the rows of (B, T, T) at the explained positions."""
    rows = zip(joint, objective.positions, objective.batch.lengths, strict=True)
    return [matrix[list(positions)].sum(0)[:length].cpu() for matrix, positions, length in rows]


def each_token(count: int) -> Tensor:
    """Return masks (1 + T, T) of no token, and of each token alone."""
    return torch.cat((torch.zeros(1, count), torch.eye(count))).bool()


BASELINES: dict[str, Method] = {
    "random": Random(),
    "rollout": AttentionRollout(),
    "occlusion": Occlusion(),
    "pa-positions": Positions(),
    "pa-lrp-signed": Positions("signed", tokens=True),
}


def methods_of(names: str) -> dict[str, Method]:
    """Return the methods of a comma-separated list by their names; ``all`` is each that explains a prompt alone."""
    known = BASELINES | METHODS
    if names == "all":
        return {name: method for name, method in known.items() if not method.needs_counterfactual}
    return {name: method_of(name, known) for name in split_names(names)}


def split_names(names: str) -> list[str]:
    """Split at the commas outside brackets."""
    parts, depth = [""], 0
    for sign in names:
        depth += (sign == "(") - (sign == ")")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts]


def able_and_unable(
    model: Model, prompt: Any, methods: Mapping[str, Method]
) -> tuple[dict[str, Method], dict[str, str]]:
    """Return the methods that can score the tokens of a prompt, and why the others cannot."""
    able, unable = {}, {}
    for name, method in methods.items():
        try:
            method.scores(model, objective_of(model, [prompt]).resolved(model))
            able[name] = method
        except IcebearError as error:
            unable[name] = str(error)
    return able, unable
