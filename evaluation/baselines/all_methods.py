"""All methods that evaluations compare, by name, and those that read gradients at the input or change the input."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from icebear.concepts.methods import common
from icebear.concepts.methods.attnlrp import PA_LRP
from icebear.concepts.methods.common import explained_numbers, log_probability, measure_variants, measure_without
from icebear.concepts.methods.gradients import embedding_gradients
from icebear.concepts.methods.method import Method
from icebear.concepts.methods.registry import METHODS, method_of
from icebear.concepts.passes.sites import hooks
from icebear.errors import IcebearError, InputError
from icebear.evaluation.baselines.attention import Alti, AltiLogit, AttentionRollout, GradCAM, GradientRollout
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
class Gradient(Method):
    """The norm of the gradient at each token's embedding (Simonyan et al. 2014)."""

    norm: Literal[1, 2] = 2

    def scores(self, model: Model, objective: Objective) -> list[Tensor]:
        return common.by_row(
            objective, [torch.linalg.vector_norm(g, self.norm, -1) for _, g in embedding_gradients(model, objective)]
        )


@dataclass(frozen=True, repr=False)
class SmoothGrad(Method):
    """Gradient x embedding, averaged over noisy embeddings (Smilkov et al. 2017); noise: in standard deviations."""

    noise: float = 0.1
    samples: int = 10
    seed: int = 0

    def scores(self, model: Model, objective: Objective) -> list[Tensor]:
        rows = [torch.Generator().manual_seed(self.seed) for _ in objective.positions]  # so that a batch is one by one
        batches = (objective.batch, objective.batch.decoder)

        def noisy(stack: int, x: Tensor) -> Tensor:
            changed = x.clone()
            for row, length in enumerate(batches[stack].lengths):  # type: ignore[union-attr]
                embeddings = x[row, :length]
                noise = torch.randn(embeddings.shape, generator=rows[row]).to(x.device, x.dtype)
                changed[row, :length] = embeddings + self.noise * embeddings.std() * noise
            return changed

        plain = [x for x, _ in embedding_gradients(model, objective)]
        steps = [[g for _, g in embedding_gradients(model, objective, noisy)] for _ in range(self.samples)]
        means = [torch.stack(step).mean(0) for step in zip(*steps, strict=True)]
        return common.by_row(objective, [(x * g).sum(-1) for x, g in zip(plain, means, strict=True)])


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
class Occlusion(Method):
    """The decrease of the explained logit when the embedding of a token is zero (Zeiler & Fergus 2014)."""

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


def _each_token(count: int) -> Tensor:
    """Return masks (1 + T, T) of no token, and of each token alone."""
    return torch.cat((torch.zeros(1, count), torch.eye(count))).bool()


BASELINES: dict[str, Method] = {
    "random": Random(),
    "grad-l1": Gradient(1),
    "grad-l2": Gradient(2),
    "smoothgrad": SmoothGrad(),
    "gradcam": GradCAM(),
    "rollout": AttentionRollout(),
    "grad-rollout": GradientRollout(),
    "atman": AtMan(),
    "occlusion": Occlusion(),
    "alti-logit": AltiLogit(),
    "alti": Alti(),
    "pa-positions": Positions(),
    "pa-lrp-signed": Positions("signed", tokens=True),
}


def methods_of(names: str, usual: Sequence[str] = (), controls: Collection[str] = ()) -> dict[str, Any]:
    """Return the methods of a comma-separated list by their names; the value of a control of the caller is its name.

    usual: the names that ``all`` stands for, by default every method that explains a prompt alone.
    """
    known = BASELINES | METHODS
    if names == "all":
        wanted = list(usual) or [name for name, method in known.items() if not method.needs_counterfactual]
    else:
        wanted = _split(names)
    return {name: name if name in controls else method_of(name, known) for name in wanted}


def _split(names: str) -> list[str]:
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
