"""Weights, also offloaded or quantized ones, and their fingerprint; linear maps by rows and columns; and norms."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from icebear.errors import ModelError

VALUES = 4096
"""Sampled signs of each parameter, and exponents of each row or column."""


def packed(module: nn.Module) -> bool:
    return type(getattr(module, "weight", None)).__name__ in ("Params4bit", "Int8Params")  # of bitsandbytes


def offloaded(net: nn.Module) -> bool:
    """Return whether some weights are loaded only while their module runs; they are on ``meta`` otherwise."""
    return any(parameter.is_meta for parameter in net.parameters())


def present(module: nn.Module) -> AbstractContextManager[Any]:
    """Load the module's own weights inside the context."""
    if not hasattr(module, "_hf_hook"):
        return nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(module)


def weight_of(module: Any) -> Tensor:
    """Return the weight as floating-point numbers, on the module's device. Raises `ModelError`."""
    with present(module):
        weight = module.weight
        if packed(module):
            from transformers.integrations.bitsandbytes import dequantize_bnb_weight

            return dequantize_bnb_weight(weight, getattr(module, "state", None)).detach()
        if weight.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            raise ModelError(
                f"icebear cannot read the weights of {type(module).__name__} ({weight.dtype}); load the model "
                "without quantization, or with --bits."
            )
        return weight.detach()


def named_weights(net: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield names and weights as `named_parameters`, including offloaded weights."""
    # Offloaded parameters no longer show that they are tied.
    tied = set(getattr(net, "all_tied_weights_keys", {})) if offloaded(net) else set()
    names = {name for name, _ in net.named_parameters()} - tied
    for path, module in net.named_modules():
        with present(module):
            for name, parameter in module.named_parameters(path, recurse=False):
                if name in names:
                    yield name, parameter.detach()


def fingerprint(net: nn.Module, architecture: str) -> str:
    """Return ``signs-sizes``, two hashes of 16 hex digits that are equal in float32 and bfloat16.

    In float16 they are equal too, except for values at its limits.

    signs: a hash of `architecture`, names, shapes, and the signs of a sample of each parameter.
    sizes: a hash of the bfloat16 exponents of sampled rows and columns of each parameter, and of how many are zero.
    """
    signs, sizes = hashlib.sha256(architecture.encode()), hashlib.sha256()
    for name, values in named_weights(net):
        signs.update(f"{name} {tuple(values.shape)}".encode())
        signs.update(_bytes(torch.signbit(_sample(values.flatten()))))
        matrix = values.flatten(1) if values.dim() > 1 else values[None]
        for rows in (matrix, matrix.T):
            chosen = sorted(random.Random(name).sample(range(len(rows)), min(16, len(rows))))
            sizes.update(_bytes(torch.frexp(_sample(rows)[chosen].bfloat16().float().cpu()).exponent))
            zeros = rows[~rows[:, :16].bool().any(1)]  # only rows that begin with zeros are read to the end
            sizes.update(f" {int((~zeros.bool().any(1)).sum())}".encode())
    return f"{signs.hexdigest()[:16]}-{sizes.hexdigest()[:16]}"


def _sample(values: Tensor) -> Tensor:
    """Return at most about `VALUES` values of each row (..., N), evenly spaced."""
    return values[..., :: max(1, values.shape[-1] // VALUES)]


def _bytes(values: Tensor) -> Any:
    return values.cpu().numpy().tobytes()


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


def norm_divisor(norm: nn.Module, x: Tensor) -> Tensor:
    """Return (..., 1) the number by which a norm divides x (..., D): the standard deviation or root mean square; 1 for
    a layer scale, and in place of a norm."""
    if isinstance(norm, nn.Identity) or hasattr(norm, LAYER_SCALE):
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
    if hasattr(norm, LAYER_SCALE):
        return rows * getattr(norm, LAYER_SCALE).float()
    if getattr(norm, "weight", None) is not None:
        rows = rows * (offset + weight_of(norm).float())
    return rows / by


LAYER_SCALE = "lambda1"
"""The gains of a layer scale (DINOv2), which stands where other families have a norm, and divides by nothing."""

LAYER_NORMS = ("CohereLayerNorm", "Cohere2LayerNorm", "Cohere2MoeLayerNorm", "OlmoLayerNorm")
"""They do not inherit from torch's."""


def _centers(norm: nn.Module) -> bool:
    return isinstance(norm, nn.LayerNorm) or type(norm).__name__ in LAYER_NORMS
