"""Difference rules for two models: the first row of a pair runs through changed weights, its partner through others.

A linear map of both rows is W'x' - Wx = mean(W) (x' - x) + (W' - W) mean(x). The first part is *passed on* to the
input. The second one is *caused* by the weight: entry by entry, it is W' - W times the gradient of the weight at the
means. The same holds for whatever is linear in its weight: embeddings, biases, gains, convolutions. So one backward
pass splits the difference of an output among the weights that differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils._pytree import tree_flatten, tree_unflatten

from icebear.errors import MissingRule
from icebear.lrp import differences, operation_table
from icebear.lrp.operation_table import RelevanceMode, Rule, is_activation
from icebear.lrp.paired_rows import row_mean

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Entries:
    """What each entry of a weight of any shape caused."""

    values: Tensor

    def along(self, axis: int) -> Tensor:
        """Return the sum of each slice along an axis."""
        others = [other for other in range(self.values.dim()) if other != axis]
        return self.values.sum(others) if others else self.values


@dataclass(frozen=True)
class OuterProduct:
    """(W' - W)_oi sum_n g_no x_ni, without all o x i of them."""

    x: Tensor
    """(N, I) the mean input."""
    gradient: Tensor
    """(N, O)"""
    change: Tensor
    """(O, I)"""
    rows: Tensor | None = None
    """(O,) which rows of a larger weight these are; the gradient of others is zero."""

    def along(self, axis: int) -> Tensor:
        if axis:
            return (self.x * (self.gradient @ self.change)).sum(0)
        values = (F.linear(self.x, self.change) * self.gradient).sum(0)
        return values if self.rows is None else values.new_zeros(len(self.rows)).masked_scatter_(self.rows, values)


Caused = Entries | OuterProduct
Cause = Callable[[str, Caused], None]
"""Takes the name of a weight and what it caused."""


@dataclass(frozen=True)
class PairedWeights:
    """The weights of a model that differ from its base model's."""

    weights: Mapping[str, tuple[Tensor, Tensor]]
    """By name: the model's, and the base model's."""
    cause: Cause
    """Receives what each of them caused, in the backward pass."""


@dataclass(frozen=True)
class Changed:
    """A weight, or a value computed from weights alone, in both models."""

    value: Tensor
    base: Tensor
    roots: dict[str, Changed]
    """The weights that it is computed from; empty if it is a weight itself."""
    make: Callable[[Weights], Tensor]
    """Computes it, linearly, from values of the roots."""

    @classmethod
    def weight(cls, name: str, value: Tensor, base: Tensor) -> Changed:
        return cls(value, base, {}, lambda weights: weights[name])

    @property
    def mean(self) -> Tensor:
        return torch.lerp(self.base, self.value, 0.5)


class TwoModels(RelevanceMode):
    """A mode whose operations read the weights of the base model for the partners."""

    def __init__(self, net: nn.Module, method: Any, strict: bool, paired: PairedWeights) -> None:
        super().__init__(net, method, None, strict, differences.TABLE)
        self.cause = paired.cause
        self.changed: dict[int, tuple[str, Changed]] = {}
        for name, pair in paired.weights.items():
            self._add(pair[0], name, Changed.weight(name, *pair))

    def _add(self, value: Tensor, name: str, changed: Changed) -> None:
        # By id, because == compares tensors entry by entry. `changed` keeps the value, so that no other gets its id.
        self.changed[id(value)] = name, changed

    def _lookup(self, value: Any) -> tuple[str, Changed] | None:
        if not isinstance(value, Tensor) or is_activation(value):  # embeddings become one
            return None
        return self.changed.get(id(value))

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if not any(map(self._lookup, args)) and not kwargs and not any(type(x) in (list, tuple) for x in args):
            return super().__torch_function__(func, types, args, kwargs)
        leaves, spec = tree_flatten((args, kwargs or {}))
        call = _Call(func, leaves, spec, {i: pair for i, x in enumerate(leaves) if (pair := self._lookup(x))}, self)
        if not call.changed:
            return super().__torch_function__(func, types, args, kwargs)
        self.catch_up()
        y = self._of_changed(call, args, kwargs or {})
        self._next_node = torch.autograd._get_sequence_nr()
        return y

    def _of_changed(self, call: _Call, args: tuple, kwargs: dict) -> Any:
        rule = self.table.get(call.func)
        try:
            if not call.activations:
                return self._derived(call, rule)
            if call.func in NORMS:
                return self._norm(call, args, kwargs)
            if rule is differences.fused_attention:  # a position bias among its arguments
                leaves = [self._as_activation(x, call) if index in call.changed else x for index, x in call.numbered]
                args, kwargs = tree_unflatten(leaves, call.spec)
                return rule(self, call.func, args, kwargs)
            if (maps := self._maps(call)) is not None:
                return SplitLinear.apply(call.leaves[0], *maps, self.cause)
            call.check(rule)
            y = Split.apply(call, *call.activations.values())
            return call.leaves[0].copy_(y) if call.in_place else y
        except MissingRule as error:
            raise MissingRule(f"In {self.module_path()}: {error}") from None

    def _maps(self, call: _Call) -> tuple[_Root, _Root | None] | None:
        """Return the weight and the bias of a linear map, if they are no values computed from others."""
        plain = call.func is F.linear and list(call.activations) == [0]
        if (
            not plain
            or tree_unflatten(call.leaves, call.spec)[1]
            or any(changed.roots for _, changed in call.changed.values())
        ):
            return None
        roots: list[_Root | None] = [None, None]
        for index, value in enumerate(call.leaves[1:3], 1):
            name, changed = call.changed.get(index, ("", None))
            if value is not None:
                roots[index - 1] = _Root(name, (changed.value, changed.base) if changed else (value, value))
        assert roots[0] is not None
        return roots[0], roots[1]

    def _derived(self, call: _Call, rule: Rule | None) -> Any:
        """Run an operation on weights alone, in both models."""
        outputs, base_outputs = call.run("value"), call.run("base")
        several = isinstance(outputs, tuple | list)
        pairs = zip(outputs, base_outputs, strict=True) if several else [(outputs, base_outputs)]
        for index, (output, base_output) in enumerate(pairs):
            if not isinstance(output, Tensor) or not output.is_floating_point() or id(output) in self.changed:
                continue
            if not call.is_linear(rule):
                if torch.equal(output, base_output):
                    continue
                raise MissingRule(f"{call.name} of weights that differ is not linear, and has no rule for two models.")
            if (name := call.expert) is not None:
                self._add(output, name, Changed.weight(name, output, base_output))
                continue

            def make(weights: Weights, index: int = index) -> Tensor:
                value = call.run(weights)
                return value[index] if several else value  # type: ignore[no-any-return]

            self._add(output, "", Changed(output, base_output, call.roots, make))
        return outputs

    def _norm(self, call: _Call, args: tuple, kwargs: dict) -> Tensor:
        """Normalize without the gain and the bias, which follow."""
        biased = ("bias",) if call.func in LAYER_NORMS else ()
        names = ("input", "normalized_shape", "weight", *biased, "eps")
        named = dict(zip(names, args, strict=False), **kwargs)
        gain, bias = named.pop("weight", None), named.pop("bias", None)
        y = self.table[call.func](self, call.func, (), named)
        for func, value in ((torch.mul, gain), (torch.add, bias)):
            if value is not None:
                y = self._split(func, y, value) if self._lookup(value) else func(y, value)
        return y

    def _split(self, func: Any, x: Tensor, value: Tensor) -> Tensor:
        """Run an operation on an activation and on a value that depends on weights alone."""
        pair = self._lookup(value)
        assert pair is not None
        leaves, spec = tree_flatten(((x, value), {}))
        return Split.apply(_Call(func, leaves, spec, {1: pair}, self), x)  # type: ignore[no-any-return]

    def _as_activation(self, value: Tensor, call: _Call) -> Tensor:
        """Return a value that depends on weights alone as two rows, behind any activation of the call."""
        rows = lambda x, value: value.expand(len(x), *value.shape[1:]) + 0 * x.sum()  # noqa: E731
        return self._split(rows, next(iter(call.activations.values())), value)


class _Call:
    """An operation with weights that differ among its arguments."""

    def __init__(
        self, func: Any, leaves: Sequence[Any], spec: Any, changed: dict[int, tuple[str, Changed]], mode: TwoModels
    ) -> None:
        self.func, self.leaves, self.spec, self.changed, self.mode = func, leaves, spec, changed, mode
        self.activations = {index: x for index, x in enumerate(leaves) if is_activation(x)}
        self.name = getattr(func, "__name__", str(func))

    @property
    def numbered(self) -> list[tuple[int, Any]]:
        return list(enumerate(self.leaves))

    @property
    def in_place(self) -> bool:
        return self.name in ("__iadd__", "__isub__", "__imul__", "__itruediv__", "add_", "sub_", "mul_", "div_")

    @property
    def roots(self) -> dict[str, Changed]:
        """The weights that differ, by name."""
        pairs = ((name, changed) for name, changed in self.changed.values())
        return {root: pair for name, changed in pairs for root, pair in (changed.roots or {name: changed}).items()}

    @property
    def expert(self) -> str | None:
        """The name of one expert's weight, if that is what the operation takes from the weight of all experts."""
        name, changed = self.changed.get(0, ("", None))
        if self.name != "__getitem__" or changed is None or changed.roots or changed.value.dim() < 2:
            return None
        return f"{name}[{self.leaves[1]}]" if type(self.leaves[1]) is int else None

    def run(self, which: str | Weights, values: Mapping[int, Tensor] | None = None) -> Any:
        """Run the operation in a model (``value`` or ``base``), or with values computed from the roots `which`."""
        leaves = list(self.leaves)
        for index, (_, changed) in self.changed.items():
            leaves[index] = getattr(changed, which) if isinstance(which, str) else changed.make(which)
        for index, value in (values or {}).items():
            leaves[index] = value
        args, kwargs = tree_unflatten(leaves, self.spec)
        return self.func(*args, **kwargs)

    def is_linear(self, rule: Rule | None) -> bool:
        """Return whether the operation is linear in the weights that differ (with all others fixed)."""
        if rule is differences.product:
            return len(self.changed) == 1
        return rule in differences.LINEAR or (rule is differences.divide and 0 in self.changed)

    def check(self, rule: Rule | None) -> None:
        """Raise `MissingRule` if the operation is not exact at the means of its arguments."""
        if self.in_place and 0 in self.changed:
            raise MissingRule(f"{self.name} in place of a weight has no rule for two models.")
        several = len(self.activations) + len(self.changed) > 2
        if rule is differences.divide and 0 in self.activations and 1 in self.changed:
            raise MissingRule("division by a weight that differs has no rule for two models.")
        exact = (*differences.LINEAR, differences.addmm)
        if rule not in exact and (several or rule not in (differences.product, differences.divide)):
            raise MissingRule(f"{self.name} with a weight that differs has no rule for two models.")
        if self.name == "__setitem__":
            raise MissingRule("assignment of a weight that differs has no rule for two models.")


class Split(Function):
    """The value of an operation in both models; the gradient at the means of both rows and of both weights, and what
    the weights caused."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *activations: Tensor) -> Tensor:  # type: ignore[override]
        ctx.call = call
        ctx.save_for_backward(*activations)
        # Both runs read the activations, which an operation in place would change.
        copied = lambda: {index: x.clone() for index, x in call.activations.items()} if call.in_place else {}  # noqa: E731
        outputs = call.run("value", copied())
        return torch.cat((outputs[: len(outputs) // 2], call.run("base", copied())[len(outputs) // 2 :]))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        call: _Call = ctx.call
        row_g = g.chunk(2)[0]
        row_g = torch.cat((row_g, torch.zeros_like(row_g)))  # constants may have a row for each prompt too
        with torch.enable_grad():
            pairs = zip(call.activations, ctx.saved_tensors, strict=True)
            means = {index: row_mean(x.detach()).repeat(2, *[1] * (x.dim() - 1)).requires_grad_() for index, x in pairs}
            weights = {name: changed.mean.requires_grad_() for name, changed in call.roots.items()}
            inputs = {index: x.clone() for index, x in means.items()} if call.in_place else means
            y = call.run(weights, inputs)
            gradients = torch.autograd.grad(y, [*means.values(), *weights.values()], row_g, allow_unused=True)
        for (name, changed), gradient in zip(call.roots.items(), gradients[len(means) :], strict=True):
            if gradient is not None:
                call.mode.cause(name, Entries(gradient * (changed.value - changed.base)))
        return None, *gradients[: len(means)]


class SplitLinear(Function):
    """`Split` of a linear map, whose rows run only through the weight of their model."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: _Root, bias: _Root | None, cause: Cause) -> Tensor:  # type: ignore[override]
        ctx.options = weight, bias, cause
        ctx.save_for_backward(x)
        biases = bias.values if bias else (None, None)
        y = x.new_empty(*x.shape[:-1], len(weight.values[0]))
        for rows, out, matrix, shift in zip(x.chunk(2), y.chunk(2), weight.values, biases, strict=True):
            torch.mm(rows.flatten(0, -2), matrix.T, out=out.flatten(0, -2))
            if shift is not None:
                out += shift
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        weight, bias, cause = ctx.options
        gradient = g.chunk(2)[0].flatten(0, -2)
        if bias is not None and bias.name:
            cause(bias.name, Entries(gradient.sum(0) * (bias.values[0] - bias.values[1])))
        (matrix, base), rows = weight.values, None
        if len(gradient) < FEW_POSITIONS and not (used := gradient.any(0)).all():  # few are explained
            gradient, matrix, base, rows = gradient[:, used], matrix[used], base[used], used
        below = x.new_zeros(x.shape)  # for partners, whose gradients nothing reads
        mean = torch.lerp(base, matrix, 0.5) if weight.name else matrix
        torch.mm(gradient, mean, out=below.chunk(2)[0].flatten(0, -2))
        if weight.name:
            cause(weight.name, OuterProduct(row_mean(x.detach()).flatten(0, -2), gradient, matrix - base, rows))
        return below, None, None, None


FEW_POSITIONS = 8
"""Positions: with fewer, rows of a weight that have no gradient are left out."""


@dataclass(frozen=True)
class _Root:
    """A weight in both models, with a name if it differs."""

    name: str
    values: tuple[Tensor, Tensor]


LAYER_NORMS = set(operation_table.named("layer_norm"))
NORMS = LAYER_NORMS | set(operation_table.named("rms_norm"))
