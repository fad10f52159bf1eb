"""A linear map's weight, read by rows and columns: only what is asked for is converted (a packed one comes whole)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from icebear.concepts.models.dispatch import present, weight_of

Chosen = int | slice | Tensor
"""One, several in a row, or indices."""
WHOLE = slice(None)


class Linear:
    """(out, in) the weight of a linear map, or of an embedding (tokens, D), whichever way round its module keeps it.

    module: or a bare weight (out, in), as one of fused experts'.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._transposed = isinstance(module, Conv1D)

    @property
    def _weight(self) -> Tensor:
        kept = self._module.detach() if isinstance(self._module, Tensor) else weight_of(self._module)
        return kept.T if self._transposed else kept

    @property
    def bias(self) -> Tensor | None:
        if getattr(self._module, "bias", None) is None:
            return None
        with present(self._module):
            return self._module.bias.detach()

    @property
    def _shape(self) -> tuple[int, int]:
        if isinstance(self._module, nn.Linear):  # whose weight may be packed
            return self._module.out_features, self._module.in_features
        kept = self._module if isinstance(self._module, Tensor) else self._module.weight
        return tuple(kept.T.shape if self._transposed else kept.shape)

    @staticmethod
    def reads(module: nn.Module) -> bool:
        """Whether a module is a linear map."""
        return isinstance(module, nn.Linear | Conv1D)

    @property
    def out_features(self) -> int:
        return self._shape[0]

    @property
    def in_features(self) -> int:
        return self._shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """What the weight is kept in."""
        return self._weight.dtype

    def rows(self, chosen: Chosen = WHOLE, dtype: torch.dtype = torch.float32) -> Tensor:
        """(N, in), or (in,) of one: what outputs read. May share the module's memory, as `columns` may."""
        return self._weight[chosen].to(dtype)

    def columns(self, chosen: Chosen = WHOLE, dtype: torch.dtype = torch.float32) -> Tensor:
        """(out, N), or (out,) of one: what inputs write."""
        return self._weight[:, chosen].to(dtype)

    def as_kept(self, weight: Tensor) -> Tensor:
        """A weight (out, in) the way round that the module keeps its own."""
        return weight.T if self._transposed else weight
