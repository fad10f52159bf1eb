"""How much attention heads write to the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from icebear.concepts.vocabulary.calibration import mean_activations
from icebear.models.model import Model
from icebear.models.parts.linear import Linear


@dataclass(frozen=True, eq=False)
class HeadNorms:
    """The norm of what each head of a model writes, W_O z, less its mean."""

    means: Tensor
    """(L, A) the mean of z, the input of the attention output projections."""
    grams: dict[int, Tensor]
    """layer -> W_O^T W_O of each head (H, d, d): with them a norm costs d x d products instead of D x d."""

    @classmethod
    @torch.no_grad()
    def of(cls, model: Model, means: Tensor) -> HeadNorms:
        grams, scale = {}, model.residual_scale("attn")
        for layer in model.layers_with("attn"):
            weights = scale * Linear(model.site_module("attn", layer)).columns()  # (D, A)
            of_heads = weights.T.unflatten(0, (model.heads, -1))  # (H, d, D)
            grams[layer] = of_heads @ of_heads.mT
        return cls(means, grams)

    def __call__(self, layer: int, z: Tensor) -> Tensor:
        """Return the norms (B, T, H) for z (B, T, A)."""
        grams = self.grams[layer].to(z.device)
        deviations = (z.detach().float() - self.means[layer].to(z.device)).flatten(0, 1)  # (B * T, A)
        of_heads = deviations.unflatten(1, (len(grams), -1)).transpose(0, 1)  # (H, B * T, d)
        squares = ((of_heads @ grams) * of_heads).sum(-1).clamp(min=0)
        return squares.sqrt().T.unflatten(0, z.shape[:2])


def head_means(model: Model) -> Tensor:
    """Return the mean (L, A) of the input of the attention output projections on the calibration texts: known before a
    scan, so that a score does not depend on what was scanned."""
    return mean_activations(model)["attn"]
