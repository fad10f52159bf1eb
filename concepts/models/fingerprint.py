"""The identity of a model, from its architecture and a sample of its weights."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import torch
from torch import Tensor, nn

from icebear.concepts.models.dispatch import named_weights

SAMPLED = 16
"""Sampled rows, and columns, of each parameter."""
VALUES = 4096
"""Sampled signs of each parameter, and exponents of each row or column."""


def fingerprint(net: nn.Module, architecture: str) -> str:
    """Return ``signs-sizes``, two hashes of 16 hex digits that are equal in float32 and bfloat16.

    In float16 they are equal too, except for values at its limits.

    signs: a hash of `architecture`, names, shapes, and the signs of a sample of each parameter.
    sizes: a hash of the bfloat16 exponents of sampled rows and columns of each parameter, and of how many are zero.
    """
    signs, sizes = hashlib.sha256(architecture.encode()), hashlib.sha256()
    for name, values in named_weights(net):
        signs.update(f"{name} {tuple(values.shape)}".encode())
        signs.update(_bytes(torch.signbit(_some(values.flatten()))))
        matrix = values.flatten(1) if values.dim() > 1 else values[None]
        for rows in (matrix, matrix.T):
            chosen = sorted(random.Random(name).sample(range(len(rows)), min(SAMPLED, len(rows))))
            sizes.update(_bytes(torch.frexp(_some(rows[chosen]).bfloat16().float().cpu()).exponent))
            sizes.update(f" {int((~rows.bool().any(1)).sum())}".encode())
    return f"{signs.hexdigest()[:16]}-{sizes.hexdigest()[:16]}"


def _some(values: Tensor) -> Tensor:
    """Return at most about `VALUES` values of each row (..., N), evenly spaced."""
    return values[..., :: max(1, values.shape[-1] // VALUES)]


def _bytes(values: Tensor) -> Any:
    return values.cpu().numpy().tobytes()
