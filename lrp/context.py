"""`with relevance_rules(net, method):` applies the rules inside the forward pass of this model, and nowhere else."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import _get_sequence_nr
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers.activations import ACT2CLS

from icebear.errors import InputError, MissingRule
from icebear.lrp import differences, model_pairs, paired_rows, rules
from icebear.lrp.linear_rules import Epsilon, LinearRule, Rules
from icebear.lrp.model_pairs import PairedWeights, TwoModels
from icebear.lrp.operation_table import TABLE, RelevanceMode, is_activation
from icebear.models.lock import replaced
from icebear.models.modules import modules_of
from icebear.models.parts.architecture import attention_maps
from icebear.models.parts.families import SCANS, family_of
from icebear.models.parts.linear import Linear, packed

# Eq. 9 for the whole: some are formulas (NewGELU), and the table would treat their parts as products.
ACTIVATION_MODULES = tuple(entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values())


ATTENTION_KEPT = 4
"""From this many tokens for each unit of width, attention is a quarter of a layer's operations or more. Its output,
as large as the residual stream, is then kept rather than computed again."""
_KERNELS = "flash_attention_for_cpu flash_attention efficient_attention cudnn_attention".split()
FUSED_ATTENTION = [getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default for name in _KERNELS]


@functools.cache
def _is_elementwise(kind: type[nn.Module], norms: bool) -> bool:
    """norms: whether RMS norms count. Their divisor is a constant (Eq. 19), so Eq. 9 for the whole equals the rules of
    the table for their ten operations, in less time."""
    return issubclass(kind, ACTIVATION_MODULES) or (norms and kind.__name__.endswith("RMSNorm"))


def elementwise_modules(net: nn.Module, norms: bool = True) -> list[nn.Module]:
    """Return the modules to which one rule applies as a whole; norms: RMS norms too."""
    family = family_of(net)
    activations = family.activations if family else ()
    chosen = []
    for module in modules_of(net):
        alone = norms and not list(module.children())  # a norm with a gate inside is more than a norm
        kind = type(module)
        if kind.__name__ in activations or _is_elementwise(kind, alone):  # type: ignore[arg-type]  # classes have a hash
            chosen.append(module)
    return chosen


@contextmanager
def relevance_rules(
    net: nn.Module,
    method: Rules,
    accounting: dict[str, Tensor] | None = None,
    strict: bool = True,
    checkpoint_layers: Iterable[nn.Module] = (),
    checkpoint_from: int = 0,
    paired: PairedWeights | None = None,
) -> Iterator[RelevanceMode]:
    """Inside, a call of `net` and a backward pass from its output give activation x gradient = relevance.

    The values of the forward pass do not change. Parameters are frozen, and forward methods of this instance are
    replaced; all of it is undone on exit, also after an exception. Other models, and code outside the forward pass of
    `net`, are not affected.

    accounting: name -> zeros (B,), to which the relevance is added that "biases", "positions" and the "softmax" bias
        term retain.
    strict: raise `MissingRule` for an operation without a rule (False: warn and record it).
    checkpoint_layers: modules whose inner activations are recomputed in the backward pass, if their input has at least
        `checkpoint_from` tokens; if that is 0, attention too where its output would be kept (`ATTENTION_KEPT`).
    paired: the weights that the counterfactual rows run through, where they differ; with difference rules.
    """
    if paired is None:
        mode = RelevanceMode(net, method, accounting, strict, differences.TABLE if method.paired else TABLE)
    else:
        mode = TwoModels(net, method, strict, paired)
    with ExitStack() as undo:

        def replace(module: nn.Module, function: Callable, *bound: Any) -> None:
            undo.enter_context(replaced(module, "forward", functools.partial(function, mode, *bound, module.forward)))

        for module in modules_of(net):
            for parameter in module._parameters.values():
                if parameter is not None and parameter.requires_grad:
                    undo.callback(parameter.requires_grad_, True)
                    parameter.requires_grad_(False)
        for module, function, *bound in _at_modules(net, method):
            replace(module, function, *bound)
        for layer in checkpoint_layers:
            replace(layer, _checkpointed, checkpoint_from)
        replace(net, _with_mode)
        yield mode


def _with_mode(mode: RelevanceMode, forward: Callable, *args: Any, **kwargs: Any) -> Any:
    with mode:
        output = forward(*args, **kwargs)
    foreign = _foreign(mode, output)
    if foreign:
        paths = _located(mode, forward, args, kwargs) or {_name(node): "the model itself" for node in foreign}
        for name, path in paths.items():
            hooked = name.startswith("BackwardHookFunction")
            way = "remove the full backward hook of the module" if hooked else "write it with torch's own operations"
            mode.refuse(name, path, way)
    return output


def _at_modules(net: nn.Module, method: Rules) -> Iterator[tuple[Any, ...]]:
    """Yield each module whose forward method is replaced, with the function that replaces it and what this needs."""
    for module in modules_of(net):
        if SCANS.search(type(module).__name__) and not method.paired:
            yield module, _scan, module
        if packed(module):
            yield module, _packed, Linear(module)
    for module, rule in _projections(net, method):
        yield module, _projected, rule
    for module in elementwise_modules(net, norms=not method.paired):
        yield module, _elementwise, module, differences.secant if method.paired else identity_of


def _projections(net: nn.Module, method: Rules) -> Iterator[tuple[nn.Module, LinearRule]]:
    """Yield the projections into and out of attention with the rules that they have apart from other linear maps."""
    rules_of = {"attention_in": method.attention_in, "attention_out": method.attention_out}
    for side, rule in rules_of.items():
        if rule is None:
            continue
        modules = attention_maps(net, side == "attention_in")
        if not modules:
            raise InputError(f"icebear knows no maps of a {type(net).__name__} for {side}; leave it out of the method.")
        yield from ((module, rule) for module in modules)


def _projected(mode: RelevanceMode, rule: LinearRule, forward: Callable, x: Tensor) -> Tensor:
    """Run a projection of attention under its own rule."""
    with replaced(mode, "linear_rule", rule):
        return forward(x)


def _scan(mode: RelevanceMode, module: nn.Module, forward: Callable, *args: Any, **kwargs: Any) -> Any:
    if any(map(is_activation, (*args, *kwargs.values()))):
        name = next(name for name, named in mode.net.named_modules() if named is module)
        remedy = "compare with a counterfactual prompt (--counterfactual), whose rules are exact for products"
        mode.refuse("scan over tokens", f"{name} ({type(module).__name__})", remedy)
    return forward(*args, **kwargs)


def _elementwise(mode: RelevanceMode, module: Any, rule: Callable, forward: Callable, x: Tensor) -> Tensor:
    """Apply one rule to a whole element-wise module, past the table."""
    if not is_activation(x):
        return forward(x)
    if isinstance(mode, TwoModels) and any(id(parameter) in mode.changed for parameter in module.parameters()):
        raise MissingRule(f"{type(module).__name__} has parameters that differ, and no rule for two models.")
    with mode.aside():
        if not getattr(module, "inplace", False):
            return rule(forward, x)
        with replaced(module, "inplace", False):
            return x.copy_(rule(forward, x))


def _packed(mode: RelevanceMode, linear: Linear, forward: Callable, x: Tensor) -> Tensor:
    """Apply Eq. 8 to a linear map with a quantized weight, which has its own operation."""
    if not is_activation(x):
        return forward(x)
    with mode.aside():
        y = rules.Packed.apply(x, forward, linear)
    if mode.method.paired:
        return y
    rule = mode.linear_rule
    weight = x if rule == Epsilon() else linear.rows(dtype=x.dtype)  # the gradient needs no weight
    return mode.linear_map(F.linear, x, y, weight, linear.bias, rule)


def identity_of(forward: Callable, x: Tensor) -> Tensor:
    """Eq. 9; some norms (HY-V4) return only their divisor, a constant (Eq. 19)."""
    with torch.no_grad():
        y = forward(x)
    return rules.identity(x, y) if is_activation(x) and y.shape == x.shape else y


def _checkpointed(mode: RelevanceMode, tokens: int, forward: Callable, *args: Any, **kwargs: Any) -> Any:
    read = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))  # (B, T, D)
    if read.shape[-2] < tokens:
        return forward(*args, **kwargs)
    if kwargs.get("past_key_values") is not None:  # GraniteMoe makes a cache, and would read it twice
        kwargs["past_key_values"] = None
    keeps = tokens > 0 and read.shape[-2] >= ATTENTION_KEPT * read.shape[-1]
    contexts = functools.partial(_contexts, mode, FUSED_ATTENTION if keeps else [])
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _contexts(mode: RelevanceMode, saved: list[Any]) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return the contexts of a layer, and of its recomputation, which has the outputs of the saved operations.

    The recomputation runs inside backward, on a GPU in another thread, where the mode is not active.
    """
    if not saved:
        return nullcontext(), mode
    saving, has_saved = create_selective_checkpoint_contexts(saved)
    return saving, _both(has_saved, mode)


@contextmanager
def _both(outer: AbstractContextManager, inner: AbstractContextManager) -> Iterator[None]:
    with outer, inner:
        yield


# The graph has nodes that a TorchFunctionMode does not see: a custom autograd.Function, TorchScript, C++ extensions.


def _foreign(mode: RelevanceMode, output: Any) -> list[Any]:
    """Return the nodes behind `output` that neither an operation of the table nor one of our rules made."""
    mode.catch_up()
    return [n for n in _nodes(output) if n._sequence_nr() in mode.unseen and not _is_ours(n)] if mode.unseen else []


def _nodes(output: Any) -> Iterator[Any]:
    """Yield the nodes of the graph behind `output`."""
    seen: set[Any] = set()
    stack = [value.grad_fn for value in tree_leaves(output) if is_activation(value) and value.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            yield node
            stack.extend(parent for parent, _ in node.next_functions if parent is not None)


def applied(output: Any) -> Counter[type]:
    """Return how often each of our functions stands behind `output`."""
    return Counter(node._forward_cls for node in _nodes(output) if _is_ours(node))


def _is_ours(node: Any) -> bool:
    modules = (rules.__name__, paired_rows.__name__, model_pairs.__name__)
    return isinstance(node, BackwardCFunction) and type(node)._forward_cls.__module__ in modules  # type: ignore[attr-defined]


def _name(node: Any) -> str:
    name = re.sub(r"Backward\d*$", "", node.name()).rpartition("::")[2]
    return name if isinstance(node, BackwardCFunction) else f"{name} (of TorchScript or C++)"


def _located(mode: RelevanceMode, forward: Callable, args: tuple, kwargs: dict) -> dict[str, str]:
    """Run again to find the module of each foreign function, except those of the model's own forward method."""
    paths: dict[str, str] = {}
    begun: dict[str, int] = {}

    def begin(path: str, module: nn.Module, args: Any) -> None:
        begun[path] = _get_sequence_nr()

    def end(path: str, module: nn.Module, args: Any, output: Any) -> None:
        for node in _foreign(mode, output):
            if node._sequence_nr() >= begun[path]:
                paths.setdefault(_name(node), f"{path} ({type(module).__name__})")

    with ExitStack() as undo:
        for path, module in mode.net.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):  # they take no hooks: the module around one is named
                undo.callback(module.register_forward_pre_hook(functools.partial(begin, path)).remove)
                undo.callback(module.register_forward_hook(functools.partial(end, path)).remove)
        with mode:
            forward(*args, **kwargs)
    return paths
