"""The second table: torch operation -> difference rule, for relevance compared with a counterfactual prompt.

The rows of a batch come in pairs: row i of the second half is the counterfactual of row i of the first half (its
partner), and a rule sees both; relevance is of the first half.
Each operation is linearized so that it is exact in the difference, dy = J dx with dx = x - x', and the backward pass
applies J. So the relevance g * (x - x'), over any cut of the graph, sums to the difference of the explained number.
The idea is DeepLIFT's rescale rule (Shrikumar et al. 2017), extended to products, attention and norms; if the values
of the partner are zero, it is AttnLRP's Eq. 9, 14 and 15. The derivations are in docs/definitions-difference.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from icebear.errors import MissingRule
from icebear.lrp import operation_table
from icebear.lrp.operation_table import Rule, is_activation
from icebear.lrp.paired_rows import (
    InPlaceOf,
    Interpolate,
    PairedAttention,
    PairedLinear,
    PairedProduct,
    Rescaled,
    Softmax,
    Unread,
    Unreadable,
    wide,
)
from icebear.lrp.rules import Multiplied, Scaled, normalized
from icebear.models.parts import experts
from icebear.models.parts.experts import partner
from icebear.models.parts.families import family_of

Points = tuple[tuple[float, float], ...]
"""(position on the line from the partner's values (0) to the row's (1), weight)."""
MIDDLE: Points = ((0.5, 1.0),)
"""Exact for a product of two factors, whose derivative is linear."""


@cache
def gauss(count: int) -> Points:
    """Return Gauss-Legendre points, exact if the derivative is a polynomial of degree 2 count - 1."""
    points, weights = numpy.polynomial.legendre.leggauss(count)
    return tuple(zip(((1 + points) / 2).tolist(), (weights / 2).tolist(), strict=True))


def along(points: Points, func: Callable[..., Tensor], *args: Any) -> Tensor:
    """Apply `func`, with its mean derivative along the straight line between both rows (all activations together)."""
    with torch.no_grad():
        y = func(*args)
        y = y.clone() if y._is_view() else y  # einsum may return one, which must not be changed in place
    if points is MIDDLE:
        return InPlaceOf.apply(func(*_at(0.5, args)), y)
    return InPlaceOf.apply(sum(weight * func(*_at(share, args)) for share, weight in points), y)


def _at(share: float, args: Iterable[Any]) -> list[Any]:
    return [
        Interpolate.apply(x, share) if is_activation(x) else _at(share, x) if isinstance(x, (list, tuple)) else x
        for x in args
    ]


def secant(func: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply an element-wise function, with the multiplier (f(x) - f(x')) / (x - x'), or the derivative at the middle
    where x and x' are nearly equal and their difference is rounding. In at least float32, for any type of model."""
    x_ = x.detach()
    if len(x_) % 2:
        raise MissingRule("chosen rows lose their partners, so that difference rules do not hold.")
    exact = x_.to(wide(x_))
    value = func(exact)
    (row_x, partner_x), (y, partner_y) = exact.chunk(2), value.chunk(2)
    same = lambda x: x  # noqa: E731
    with torch.enable_grad(), saved_tensors_hooks(same, same):  # checkpointing would compute the layer again for these
        middle = torch.lerp(partner_x, row_x, 0.5).requires_grad_()
        (derivative,) = torch.autograd.grad(func(middle).sum(), middle)  # given a gradient, grad imports sympy
    dx, dy = row_x - partner_x, y - partner_y
    near = _small(dx, exact, 1) & _small(dy, value)
    return Rescaled.apply(  # type: ignore[no-any-return]
        x, value if exact.dtype == x.dtype else func(x_), torch.where(near, derivative, dy / dx)
    )


def _small(difference: Tensor, values: Tensor, least: float = 0) -> Tensor:
    size = torch.maximum(*values.abs().chunk(2))
    size = size.clamp_(min=least) if least else size
    return difference.abs() <= size.mul_(torch.finfo(size.dtype).eps ** 0.5)


def elementwise(mode: Any, func: Rule, args: tuple, kwargs: dict) -> Any:
    """The rescale rule; with a partner of zero and f(0) = 0 it is Eq. 9."""
    x, more = args[0] if args else kwargs.pop("input"), args[1:]
    if not is_activation(x):
        return func(x, *more, **kwargs)
    if operation_table.takes_inplace(func, args, kwargs):
        return x.copy_(elementwise(mode, operation_table.out_of_place(func), (x, *more), kwargs))
    if func in SQUARE or (func in POWER and (*more, kwargs.get("exponent")) == (2, None)):
        return square(x)
    return secant(lambda x: func(x, *more, **kwargs), x)


def square(x: Tensor) -> Tensor:
    row_x, partner_x = x.detach().chunk(2)
    return Rescaled.apply(x, x.detach().square(), row_x + partner_x)  # type: ignore[no-any-return]


def product(mode: Any, func: Rule, args: tuple, kwargs: dict) -> Any:
    """d(ab) = da mean(b) + mean(a) db; with a partner of zero it is Eq. 14 and 15."""
    factors = [x for part in args for x in (part if isinstance(part, (list, tuple)) else (part,))]
    count = sum(map(is_activation, factors))
    if count < 2:
        return func(*args, **kwargs)
    if func in IN_PLACE:
        return args[0].copy_(PairedProduct.apply(*args, IN_PLACE[func]))
    if len(factors) == count == 2 and all(len(x) % 2 == 0 for x in factors):
        return PairedProduct.apply(*args, partial(func, **kwargs) if kwargs else func)
    return along(MIDDLE if count == 2 else gauss(count - 1), partial(func, **kwargs), *args)


def linear(mode: Any, func: Rule, args: tuple, kwargs: dict) -> Any:
    """dy = W dx."""
    named = dict(zip(("input", "weight"), args, strict=False), **kwargs)
    x, weight = named["input"], named["weight"]
    if is_activation(weight):
        raise MissingRule("linear with a weight that depends on the input has no difference rule.")
    if not is_activation(x):
        return func(*args, **kwargs)
    return PairedLinear.apply(x, weight, partial(func, *args, **kwargs))


def addmm(mode: Any, func: Rule, args: tuple, kwargs: dict) -> Any:
    """summand + a @ b."""
    names = ("batch1", "batch2") if "batch1" in kwargs else ("mat1", "mat2")
    options = {name: value for name, value in kwargs.items() if name not in names}
    return along(MIDDLE, partial(func, **options), *args, *(kwargs[name] for name in names if name in kwargs))


def divide(mode: Any, func: Rule, args: tuple, kwargs: dict) -> Any:
    """A product with the reciprocal."""
    a, b = args
    if not is_activation(b) or kwargs:
        if is_activation(b):
            raise MissingRule("division with rounding has no difference rule.")
        return func(*args, **kwargs)
    inverse = secant(torch.reciprocal, b)
    y = PairedProduct.apply(a, inverse, torch.mul) if is_activation(a) else a * inverse
    return args[0].copy_(y) if func in IN_PLACE else y


def variance(mode: Any, func: Rule, args: tuple, kwargs: dict) -> Any:
    """A polynomial of degree 2."""
    if not is_activation(args[0]):
        return func(*args, **kwargs)
    return along(MIDDLE, partial(func, **kwargs), *args)


def softmax(mode: Any, func: Rule, args: tuple, kwargs: dict) -> Any:
    """dp = J ds, J written out in `Softmax`."""
    x, *more = args
    if not is_activation(x):
        return func(*args, **kwargs)
    if mode.method.softmax == "constant":
        return Scaled.apply(func(*args, **kwargs), 0.0, False)  # both rows' weights count, without relevance
    dim = more[0] if more else kwargs["dim"]
    return Softmax.apply(x, lambda x: func(x, *more, **kwargs), dim)


def norm(mode: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, center: bool) -> Tensor:
    """y = x r(m), m = mean(x^2): dy = mean(r) dx + mean(x) dr, dr by r's secant between both m; behind centring."""
    with torch.no_grad():
        y = normalized(x, weight, bias, eps, center)
    centered = x - x.mean(-1, keepdim=True) if center else x
    power = square(centered).mean(-1, keepdim=True)
    line = PairedProduct.apply(centered, secant(lambda m: torch.rsqrt(m + eps), power), torch.mul)
    return InPlaceOf.apply(line if weight is None else line * weight, y)  # type: ignore[no-any-return]


def fused_attention(mode: Any, func: Rule, args: tuple, kwargs: dict) -> Any:
    """A product, a softmax and a product; for constant weights mean(p) dv, in two fused calls."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    named = dict(zip(names, args, strict=False), **kwargs)
    q, k, v, mask = (named.pop(name, None) for name in names[:4])
    if mode.method.softmax == "constant":
        q, k, mask = (x.detach() if is_activation(x) else x for x in (q, k, mask))
        y = func(q, k, v, mask, **named)
        other = func(partner(q), partner(k), v, mask, **named)
        return InPlaceOf.apply((y + other) / 2, y.detach().clone())
    run = partial(func, q, k, v, mask, **named)
    if all(map(is_activation, (q, k, v))) and not is_activation(mask) and q.dim() == 4 and len(q) == len(k):
        scale = named.get("scale") or q.shape[-1] ** -0.5
        return PairedAttention.apply(q, k, v, mask, run, named.get("is_causal", False), scale)
    with torch.no_grad():
        y = run()
    return InPlaceOf.apply(operation_table.attention_apart(mode, q, k, v, mask, **named), y)


def solve(mode: Any, func: Rule, args: tuple, kwargs: dict) -> Any:
    """A X = B for a triangular A: dX = mean(A)^-1 (dB - dA mean(X))."""
    (a, b), options = args, dict(kwargs)
    if not options.get("left", True):
        raise MissingRule("a triangular system has a difference rule only with its matrix at the left.")
    x = func(a, b, **options).detach()
    mean_a, mean_x = ((value + partner(value)) / 2 for value in (a.detach(), x))
    part = a.triu if options.get("upper") else a.tril  # what else is in the matrix is not read
    side = 1 if options.get("upper") else -1
    read = part(side if options.get("unitriangular") else 0)
    return InPlaceOf.apply(func(mean_a, b - read @ mean_x, **options), x)


def maximum(mode: Any, func: Rule, args: tuple, kwargs: dict) -> Any:
    """dy = (a dx_i + b dx_j) / (a + b), where i and j are the indices of the maximum in the row and in its partner,
    a = x_i - x_j, and b is the partner's x_j - x_i."""
    bound = inspect.signature(lambda input, dim=None, keepdim=False: None).bind(*args, **kwargs).arguments
    x, dim = bound["input"], bound.get("dim")
    if isinstance(dim, Tensor):
        return larger(mode, func, (x, dim), {})
    result = func(*args, **kwargs)
    if not is_activation(x):
        return result
    if not isinstance(dim, int):
        raise MissingRule("max has a difference rule only over one dimension.")
    top = result.indices if bound.get("keepdim") else result.indices.unsqueeze(dim)
    at_top, at_partner_top = x.gather(dim, top), x.gather(dim, partner(top))
    above = (at_top - at_partner_top).detach()
    both = above + partner(above)
    line = at_partner_top + torch.where(both > 0, above / both, 0.5) * (at_top - at_partner_top)
    values = InPlaceOf.apply(line.reshape(result.values.shape), result.values.detach().clone())
    return torch.return_types.max((values, result.indices))


def larger(mode: Any, func: Rule, args: tuple, kwargs: dict) -> Any:
    """The larger (or smaller) of two: dy = s da + (1 - s) db, where s is the share of the straight line between both
    rows on which a is taken. Running maxima of scans, which cancel, need it."""
    a, b = args
    y = func(a, b)
    if not is_activation(y):
        return y
    sign = -1 if func in SMALLER else 1
    above = sign * (a / 4 - b / 4).detach()  # masked scores are the smallest number, whose double is infinite
    partner_above = partner(above)
    apart = above.abs() + partner_above.abs()
    share = torch.where(apart > 0, (above.clamp(min=0) + partner_above.clamp(min=0)) / apart, 0.5)
    return InPlaceOf.apply(share * a + (1 - share) * b, y.detach())


def chosen(mode: Any, func: Rule, args: tuple, kwargs: dict) -> Any:
    """The k largest scores of a router: each row gets the experts that it chose and those of its partner, so that both
    rows have the same ones in the same order. `experts.row_choices` remembers which of them a row chose itself."""
    bound = inspect.signature(lambda input, k, dim=-1, largest=True, sorted=True: None).bind(*args, **kwargs)
    bound.apply_defaults()
    x, dim = bound.arguments["input"], bound.arguments["dim"]
    result = func(*args, **kwargs)
    chose = torch.zeros_like(x, dtype=torch.bool, requires_grad=False).scatter(dim, result.indices, True)
    if x.dim() != 2 or dim not in (1, -1) or not bound.arguments["largest"]:
        indices = result.indices if torch.equal(chose, partner(chose)) else result.indices.as_subclass(Unreadable)
        return torch.return_types.topk((Unread.apply(result.values), indices))
    count = chose.to(x.dtype) + partner(chose).to(x.dtype)
    indices = count.topk(int((count > 0).sum(-1).max())).indices
    experts.row_choices[indices] = chose.gather(-1, indices)
    return torch.return_types.topk((gathered(mode, torch.gather, (x, -1, indices), {}), indices))


def gathered(mode: Any, func: Rule, args: tuple, kwargs: dict) -> Any:
    """Linear where both rows read the same entries. The score of an expert that a row did not choose is `absent`, and
    the jump is attributed to the score of that expert."""
    bound = inspect.signature(lambda input, dim, index, sparse_grad=False: None).bind(*args, **kwargs)
    x, index = bound.arguments["input"], bound.arguments["index"]
    y = func(*args, **kwargs)
    chose = experts.row_choices.get(index)
    if chose is None:
        if is_activation(x) and len(index) % 2 == 0 and not torch.equal(index, partner(index)):
            raise MissingRule("gather has a difference rule only where both prompts read the same entries.")
        return y
    if not x.is_floating_point():
        if not chose.all():
            raise MissingRule("numbers of experts that only one of both prompts chose have no difference rule.")
        return y
    if not is_activation(x):
        return torch.where(chose, y, absent(mode, x, y, chose))
    return only(y, chose, absent(mode, x, y.detach(), chose))


def absent(mode: Any, scores: Tensor, chosen: Tensor, chose: Tensor) -> Tensor | float:
    """Return the score that stands for "not chosen": 0, but for logits one so low that its weight is zero."""
    family = family_of(mode.net)
    is_logits = (family and family.expert_logits) or bool((scores.detach() < 0).any())
    return low(chosen, chose) if is_logits else 0.0


def low(x: Tensor, chose: Tensor) -> Tensor:
    smallest = x.masked_fill(~chose, torch.inf).amin(-1, keepdim=True)
    return torch.minimum(smallest, partner(smallest)).clamp(max=0) - 100


def only(x: Tensor, chose: Tensor, other: Tensor | float) -> Tensor:
    """Return x, or another value where a row did not choose it, by the rescale rule."""
    x_ = x.detach()
    y = torch.where(chose, x_, other)
    dx, dy = x_ - partner(x_), y - partner(y)
    at_zero = (chose.to(x.dtype) + partner(chose).to(x.dtype)) / 2
    multiplier = torch.where(dx == 0, at_zero, dy / dx.masked_fill(dx == 0, 1))
    return Multiplied.apply(x, y, multiplier).clone()  # type: ignore[no-any-return]  # routers change it in place


def filled(mode: Any, func: Rule, args: tuple, kwargs: dict) -> Any:
    """Linear where both rows are masked alike. A router's mask (of groups of experts) differs between them."""
    x, mask, value = inspect.signature(lambda input, mask, value: None).bind(*args, **kwargs).args
    if not is_activation(x) or x.dim() != 2 or mask.shape != x.shape or torch.equal(mask, partner(mask)):
        return func(*args, **kwargs)
    y = only(x, ~mask, low(x.detach(), ~mask) if value == -torch.inf else value)
    return x.copy_(y) if func is Tensor.masked_fill_ else y


def scattered(mode: Any, func: Rule, args: tuple, kwargs: dict) -> Any:
    """Linear; a constant goes to the entries that a row chose."""
    bound = inspect.signature(lambda input, dim, index, src=None, value=None, reduce=None: None).bind(*args, **kwargs)
    x, dim, index = bound.args[:3]
    value = bound.arguments.get("src", bound.arguments.get("value"))
    if is_activation(value) or index not in experts.row_choices:
        return func(*args, **kwargs)
    before = x.gather(dim, index)
    value = value if isinstance(value, Tensor) else before.new_tensor(value)
    return func(x, dim, index, torch.where(experts.row_choices[index], value, before))


def repeated(mode: Any, func: Rule, args: tuple, kwargs: dict) -> Any:
    """Linear, but copies of all rows (Llama 4's experts) are no two halves of pairs."""
    x, sizes = args[0], args[1] if len(args) == 2 and not isinstance(args[1], int) else args[1:]
    if is_activation(x) and (len(sizes) > x.dim() or sizes[0] != 1):
        raise MissingRule("repeated rows lose their partners, so that difference rules do not hold.")
    return func(*args, **kwargs)


def indexed(mode: Any, func: Rule, args: tuple, kwargs: dict) -> Any:
    """Linear, but rows that are chosen by number (tokens of an expert) must have their partners half a length later."""
    x, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
    rows = next((part for part in index if part is not None), None)
    if isinstance(rows, Tensor) and rows.dtype == torch.long and rows.dim() == 1 and is_activation(x):
        left, right = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        if not torch.equal(left + len(x) // 2, right):
            raise MissingRule("chosen rows lose their partners, so that difference rules do not hold.")
    return func(*args, **kwargs)


NOT_LINEAR = "max amax min amin topk sort maximum minimum max_pool1d max_pool2d norm std std_mean".split()
"""Operations in `operation_table.KEEP` that are not linear."""
LINEAR_IN_PAIRS = "repeat __getitem__ gather scatter scatter_ masked_fill masked_fill_".split()
"""Operations that are linear where rows keep their partners."""
KERNELS = "_grouped_mm grouped_mm".split()
"""They sort tokens by expert, so that rows lose their partners; experts of a known family run past them."""

IN_PLACE: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    func: plain
    for plain, names in ((torch.mul, ("mul_", "__imul__")), (torch.div, ("div_", "__itruediv__")))
    for name in names
    for func in operation_table.named(name)
}
SQUARE = set(operation_table.named("square"))
SMALLER = {*operation_table.named("minimum"), *operation_table.named("min")}
POWER = {*operation_table.named("pow"), *operation_table.named("__pow__")}


TABLE = operation_table.table(
    {
        operation_table.keep_gradient: [
            *(name for name in operation_table.KEEP if name not in (*NOT_LINEAR, *LINEAR_IN_PAIRS)),
            *operation_table.CONVOLUTIONS,
            *operation_table.ADD,
            *operation_table.CONCATENATE,
        ],
        linear: ["linear"],
        addmm: operation_table.ADDMM,
        elementwise: [*operation_table.ELEMENTWISE, "rsqrt", "reciprocal", "__rtruediv__"],
        product: [name for name in operation_table.PRODUCT if name not in KERNELS],
        divide: operation_table.DIVIDE,
        variance: ["var"],
        softmax: ["softmax"],
        operation_table.normalisation(True, norm): ["layer_norm"],
        operation_table.normalisation(False, norm): ["rms_norm"],
        fused_attention: ["scaled_dot_product_attention"],
        maximum: ["max"],
        larger: ["maximum", "minimum"],
        chosen: ["topk"],
        gathered: ["gather"],
        filled: ["masked_fill", "masked_fill_"],
        scattered: ["scatter", "scatter_"],
        repeated: ["repeat"],
        indexed: ["__getitem__"],
    }
) | {torch.linalg.solve_triangular: solve}
LINEAR = (operation_table.keep_gradient, linear, repeated, indexed, gathered, scattered, filled)
"""The rules of operations that are linear in each argument."""
