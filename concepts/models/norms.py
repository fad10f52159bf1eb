"""Norms at a fixed divisor are linear maps (AttnLRP Eq. 19): what they divide by, and what they hand on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from icebear.concepts.models.dispatch import weight_of

OWN_LAYER_NORMS = ("CohereLayerNorm", "Cohere2LayerNorm", "OlmoLayerNorm")
"""Classes that are no torch LayerNorm, but centre as one."""


def divisor(norm: nn.Module, x: Tensor) -> Tensor:
    """(..., 1) what a LayerNorm or RMSNorm divides x (..., D) by: its standard deviation or root mean square."""
    eps: float = getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0))  # type: ignore[assignment]
    x = x.float()
    power = x.var(-1, correction=0, keepdim=True) if centres(norm) else x.pow(2).mean(-1, keepdim=True)
    return torch.sqrt(power + eps)


def through(norm: nn.Module, rows: Tensor, offset: float, by: Tensor | float) -> Tensor:
    """(..., D) what a norm that divides `by` hands on of rows (..., D): centred in a LayerNorm, times its gain.

    offset: the gain is offset + weight (see `Family.norm_offset`).
    """
    if centres(norm):
        rows = rows - rows.mean(-1, keepdim=True)
    if getattr(norm, "weight", None) is not None:
        rows = rows * (offset + weight_of(norm).float())
    return rows / by


def centres(norm: nn.Module) -> bool:
    return isinstance(norm, nn.LayerNorm) or type(norm).__name__ in OWN_LAYER_NORMS
