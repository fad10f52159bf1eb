"""Linear maps: weights by rows and columns, converted as they are read; and norms, linear at a fixed divisor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from icebear.models.parts.dispatch import present, weight_of

Chosen = int | slice | Tensor
"""One index, a slice, or several indices."""
ALL_INDICES = slice(None)


class Linear:
    """The weight (out, in) of a linear map, or (tokens, D) of an embedding, whatever the layout in its module.

    module: or a bare weight (out, in), such as that of a fused expert.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._transposed = isinstance(module, Conv1D)

    @property
    def _weight(self) -> Tensor:
        weight = self._module.detach() if isinstance(self._module, Tensor) else weight_of(self._module)
        return weight.T if self._transposed else weight

    @property
    def bias(self) -> Tensor | None:
        if getattr(self._module, "bias", None) is None:
            return None
        with present(self._module):
            return self._module.bias.detach()

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        if isinstance(self._module, nn.Linear):  # whose weight may be packed
            return self._module.out_features, self._module.in_features
        weight = self._module if isinstance(self._module, Tensor) else self._module.weight
        return tuple(weight.T.shape if self._transposed else weight.shape)

    @staticmethod
    def reads(module: nn.Module) -> bool:
        """Return whether a module is a linear map."""
        return isinstance(module, nn.Linear | Conv1D)

    @property
    def dtype(self) -> torch.dtype:
        return self._weight.dtype

    def rows(self, chosen: Chosen = ALL_INDICES, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the rows (N, in) of outputs, or (in,) of one. May share the module's memory, as `columns` may."""
        return self._weight[chosen].to(dtype)

    def columns(self, chosen: Chosen = ALL_INDICES, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the columns (out, N) of inputs, or (out,) of one."""
        return self._weight[:, chosen].to(dtype)

    def in_layout(self, weight: Tensor) -> Tensor:
        """Return a weight (out, in) in the module's own layout."""
        return weight.T if self._transposed else weight


def norm_divisor(norm: nn.Module, x: Tensor) -> Tensor:
    """Return (..., 1) the number by which a norm divides x (..., D): the standard deviation or root mean square; 1 in
    place of a norm."""
    if isinstance(norm, nn.Identity):
        return torch.ones_like(x[..., :1], dtype=torch.float32)
    eps: float = getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0))  # type: ignore[assignment]
    x = x.float()
    power = x.var(-1, correction=0, keepdim=True) if _centers(norm) else x.pow(2).mean(-1, keepdim=True)
    return torch.sqrt(power + eps)


def through_norm(norm: nn.Module, rows: Tensor, offset: float, by: Tensor | float) -> Tensor:
    """Return (..., D) the output of a norm with a fixed divisor for rows (..., D) (AttnLRP Eq. 19).

    offset: the gain is offset + weight (see `Family.norm_offset`).
    """
    if _centers(norm):
        rows = rows - rows.mean(-1, keepdim=True)
    if getattr(norm, "weight", None) is not None:
        rows = rows * (offset + weight_of(norm).float())
    return rows / by


LAYER_NORMS = ("CohereLayerNorm", "Cohere2LayerNorm", "Cohere2MoeLayerNorm", "OlmoLayerNorm")
"""They do not inherit from torch's."""


def _centers(norm: nn.Module) -> bool:
    return isinstance(norm, nn.LayerNorm) or type(norm).__name__ in LAYER_NORMS
