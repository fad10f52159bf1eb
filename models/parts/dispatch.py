"""Weights on several devices, offloaded to the CPU or the disk, or quantized; and the fingerprint of all weights."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from icebear.errors import ModelError

VALUES = 4096
"""Sampled signs of each parameter, and exponents of each row or column."""


def packed(module: nn.Module) -> bool:
    return type(getattr(module, "weight", None)).__name__ in ("Params4bit", "Int8Params")  # of bitsandbytes


def offloaded(net: nn.Module) -> bool:
    """Return whether some weights are loaded only while their module runs; they are on ``meta`` otherwise."""
    return any(parameter.is_meta for parameter in net.parameters())


def replaceable(module: nn.Module) -> bool:
    """Return whether its weight can be replaced."""
    return not packed(module) and not any(parameter.is_meta for parameter in module.parameters())


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
            sizes.update(_bytes(torch.frexp(_sample(rows[chosen]).bfloat16().float().cpu()).exponent))
            zeros = rows[~rows[:, :16].bool().any(1)]  # only rows that begin with zeros are read to the end
            sizes.update(f" {int((~zeros.bool().any(1)).sum())}".encode())
    return f"{signs.hexdigest()[:16]}-{sizes.hexdigest()[:16]}"


def _sample(values: Tensor) -> Tensor:
    """Return at most about `VALUES` values of each row (..., N), evenly spaced."""
    return values[..., :: max(1, values.shape[-1] // VALUES)]


def _bytes(values: Tensor) -> Any:
    return values.cpu().numpy().tobytes()
