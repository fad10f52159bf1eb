"""Norms of gradients, SmoothGrad, relevance of positions, and random numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from icebear.concepts.methods import common
from icebear.concepts.methods.gradients import embedding_gradients
from icebear.concepts.methods.lrp import PA_LRP
from icebear.concepts.methods.method import Method
from icebear.lrp.positions import Reading
from icebear.models.model import Model
from icebear.models.objective import Objective


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

    def cost(self, tokens: int) -> float:
        return self.samples + 1

    def variants(self) -> Sequence[Method]:
        return [replace(self, noise=noise) for noise in (0.01, 0.05, 0.1, 0.25, 0.5)]


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
