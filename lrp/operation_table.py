"""The table: torch operation -> relevance rule (AttnLRP, Achtibat et al. 2024).

`RelevanceMode` sees every torch operation of an unmodified forward pass and finds its rule in a table, this one or the
table of `icebear.lrp.differences`. An operation on an activation (a tensor that requires a gradient, because
parameters are frozen) that is not in the table raises `MissingRule`.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import _get_sequence_nr
from torch.overrides import TorchFunctionMode

from icebear.errors import MissingRule
from icebear.lrp import rules
from icebear.lrp.linear_rules import Epsilon, LinearRule, Rules
from icebear.models.parts import experts

Rule = Callable[..., Any]
"""Called by the mode as rule(mode, func, args, kwargs)."""


def is_activation(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def keep_gradient(mode: RelevanceMode, func: Rule, args: tuple, kwargs: dict) -> Any:
    """Epsilon rule with eps -> 0 (Eq. 8) for operations that are linear in their activations: the plain gradient."""
    return func(*args, **kwargs)


def add(mode: RelevanceMode, func: Rule, args: tuple, kwargs: dict) -> Any:
    """Eq. 8 for a sum; the share of a constant summand is accounted."""
    y = func(*args, **kwargs)
    if mode.accounting is not None and is_activation(y):
        for constant in args[:2]:
            if isinstance(constant, float | int) and constant:
                mode.account_constant(y, y.new_tensor(constant), "biases")
            elif isinstance(constant, Tensor) and constant.is_floating_point() and not constant.requires_grad:
                mode.account_constant(y, constant, constant_name(constant))
    return y


def constant_name(summand: Tensor) -> str:
    """Return the name of a constant summand (..., T, D) in the accounting: the same at every position is a bias."""
    same = summand.dim() < 2 or (summand.shape[-2] > 1 and bool((summand == summand[..., :1, :]).all()))
    return "biases" if same else "positions"


def concatenate(mode: RelevanceMode, func: Rule, args: tuple, kwargs: dict) -> Any:
    """Eq. 8; the share of constant parts (a [CLS] token) is accounted."""
    y = func(*args, **kwargs)
    parts = args[0] if args else kwargs["tensors"]
    if mode.accounting is not None and is_activation(y) and not all(map(is_activation, parts)):
        constants = [torch.zeros_like(part) if is_activation(part) else part for part in parts]
        mode.account_constant(y, func(constants, *args[1:], **kwargs), "biases")
    return y


def linear(mode: RelevanceMode, func: Rule, args: tuple, kwargs: dict) -> Any:
    """The rule of the method for a linear map or a convolution (Eq. 8 by default); the bias retains its share."""
    named = dict(zip(("input", "weight", "bias"), args, strict=False), **kwargs)
    more = args[3:]
    x, weight, bias = (named.pop(name, None) for name in ("input", "weight", "bias"))
    if is_activation(weight):
        raise MissingRule(f"{func.__name__} with a weight that depends on the input has no relevance rule.")
    y = func(x, weight, bias, *more, **named)
    rule = mode.linear_rule if func is F.linear else mode.method.conv or mode.method.linear
    if not is_activation(y) or (bias is None and rule == Epsilon()):
        return y
    if bias is not None and func is not F.linear:
        bias = bias.view(-1, *[1] * (y.dim() - 2))  # behind the channels
    return mode.linear_map(lambda x, weight: func(x, weight, None, *more, **named), x, y, weight, bias, rule)


def addmm(mode: RelevanceMode, func: Rule, args: tuple, kwargs: dict) -> Any:
    """summand + a @ b: Eq. 8 and, when both factors are activations, Eq. 14."""
    names = ("batch1", "batch2") if "batch1" in kwargs else ("mat1", "mat2")
    summand, a, b = (*args, *(kwargs[name] for name in names[len(args) - 1 :]))[:3]
    y = func(*args, **kwargs)
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    if is_activation(a) and is_activation(b):
        if is_activation(summand):  # Bloom's scores, with positions attributed to: a sum and a product, one by one
            return beta * summand + alpha * rules.uniform(torch.matmul(a, b), fresh=True)
        y = rules.uniform(y, fresh=True)
    elif is_activation(a) and summand.dim() < 2 and beta == alpha == 1:
        return mode.linear_map(torch.matmul, a, y, b, summand, mode.linear_rule)  # transformers' Conv1D
    if mode.accounting is not None and is_activation(y) and not is_activation(summand):
        mode.account_constant(y, summand * beta, constant_name(summand))
    return y


def elementwise(mode: RelevanceMode, func: Rule, args: tuple, kwargs: dict) -> Any:
    """Identity rule (Eq. 9)."""
    x = args[0] if args else kwargs["input"]
    if not is_activation(x):
        return func(*args, **kwargs)
    if takes_inplace(func, args, kwargs):
        return overwriting(elementwise, out_of_place(func))(mode, func, args, kwargs)
    with torch.no_grad():
        y = func(*args, **kwargs)
    return rules.identity(x, y)


def takes_inplace(func: Rule, args: tuple, kwargs: dict) -> bool:
    """Return whether a function of `torch.nn.functional` is told to change its input in place."""
    position = _inplace_position(func)
    return position is not None and bool(args[position] if len(args) > position else kwargs.get("inplace"))


@functools.cache
def _inplace_position(func: Rule) -> int | None:
    try:
        names = list(inspect.signature(func).parameters)
    except ValueError:  # a function of C++
        return None
    return names.index("inplace") if "inplace" in names else None


@functools.cache
def out_of_place(func: Rule) -> Rule:
    """Return a function whose argument ``inplace`` is false, whatever is given."""
    position = _inplace_position(func)

    def plain(*args: Any, **kwargs: Any) -> Any:
        others = {name: value for name, value in kwargs.items() if name != "inplace"}
        return func(*(False if at == position else value for at, value in enumerate(args)), **others)

    return plain


def overwriting(rule: Rule, plain: Rule) -> Rule:
    """Return the rule of an operation in place: that of its plain form, whose result is written over the input."""

    def ruled(mode: RelevanceMode, func: Rule, args: tuple, kwargs: dict) -> Any:
        x, more = (args[0], args[1:]) if args else (kwargs["input"], ())
        others = {name: value for name, value in kwargs.items() if args or name != "input"}
        y = rule(mode, plain, (x, *more), others)
        return x.copy_(y) if is_activation(x) or is_activation(y) else func(*args, **kwargs)

    return ruled


def product(mode: RelevanceMode, func: Rule, args: tuple, kwargs: dict) -> Any:
    """Uniform rule (Eq. 14, 15) for two activations; Eq. 8 when the other factor is a constant."""
    y = func(*args, **kwargs)
    if func is torch.einsum:
        count = sum(map(is_activation, args[1] if isinstance(args[1], (tuple, list)) else args[1:]))
        if count > 2:
            raise MissingRule(f"einsum of {count} activations has no relevance rule.")
        both = count == 2
    else:
        both = is_activation(args[0]) and is_activation(args[1])
    return rules.uniform(y, fresh=True) if both else y


def divide(mode: RelevanceMode, func: Rule, args: tuple, kwargs: dict) -> Any:
    """Eq. 19: a divisor is a constant."""
    divisor = args[1].detach() if isinstance(args[1], Tensor) else args[1]
    return func(args[0], divisor, *args[2:], **kwargs)


def constant(mode: RelevanceMode, func: Rule, args: tuple, kwargs: dict) -> Any:
    """Eq. 19: the divisor of a norm (a reciprocal root, a variance) is a constant."""
    y = func(*args, **kwargs)
    return tuple(part.detach() for part in y) if isinstance(y, tuple) else y.detach()


def softmax(mode: RelevanceMode, func: Rule, args: tuple, kwargs: dict) -> Any:
    """Softmax rule (Eq. 13), the Taylor expansion at x: the plain gradient. CP-LRP: a constant."""
    if not is_activation(args[0]):
        return func(*args, **kwargs)
    if mode.method.softmax == "constant":
        return func(*args, **kwargs).detach()
    x = mode.account(args[0], "softmax", -1)
    if mode.method.softmax == "zplus":
        y = rules.SoftmaxZPlus.apply(x, func(x.detach(), *args[1:], **kwargs))
    else:
        y = func(x, *args[1:], **kwargs)
    return mode.account(y, "softmax", +1)


def normalisation(center: bool, apply: Callable[..., Tensor]) -> Rule:
    """Return the rule of `F.layer_norm` or `F.rms_norm`: apply(mode, x, weight, bias, eps, center)."""

    def rule(mode: RelevanceMode, func: Rule, args: tuple, kwargs: dict) -> Any:
        bound = inspect.signature(func).bind(*args, **kwargs).arguments
        x = bound["input"]
        if not is_activation(x):
            return func(*args, **kwargs)
        if len(bound["normalized_shape"]) != 1:
            raise MissingRule(f"{func.__name__} over several dimensions has no relevance rule.")
        eps = bound.get("eps", 1e-5 if center else None)
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        return apply(mode, x, bound.get("weight"), bound.get("bias"), eps, center)

    return rule


def norm(
    mode: RelevanceMode, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, center: bool
) -> Tensor:
    """Eq. 19."""
    y: Tensor = rules.Norm.apply(x, weight, bias, eps, center)
    mode.account_constant(y, bias, "biases")
    return y


def fused_attention(mode: RelevanceMode, func: Rule, args: tuple, kwargs: dict) -> Any:
    """Eq. 14, 13, 14 in a row: q and k get a quarter of their gradients, v half."""
    named = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False), **kwargs)
    more = args[4:]
    q, k, v, mask = (named.pop(name, None) for name in ("query", "key", "value", "attn_mask"))
    if mode.method.softmax == "constant":
        return func(q.detach(), k.detach(), v, mask.detach() if is_activation(mask) else mask, *more, **named)
    if not (is_activation(q) or is_activation(k)):
        return func(q, k, v, mask, *more, **named)
    if not (is_activation(q) and is_activation(k) and is_activation(v)):
        raise MissingRule("scaled_dot_product_attention with some constant inputs has no relevance rule.")
    if mode.method.softmax == "zplus":
        return attention_apart(mode, q, k, v, mask, *more, **named)
    if is_activation(mask):  # position biases, a summand of the scores
        mask = mode.account(mask, "softmax", -1)
    # The softmax retains half of the relevance of y, minus that of q and k: equal amounts, and half goes to each.
    y = func(mode.account(rules.uniform(q), "softmax", -1), rules.uniform(k), v, mask, *more, **named)
    return mode.account(rules.uniform(y), "softmax", +0.5)


def attention_apart(
    mode: RelevanceMode,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run attention operation by operation, each by its rule, for rules that need the weights (B, H, T, T)."""

    def ruled(func: Rule, *args: Any) -> Tensor:
        y: Tensor = mode.table[func](mode, func, args, {})
        return y

    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    x = ruled(torch.matmul, q, k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        x = x.masked_fill(torch.ones(x.shape[-2:], device=x.device).triu(1).bool(), -torch.inf)
    if mask is not None:
        x = x.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else ruled(torch.add, x, mask)
    return ruled(torch.matmul, ruled(torch.softmax, x, -1), v)


KEEP = """
    sum mean neg negative __neg__ positive sub subtract __sub__ __isub__ sub_ __rsub__ rsub cumsum
    embedding embedding_bag dropout alpha_dropout feature_dropout
    to float double half bfloat16 type type_as contiguous clone cpu cuda view_as requires_grad_ detach detach_
    view reshape flatten unflatten squeeze unsqueeze transpose t permute movedim swapaxes swapdims
    __getitem__ select narrow unbind chunk split tensor_split unfold diagonal expand expand_as repeat
    repeat_interleave broadcast_to tile stack hstack vstack pad roll flip rot90
    index_select gather take_along_dim index_add index_add_ index_copy index_copy_ index_put index_put_
    scatter scatter_ scatter_add scatter_add_ __setitem__ masked_fill masked_fill_ masked_scatter where
    tril triu max amax min amin topk sort maximum minimum
    avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d max_pool1d max_pool2d interpolate
    split_with_sizes real view_as_real view_as_complex reshape_as copy_ fill_ zero_ T mT H mH
    shape size dtype device ndim dim numel requires_grad grad_fn is_floating_point is_contiguous _set_grad_enabled
""".split()
CONVOLUTIONS = "conv1d conv2d conv3d".split()
ADD = "add add_ __add__ __iadd__ __radd__".split()
CONCATENATE = "cat concat concatenate".split()
ADDMM = "addmm baddbmm".split()
ELEMENTWISE = """
    silu gelu relu leaky_relu elu selu celu mish softplus softsign hardswish hardsigmoid logsigmoid tanh
    sigmoid exp expm1 log log1p pow __pow__ square sqrt abs sin cos erf clamp clamp_min clamp_max clip hardtanh
    relu6 tanhshrink
""".split()
PRODUCT = """
    mul multiply mul_ __mul__ __imul__ __rmul__ matmul __matmul__ __rmatmul__ bmm mm mv dot einsum
    _grouped_mm grouped_mm
""".split()
DIVIDE = "div divide true_divide div_ __truediv__ __itruediv__".split()
CONSTANT = "rsqrt reciprocal __rtruediv__ var std var_mean std_mean norm".split()


def named(name: str) -> Iterator[Any]:
    """Yield every torch function and method called `name` (the getter of a property, as a mode sees it)."""
    for home in (torch, Tensor, F, torch._C._nn):
        func = getattr(home, name, None)
        if func is not None:
            yield func.__get__ if inspect.isgetsetdescriptor(func) else func


def table(rows: dict[Rule, list[str]]) -> dict[Any, Rule]:
    """Return the rule of every torch function and method that has one of these names, or is the form in place of one
    (``clamp_`` of ``clamp``) and has no name of its own in the rows."""
    plain = {func: rule for rule, names in rows.items() for name in names for func in named(name)}
    in_place = {}
    for rule, names in rows.items():
        for name in names:
            for plain_func, func in forms_in_place(name):
                in_place[func] = rule if rule is keep_gradient else overwriting(rule, plain_func)
    return in_place | plain


def forms_in_place(name: str) -> Iterator[tuple[Any, Any]]:
    """Yield each torch function or method of a name, with its form that changes its input in place."""
    other = f"__i{name[2:]}" if name.startswith("__") else f"{name}_"
    for home in (torch, Tensor, F, torch._C._nn):
        both = getattr(home, name, None), getattr(home, other, None)
        if all(map(callable, both)):
            yield both


TABLE = table(
    {
        keep_gradient: KEEP,
        linear: ["linear", *CONVOLUTIONS],
        add: ADD,
        concatenate: CONCATENATE,
        addmm: ADDMM,
        elementwise: ELEMENTWISE,
        product: PRODUCT,
        divide: DIVIDE,
        constant: CONSTANT,
        softmax: ["softmax"],
        normalisation(True, norm): ["layer_norm"],
        normalisation(False, norm): ["rms_norm"],
        fused_attention: ["scaled_dot_product_attention"],
    }
)


class RelevanceMode(TorchFunctionMode):
    """Applies a table to the torch operations run while it is active (in this thread).

    accounting: name -> tensor (B,) of relevance that does not reach the tokens; or None.
    strict: raise for an operation without a rule; False warns, and records it in `missing`.
    """

    def __init__(
        self,
        net: nn.Module,
        method: Rules,
        accounting: dict[str, Tensor] | None = None,
        strict: bool = True,
        table: dict[Any, Rule] = TABLE,
    ):
        super().__init__()
        self.method = method
        self.linear_rule = method.linear
        """That of the linear map that runs: projections of attention may have another one."""
        self.net, self.accounting, self.strict, self.table = net, accounting, strict, table
        self.missing: list[str] = []
        self.unseen: set[int] = set()
        """Numbers of graph nodes made between the operations seen: by a custom autograd.Function, TorchScript or an
        extension."""
        # torch numbers the nodes that a thread makes. If the number moves between two operations, something that torch
        # does not show to this mode made nodes.
        self._next_node = 0

    def __enter__(self) -> RelevanceMode:
        self.unseen.clear()
        self._next_node = _get_sequence_nr()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.catch_up()
        super().__exit__(*error)

    def catch_up(self) -> None:
        """Note the nodes made since the last operation."""
        node = _get_sequence_nr()
        if node != self._next_node:
            self.unseen.update(range(self._next_node, node))
            self._next_node = node

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Skip the operations inside, which belong to a rule."""
        self.catch_up()
        super().__exit__(None, None, None)
        try:
            yield
        finally:
            super().__enter__()  # ours would clear `unseen`
            self._next_node = _get_sequence_nr()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        # Some 80 times a layer: any unneeded work here costs a percent of a pass.
        if _get_sequence_nr() != self._next_node:
            self.catch_up()
        rule = self.table.get(func)
        if rule is keep_gradient:
            y = func(*args, **kwargs) if kwargs else func(*args)
        else:
            y = self._ruled(rule, func, args, kwargs or {})
        self._next_node = _get_sequence_nr()
        return y

    def _ruled(self, rule: Rule | None, func: Any, args: tuple, kwargs: dict) -> Any:
        if rule is not None:
            try:
                return rule(self, func, args, kwargs)
            except MissingRule as error:
                raise MissingRule(f"In {self.module_path()}: {error}") from None
        y = func(*args, **kwargs)
        # A leaf, such as the empty tensor that torch 2.11 makes at a checkpoint, is not computed from activations.
        if any(is_activation(x) and x.grad_fn is not None for x in (y if isinstance(y, (tuple, list)) else (y,))):
            self.refuse(_operation_name(func), self.module_path())
        return y

    def refuse(
        self,
        operation: str,
        path: str,
        remedy: str = "choose another method, such as gxi, add it to the table in lrp/operation_table.py",
    ) -> None:
        """Raise, or with strict=False record and warn, that `operation` in module `path` has no rule."""
        message = (
            f"The operation {operation} in {path} has no relevance rule; {remedy}, or pass strict=False to take its "
            "plain gradient with a warning."
        )
        if self.strict:
            raise MissingRule(message)
        self.missing.append(f"{operation} in {path}")
        warnings.warn(message, stacklevel=2)

    def retain(self, name: str, factor: float, relevance: Tensor, part: tuple[Tensor, int] | None = None) -> None:
        """Add factor x relevance (in batch order), summed per batch row, to the accounting, if there is one.

        part: for relevance (R, ...) of some tokens of the batch, which of how many (`icebear.models.parts.experts`).
        """
        if self.accounting is None:
            return
        entry = self.accounting[name]
        if part is None:
            entry.add_(relevance.reshape(len(entry), -1).sum(1, dtype=entry.dtype).to(entry.device), alpha=factor)
            return
        tokens, count = part
        sums = relevance.flatten(1).sum(1, dtype=entry.dtype).to(entry.device)
        entry.index_add_(0, (tokens * len(entry) // count).to(entry.device), sums, alpha=factor)

    def account(self, x: Tensor, name: str, factor: float) -> Tensor:
        """Return x; the backward pass adds factor x the relevance of x to the accounting."""
        if self.accounting is None:
            return x
        retain = lambda x, g: self.retain(name, factor, rules.product(x, g, name))  # noqa: E731
        return rules.CaptureGradient.apply(x, x, retain)  # type: ignore[no-any-return]

    def account_constant(self, y: Tensor, value: Tensor | None, name: str) -> None:
        """Account for the relevance of the constant summand `value` of y: sum(value * g_y)."""
        if self.accounting is not None and value is not None:
            part = experts.expert_tokens.get()
            y.register_hook(lambda g: self.retain(name, 1, rules.product(value, g, name), part))

    def linear_map(
        self, f: Rule, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, rule: LinearRule
    ) -> Tensor:
        """Return y = f(x, weight) + bias under `rule`, with the share of the bias accounted."""
        if rule == Epsilon():  # the plain gradient
            self.account_constant(y, bias, "biases")
            return y
        part = experts.expert_tokens.get()
        retain = lambda share: self.retain("biases", 1, share, part)  # noqa: E731
        return rules.LinearMap.apply(x, y.detach(), weight, bias, f, rule, retain)

    def module_path(self) -> str:
        """Return the innermost module of `net` on the Python stack, as `model.layers.3.mlp (LlamaMLP)`."""
        names = {id(module): name for name, module in self.net.named_modules()}
        frame = inspect.currentframe()  # only a refusal asks for the path, so passes do not keep track of it
        while frame is not None:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and id(module) in names:
                return f"{names[id(module)] or 'the model itself'} ({type(module).__name__})"
            frame = frame.f_back
        return "an unknown module"


def _operation_name(func: Any) -> str:
    if getattr(func, "__name__", "") == "__get__":
        return str(getattr(func.__self__, "__name__", func))
    home = getattr(func, "__module__", None) or "torch.Tensor"
    return f"{home}.{getattr(func, '__name__', func)}"
