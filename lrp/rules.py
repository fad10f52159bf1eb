"""The relevance rules: one autograd function an equation of AttnLRP (Achtibat et al. 2024).

Relevance is activation x gradient on a graph with a changed backward pass. Each function here changes one gradient, and
no forward value. Nothing in this file depends on a model.

A function that passes values on returns them detached: they share memory, and are no view, so that a model may change
them in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from icebear.lrp.linear_rules import AlphaBeta, Epsilon, Gamma, LinearRule, ZPlus


class Multiplied(Function):
    """The value of y, with a multiplier for each entry of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, multiplier: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(multiplier)
        return y.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return (g * ctx.saved_tensors[0]).to(g.dtype), None, None


def identity(x: Tensor, y: Tensor) -> Tensor:
    """Identity rule, AttnLRP Eq. 9: an element-wise y = f(x) passes its relevance to x.

    g_x = g_y * y / x, and 0 where x = 0 (which has no relevance).
    """
    multiplier = (y / x.detach()).nan_to_num_(0, 0, 0)  # infinite, or 0 / 0, only where x = 0
    return Multiplied.apply(x, y, multiplier)  # type: ignore[no-any-return]


class Scaled(Function):
    """The value of y, and `factor` times its gradient.

    A half is the uniform rule, AttnLRP Eq. 14 and 15: behind a product, each of its two factors gets half. Zero is a
    stop-gradient.

    fresh: y is new and nothing else refers to it. The result is y itself.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, factor: float, fresh: bool) -> Tensor:  # type: ignore[override]
        ctx.factor = factor
        if fresh:
            ctx.mark_dirty(y)
            return y
        return y.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return g * ctx.factor, None, None


def uniform(y: Tensor, fresh: bool = False) -> Tensor:
    """Uniform rule: see `Scaled`."""
    return Scaled.apply(y, 0.5, fresh)  # type: ignore[no-any-return]


class Norm(Function):
    """Normalization rule, AttnLRP Eq. 19: the divisor of LayerNorm and RMSNorm is a constant.

    y = (x - mean(x)) / divisor * weight + bias over the last dimension; `center` is False for RMSNorm.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, center: bool
    ) -> Tensor:
        y = normalized(x, weight, bias, eps, center)
        power = x.var(-1, correction=0, keepdim=True) if center else x.pow(2).mean(-1, keepdim=True)
        ctx.save_for_backward(weight, torch.rsqrt(power + eps))
        ctx.center = center
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weight, inverse = ctx.saved_tensors
        g = (g if weight is None else g * weight) * inverse
        return (g - g.mean(-1, keepdim=True) if ctx.center else g), None, None, None, None


def normalized(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, center: bool) -> Tensor:
    width = (x.shape[-1],)
    return F.layer_norm(x, width, weight, bias, eps) if center else F.rms_norm(x, width, weight, eps)


class SoftmaxZPlus(Function):
    """z+ rule on the expansion of the softmax at x (AttnLRP Eq. 13): its bias term is left out.

    s_j is about sum_i J_ji x_i + bias, J_ji = s_j (1[i = j] - s_i). R_i = sum_j (J_ji x_i)+ / sum_k (J_jk x_k)+ R_j.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, s: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, s)
        return s.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        wide = torch.float32 if g.device.type == "mps" else torch.float64
        x, s = (saved.to(wide) for saved in ctx.saved_tensors)
        x = x.masked_fill(s == 0, 0)  # a masked score
        rest = _sum_of_others(s)  # 1 - s, which is 0 in float32 where nearly all attention is at one score
        raises, lowers = rest * x.clamp(min=0), s * (-x).clamp(min=0)  # by x_j itself; by each other x_i
        share = _divide(s * g, raises + _sum_of_others(lowers))  # R_j / P_j, with s_j cancelled
        gradient = torch.where(x > 0, rest * share, -s * _sum_of_others(share)).masked_fill(x == 0, 0)
        return gradient.to(g.dtype), None


def _sum_of_others(x: Tensor) -> Tensor:
    """The sum of all other entries of the last dimension, without the cancellation of sum - x."""
    before = F.pad(x.cumsum(-1)[..., :-1], (1, 0))
    after = F.pad(x.flip(-1).cumsum(-1)[..., :-1], (1, 0)).flip(-1)
    return before + after


class LinearMap(Function):
    """A rule of `icebear.lrp.linear_rules` for y = f(x, weight) + bias, f linear in x.

    With z_ij = w_ij x_i, and the bias as one more input: R_i = sum_j (c_j z_ij + c+_j z_ij+ + c-_j z_ij-).
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        y: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        f: Callable,
        rule: LinearRule,
        retain: Callable,
    ) -> Tensor:
        ctx.save_for_backward(x, y, weight, bias)
        ctx.options = f, rule, retain
        return y.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, y, weight, bias = ctx.saved_tensors
        f, rule, retain = ctx.options
        up, down = weight.clamp(min=0), weight.clamp(max=0)
        plus = minus = torch.zeros_like(y)
        if not isinstance(rule, Epsilon):
            plus = f(x.clamp(min=0), up) + f(x.clamp(max=0), down)
            minus = f(x.clamp(min=0), down) + f(x.clamp(max=0), up)
            if bias is not None:
                plus, minus = plus + bias.clamp(min=0), minus + bias.clamp(max=0)
        all_, positive, negative = coefficients(rule, y, plus, minus, y * g)
        if bias is not None:
            retain(all_ * bias + positive * bias.clamp(min=0) + negative * bias.clamp(max=0))
        back = _transposed(f, x)
        gradient = back(all_, weight)
        if not isinstance(rule, Epsilon):
            above = back(positive, up) + back(negative, down)  # where x > 0, z has the sign of w
            below = back(positive, down) + back(negative, up)
            gradient = gradient + torch.where(x > 0, above, below)
        return gradient, *(None,) * 6


def coefficients(rule: LinearRule, y: Tensor, plus: Tensor, minus: Tensor, R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(c, c+, c-) of `LinearMap` for outputs y = plus + minus with relevance R, the sums of z+ and of z-."""
    nothing = torch.zeros_like(y)
    if isinstance(rule, Epsilon):
        return _divide(R, y + rule.eps * y.sign()), nothing, nothing
    if isinstance(rule, AlphaBeta):
        alpha = torch.where(minus == 0, 1, rule.alpha)
        beta = torch.where(plus == 0, -1, rule.alpha - 1)
        return nothing, _divide(alpha * R, plus), _divide(-beta * R, minus)
    if isinstance(rule, ZPlus):
        quotient = _divide(R, torch.where(y > 0, plus, minus))
        return nothing, quotient.masked_fill(y <= 0, 0), quotient.masked_fill(y > 0, 0)
    assert isinstance(rule, Gamma)
    share = _divide(R, y + rule.gamma * torch.where(y > 0, plus, minus))
    favored = rule.gamma * share
    return share, favored.masked_fill(y <= 0, 0), favored.masked_fill(y > 0, 0)


def _transposed(f: Callable, x: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """The transpose of x -> f(x, weight), as a function of (y, weight)."""

    def back(y: Tensor, weight: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = torch.zeros_like(x).requires_grad_()
            return torch.autograd.grad(f(leaf, weight), leaf, y)[0]

    return back


def _divide(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b = 0."""
    return torch.where(b == 0, 0, a / torch.where(b == 0, 1, b))


class Packed(Function):
    """Eq. 8 for a linear map that only its module knows how to run: the gradient goes through its weight as read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable, linear: Any) -> Tensor:  # type: ignore[override]
        ctx.linear = linear
        return run(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return g @ ctx.linear.rows(dtype=g.dtype), None, None


class CaptureGradient(Function):
    """Not a rule: pass a saved tensor, and the gradient of x, to a function in the backward pass.

    A hook would hold the tensor even if the values of a layer are recomputed; this function does not.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Tensor, show: Callable) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(saved)
        ctx.show = show
        return x.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ctx.show(ctx.saved_tensors[0], g)
        return g, None, None


def product(x: Tensor, g: Tensor, name: str) -> Tensor:
    """Return x * g; minus infinity (a masked score) has no gradient, and counts as zero."""
    relevance = x * g
    return relevance if name == "biases" else relevance.masked_fill(g == 0, 0)
