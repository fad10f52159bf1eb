"""Which model it is: from its architecture and a sample of its weights."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import torch
from torch import Tensor, nn

from icebear.concepts.models.dispatch import named_weights

SAMPLED = 16
"""Rows, and columns, of each parameter."""
VALUES = 4096
"""Of each parameter, whose signs count; and of each row or column, whose exponents count."""


def fingerprint(net: nn.Module, architecture: str) -> str:
    """``signs-sizes``, 16 hex digits each: the same in float32 and bfloat16 (in float16 but for values at its limits).

    signs: of `architecture`, names, shapes, and the signs of a sample of each parameter.
    sizes: exponents of a seeded sample of rows and columns of each parameter, as bfloat16 rounds them, and how many of
        its rows and columns are zero.
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
    """At most about `VALUES` of each row (..., N), evenly."""
    return values[..., :: max(1, values.shape[-1] // VALUES)]


def _bytes(values: Tensor) -> Any:
    return values.cpu().numpy().tobytes()
