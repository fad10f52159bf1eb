"""The relevance rules: one autograd function an equation of AttnLRP (Achtibat et al. 2024).

Relevance is activation x gradient on a graph whose backward pass is altered. Each function here leaves the
forward value alone and alters one gradient. Nothing in this file knows a model.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


class Identity(Function):
    """Identity rule, AttnLRP Eq. 9: an element-wise y = f(x) hands its relevance to x.

    g_x = g_y * y / x, and 0 where x = 0 (which carries no relevance).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, y)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        x, y = ctx.saved_tensors
        return (g * y / x).masked_fill_(x == 0, 0), None


class Halve(Function):
    """Uniform rule, AttnLRP Eq. 14 and 15: put behind a product, each of its two factors gets half."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:  # type: ignore[override]
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g / 2


class HalveFresh(Halve):
    """`Halve` for a product that has just been made and nobody else has: y itself comes back, not a view of it,
    because models may go on to change it in place."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:  # type: ignore[override]
        ctx.mark_dirty(y)
        return y


class Norm(Function):
    """Normalisation rule, AttnLRP Eq. 19: the divisor of LayerNorm and RMSNorm is a constant.

    y = (x - mean(x)) / divisor * weight + bias over the last dimension; `center` is False for RMSNorm.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, center: bool
    ) -> Tensor:
        width = (x.shape[-1],)
        y = F.layer_norm(x, width, weight, bias, eps) if center else F.rms_norm(x, width, weight, eps)
        power = x.var(-1, correction=0, keepdim=True) if center else x.pow(2).mean(-1, keepdim=True)
        ctx.save_for_backward(weight, torch.rsqrt(power + eps))
        ctx.center = center
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weight, inverse = ctx.saved_tensors
        g = (g if weight is None else g * weight) * inverse
        return (g - g.mean(-1, keepdim=True) if ctx.center else g), None, None, None, None


class Account(Function):
    """Not a rule: adds factor x sum(x * g_x), the relevance that passes here, to a ledger's entry."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ledger: dict[str, Tensor], name: str, factor: float) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        ctx.entry = ledger, name, factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        ledger, name, factor = ctx.entry
        book(ledger, name, factor, ctx.saved_tensors[0], g)
        return g, None, None, None


def book(ledger: dict[str, Tensor], name: str, factor: float, x: Tensor, g: Tensor) -> None:
    """Add factor x sum(x * g) per batch row to `ledger[name]`, a tensor (B,); x broadcasts to g.

    The rows of g are in batch order. Minus infinity (a masked score) has no gradient, and counts as zero.
    """
    entry = ledger[name]
    product = x * g
    if name != "biases":
        product = product.masked_fill(g == 0, 0)
    entry.add_(product.reshape(len(entry), -1).sum(1, dtype=entry.dtype), alpha=factor)
