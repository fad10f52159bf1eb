"""`with relevance_rules(net, method):` the rules hold inside the forward pass of this one model, and nowhere else."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import _get_sequence_nr
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2CLS

from icebear.concepts.lrp import differences, rules
from icebear.concepts.lrp.linear_rules import Epsilon
from icebear.concepts.lrp.operations import TABLE, RelevanceMode, is_activation
from icebear.concepts.models.dispatch import packed
from icebear.concepts.models.families import SCANS, family_of
from icebear.concepts.models.linear import Linear
from icebear.concepts.models.lock import replaced

if TYPE_CHECKING:
    from icebear.concepts.methods.lrp import AttnLRP, Difference

_TORCH_ACTIVATIONS = (
    "SiLU GELU ReLU ReLU6 LeakyReLU ELU SELU CELU Mish Softplus Softsign Hardswish Hardsigmoid Hardtanh "
    "LogSigmoid Tanh Sigmoid Tanhshrink"
).split()

# Some are written as a formula (NewGELU), whose parts the table would treat as products: the whole is one Eq. 9.
ACTIVATION_MODULES: tuple[type, ...] = tuple(
    {getattr(nn, name) for name in _TORCH_ACTIVATIONS}
    | {entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values()}
)


@functools.cache
def _is_elementwise(kind: type[nn.Module], norms: bool) -> bool:
    """norms: whether RMS norms count. Their divisor is a constant (Eq. 19), so that they scale each entry and Eq. 9 for
    the whole equals the table's rules for their ten operations, in less time."""
    return issubclass(kind, ACTIVATION_MODULES) or (norms and kind.__name__.endswith("RMSNorm"))


@contextmanager
def relevance_rules(
    net: nn.Module,
    method: AttnLRP | Difference,
    accounting: dict[str, Tensor] | None = None,
    strict: bool = True,
    checkpoint_layers: Iterable[nn.Module] = (),
    checkpoint_from: int = 0,
) -> Iterator[RelevanceMode]:
    """Inside, a call of `net` and a backward pass from its output give activation x gradient = relevance.

    The values of the forward pass stay the model's own. Parameters are frozen, this instance's forward
    methods are wrapped, and all of it is undone on exit, also after an exception. Other models, and code
    outside `net`'s forward pass, are not touched.

    accounting: name -> zeros (B,), to which is added what is kept by "biases", "positions" and the "softmax" bias term.
    strict: raise `MissingRule` for an operation without a rule (False: warn and record it).
    checkpoint_layers: modules whose inner activations are recomputed in the backward pass instead of kept, where
        they read at least `checkpoint_from` tokens.
    """
    mode = RelevanceMode(net, method, accounting, strict, differences.TABLE if method.paired else TABLE)
    with ExitStack() as undo:
        family = family_of(net.config) if hasattr(net, "config") else None
        own = family.activations if family else ()
        for module in net.modules():
            _freeze(module, undo)
            kind = type(module)
            if SCANS.search(kind.__name__):
                undo.enter_context(wrapped(module, functools.partial(_scan, mode, module)))
            if packed(module):
                undo.enter_context(wrapped(module, functools.partial(_packed, mode, module)))
            if kind.__name__ in own or _is_elementwise(kind, not method.paired):  # type: ignore[arg-type]  # classes have a hash
                rule = differences.secant if method.paired else _identity
                undo.enter_context(wrapped(module, functools.partial(_as_a_whole, mode, rule)))
        for layer in checkpoint_layers:
            undo.enter_context(wrapped(layer, functools.partial(_checkpointed, mode, checkpoint_from)))
        undo.enter_context(wrapped(net, functools.partial(_with_mode, mode)))
        yield mode


def _with_mode(mode: RelevanceMode, forward: Callable) -> Callable:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with mode:
            output = forward(*args, **kwargs)
        found = _foreign(mode, output)
        if found:
            places = _located(mode, forward, args, kwargs) or {_name(node): "the model itself" for node in found}
            for name, path in places.items():
                mode.refuse(name, path, "write it with torch's own operations")
        return output

    return wrapper


def _scan(mode: RelevanceMode, module: nn.Module, forward: Callable) -> Callable:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if any(map(is_activation, (*args, *kwargs.values()))):
            name = next(name for name, found in mode.net.named_modules() if found is module)
            remedy = "explain a model with attention instead"
            mode.refuse("scan over tokens", f"{name} ({type(module).__name__})", remedy)
        return forward(*args, **kwargs)

    return wrapper


def _as_a_whole(mode: RelevanceMode, rule: Callable, forward: Callable) -> Callable:
    """A rule for an element-wise module, whose own operations need not be seen."""

    def wrapper(x: Tensor) -> Tensor:
        if not is_activation(x):
            return forward(x)
        with mode.aside():
            return rule(forward, x)

    return wrapper


def _packed(mode: RelevanceMode, module: Any, forward: Callable) -> Callable:
    """Eq. 8 for a linear map whose weight is kept in few bits, by an operation of its own."""
    linear = Linear(module)

    def wrapper(x: Tensor) -> Tensor:
        if not is_activation(x):
            return forward(x)
        with mode.aside():
            y = rules.Packed.apply(x, forward, linear)
        if mode.method.paired:
            return y
        rule = mode.method.linear
        weight = x if rule == Epsilon() else linear.rows(dtype=x.dtype)  # by the gradient it is not looked at
        return mode.linear_map(F.linear, x, y, weight, linear.bias, rule)

    return wrapper


def _identity(forward: Callable, x: Tensor) -> Tensor:
    """Eq. 9."""
    with torch.no_grad():
        y = forward(x)
    return rules.identity(x, y)


def _checkpointed(mode: RelevanceMode, tokens: int, forward: Callable) -> Callable:
    # The recomputation runs inside backward, on a GPU in another thread, where the mode is not active.
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        read = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))  # (B, T, D)
        if read.shape[-2] < tokens:
            return forward(*args, **kwargs)
        if kwargs.get("past_key_values") is not None:  # GraniteMoe keeps one unasked, and would read it twice
            kwargs["past_key_values"] = None
        return checkpoint(forward, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), mode), **kwargs)

    return wrapper


@contextmanager
def wrapped(module: nn.Module, wrap: Callable[[Callable], Callable]) -> Iterator[None]:
    """Replace the forward method of this instance by wrap(forward)."""
    with replaced(module, "forward", wrap(module.forward)):
        yield


def _freeze(module: nn.Module, undo: ExitStack) -> None:
    for parameter in module._parameters.values():
        if parameter is not None and parameter.requires_grad:
            undo.callback(parameter.requires_grad_, True)
            parameter.requires_grad_(False)


# What a TorchFunctionMode does not see (a custom autograd.Function, TorchScript, an extension in C++) is in the graph.


def _foreign(mode: RelevanceMode, output: Any) -> list[Any]:
    """The nodes behind `output` that no operation of the table made, nor one of our rules."""
    mode.catch_up()
    if not mode.unseen:
        return []
    seen: set[Any] = set()
    stack = [value.grad_fn for value in _tensors(output) if value.grad_fn is not None]
    found = []
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node._sequence_nr() in mode.unseen and not _is_ours(node):
            found.append(node)
        stack.extend(parent for parent, _ in node.next_functions if parent is not None)
    return found


def _is_ours(node: Any) -> bool:
    return isinstance(node, BackwardCFunction) and type(node)._forward_cls.__module__ in OUR_FUNCTIONS  # type: ignore[attr-defined]


OUR_FUNCTIONS = (rules.__name__, differences.__name__)


def _name(node: Any) -> str:
    name = re.sub(r"Backward\d*$", "", node.name()).rpartition("::")[2]
    return name if isinstance(node, BackwardCFunction) else f"{name} (of TorchScript or C++)"


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)


def _located(mode: RelevanceMode, forward: Callable, args: tuple, kwargs: dict) -> dict[str, str]:
    """Run again, only to say in which module each foreign function is (first); not those of the model's own forward."""
    places: dict[str, str] = {}
    begun: dict[str, int] = {}

    def begin(path: str, module: nn.Module, args: Any) -> None:
        begun[path] = _get_sequence_nr()

    def end(path: str, module: nn.Module, args: Any, output: Any) -> None:
        for node in _foreign(mode, output):
            if node._sequence_nr() >= begun[path]:
                places.setdefault(_name(node), f"{path} ({type(module).__name__})")

    with ExitStack() as undo:
        for path, module in mode.net.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):  # they take no hooks: the module around one is named
                undo.callback(module.register_forward_pre_hook(functools.partial(begin, path)).remove)
                undo.callback(module.register_forward_hook(functools.partial(end, path)).remove)
        with mode:
            forward(*args, **kwargs)
    return places
