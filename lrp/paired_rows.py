"""Autograd functions for rows in pairs, which the difference rules of `icebear.lrp.differences` apply.

Row i of the second half of a batch is the partner of row i of the first half. Only the gradients of the first half have
a meaning; nothing reads those of partners.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from icebear.errors import MissingRule
from icebear.lrp.rules import Multiplied
from icebear.models.parts.experts import partner


class Interpolate(Function):
    """Values on the straight line from the partner's to the row's; the gradient is the row's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:  # type: ignore[override]
        return share * x + (1 - share) * partner(x)  # not lerp: masked scores are minus infinity in both

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return g, None


class InPlaceOf(Function):
    """The value of y, which nothing else refers to, with the derivative of `line`; the result is y itself, not a view,
    because models may change it in place."""

    @staticmethod
    def forward(ctx: Any, line: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return g, None


class Rescaled(Multiplied):
    """The value of y, with a multiplier for each entry of the first half of x."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return first_rows((g.chunk(2)[0] * ctx.saved_tensors[0]).to(g.dtype)), None, None


class Unread(Function):
    """The largest values, which may choose something but have no relevance."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        raise MissingRule("topk has a difference rule only where a router chooses experts.")


class Unreadable(Tensor):
    """The indices of a choice that differs between both rows."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise MissingRule("a choice that differs between the prompts has a difference rule only for experts.")


class PairedLinear(Function):
    """A linear map."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, run: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(weight)
        return run()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return first_rows(g.chunk(2)[0] @ weight), None, None


class PairedProduct(Function):
    """A product of two activations: dy = da mean(b) + mean(a) db."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, func: Callable) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(*(torch.add(*x.chunk(2)) for x in (a, b)))
        ctx.func = func
        return func(a, b)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        (a, b), half = ctx.saved_tensors, g.chunk(2)[0] / 2  # of the sum of both rows it is the mean, exactly
        if ctx.func in MULTIPLY:
            return first_rows((half * b).sum_to_size(a.shape)), first_rows((half * a).sum_to_size(b.shape)), None
        with torch.enable_grad():
            sums = [x.requires_grad_() for x in (a, b)]
            a, b = torch.autograd.grad(ctx.func(*sums), sums, half)
        return first_rows(a), first_rows(b), None


MULTIPLY = {torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__}


def row_mean(x: Tensor) -> Tensor:
    """Return the mean of both rows of each pair."""
    row_x, partner_x = x.chunk(2)
    return (row_x + partner_x) / 2  # not lerp: masked scores are minus infinity in both


def first_rows(g: Tensor) -> Tensor:
    """Return the gradient of all rows from that of the first half. Partners get the same, which takes no memory for one
    pair."""
    return g.expand(2, *g.shape[1:]) if len(g) == 1 else torch.cat((g, g))


def wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class Softmax(Function):
    """The value of a softmax, with dp = L (dx - sum(L dx) / sum(L)), where L is the logarithmic mean of the two rows'
    weights p and p': exact, because log(p / p') is dx minus a constant and the weights of both rows sum to one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, func: Callable[[Tensor], Tensor], dim: int) -> Tensor:  # type: ignore[override]
        y = func(x)
        ctx.save_for_backward(mean_weights(x.log_softmax(dim, dtype=wide(x)))[1])
        ctx.options = dim, x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        dim, dtype = ctx.options
        return first_rows(through_softmax(ctx.saved_tensors[0], g.chunk(2)[0], dim).to(dtype)), None, None


def through_softmax(mean: Tensor, g: Tensor, dim: int) -> Tensor:
    """Return the gradient of scores, from the logarithmic mean of their weights."""
    weighted = mean * g
    return weighted.sub_(mean * (weighted.sum(dim, keepdim=True) / mean.sum(dim, keepdim=True)))


def mean_weights(logs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the arithmetic mean of the weights p and p' of both rows, and their logarithmic mean (p - p') /
    log(p / p'), which is p where they are equal. logs: their logarithms."""
    row_logs, partner_logs = logs.chunk(2)
    larger = torch.maximum(row_logs, partner_logs).exp_()
    gap = (row_logs - partner_logs).abs_().nan_to_num_(0).neg_()  # both are masked: inf - inf
    less = torch.expm1(gap)
    return torch.addcmul(larger, larger, less, value=0.5), larger * (less / gap).masked_fill_(gap == 0, 1)


class PairedAttention(Function):
    """Attention (a product, a softmax and a product), which stores no weights: its backward pass computes those of a
    block of queries at a time."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, run: Callable, causal: bool, scale: float
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, mask)
        ctx.options = causal, scale
        return run()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, mask = ctx.saved_tensors
        causal, scale = ctx.options
        at_queries: list[Tensor] = []
        at_keys: list[Tensor] = []  # of keys, and of values
        for start in reversed(range(0, q.shape[2], BLOCK)):  # the last block reads all keys
            rows, keys = slice(start, start + BLOCK), slice(start + BLOCK if causal and at_keys else None)
            block = _Block(q[:, :, rows] * scale, k[:, :, keys], v[:, :, keys])
            part: Tensor | None
            if causal:
                part = q.new_full((block.q.shape[2], block.k.shape[2]), -torch.inf).triu_(start + 1)
            else:
                part = None if mask is None else mask.expand(*mask.shape[:-2], q.shape[2], k.shape[2])[..., rows, :]
            gradient, *gradients = block.gradients(part, g.chunk(2)[0][:, :, rows])
            at_queries.append(gradient * scale)
            at_keys = at_keys or gradients
            if gradients is not at_keys:
                for total, gradient in zip(at_keys, gradients, strict=True):
                    total[:, :, keys] += gradient
        dq = at_queries[0] if len(at_queries) == 1 else torch.cat(at_queries[::-1], 2)
        return *map(first_rows, (dq, *at_keys)), None, None, None, None


BLOCK = 64
"""Queries: the scores of all their heads stay in the processor's cache."""


@dataclass(frozen=True)
class _Block:
    """Some queries (2B, H, t, D), keys and values (2B, H', S, D), H a multiple of H'."""

    q: Tensor
    k: Tensor
    v: Tensor

    def gradients(self, mask: Tensor | None, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the first half of queries, keys and values, from that of the output.

        mask: where weights are not zero, or a summand of the scores (2B or 1, H or 1, t, S).
        """
        q, g = self._grouped(self.q), self._grouped(g)
        arithmetic, logarithmic = (self._grouped(x) for x in mean_weights(self._logs(q, mask)))
        weights = through_softmax(logarithmic, g @ row_mean(self.v).mT, -1).to(q.dtype)
        dq = (weights @ row_mean(self.k)).view(self.q.chunk(2)[0].shape)
        return dq, weights.mT @ row_mean(q), arithmetic.to(q.dtype).mT @ g

    def _grouped(self, x: Tensor) -> Tensor:
        """Return (B, H', G * t, N) from (B, H, t, N): what reads the same keys, in one row."""
        return x.unflatten(1, (self.k.shape[1], -1)).flatten(2, 3)

    def _logs(self, q: Tensor, mask: Tensor | None) -> Tensor:
        """Return the logarithms of weights (2B, H, t, S)."""
        scores = (q @ self.k.mT).view(*self.q.shape[:3], -1)
        if mask is not None and mask.dtype == torch.bool:
            scores.masked_fill_(~mask, -torch.inf)
        elif mask is not None:
            scores += mask
        return scores.log_softmax(-1, dtype=wide(scores))
