"""Why a row of a batch differs from the row alone: the module where it begins, and what it costs to mend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from icebear.concepts.passes.inputs import Inputs
from icebear.concepts.passes.run import Logits, forward_backward
from icebear.concepts.passes.storage import memory_at_hand
from icebear.concepts.passes.timing import seconds
from icebear.lrp.linear_rules import Rules
from icebear.models.model import Model
from icebear.models.objective import Objective
from icebear.models.parts.linear import packed

ROUNDING = 1e-5
"""Deviations up to this share of the largest value are rounding of float32, which no remedy mends."""
Remedy = Callable[[], AbstractContextManager[Any]]


@dataclass
class Seen:
    """What modules compute of the first row of a batch, by their paths, in the order in which they finish."""

    values: dict[str, tuple[list[Tensor], list[Tensor]]] = field(default_factory=dict)
    """Inputs and outputs (1, T, D)."""
    gradients: dict[str, list[Tensor]] = field(default_factory=dict)
    """Those at the outputs, in the order of the backward pass."""


def beginning(
    model: Model, alone: Objective, together: Objective, rules: Rules | None = None, strict: bool = True
) -> str | None:
    """Return where a row in a batch begins to differ from the row alone, or None if it does not.

    That is the first module to finish whose outputs differ by more than `ROUNDING` while its inputs do not, or the
    first module at whose outputs gradients do.

    alone: a single row.
    together: the same row before shorter ones, so that it has no padding.
    rules: of the backward pass; None takes the plain gradient.
    strict: whether an operation without a rule is an error.
    """
    row_alone, batched = (_seen(model, objective, rules, strict) for objective in (alone, together))
    for path, (inputs, outputs) in row_alone.values.items():
        batched_inputs, batched_outputs = batched.values.get(path, ([], []))
        if _differ(outputs, batched_outputs) and not _differ(inputs, batched_inputs):
            return _named(model, path)
    differing = (path for path, each in row_alone.gradients.items() if _differ(each, batched.gradients.get(path, [])))
    return next((f"the gradient at {_named(model, path)}" for path in differing), None)


def _named(model: Model, path: str) -> str:
    kind = type(model.net.get_submodule(path)).__name__
    return f"{path} ({kind}{f', {model.config._attn_implementation}' if 'Attention' in kind else ''})"


def _seen(model: Model, objective: Objective, rules: Rules | None, strict: bool) -> Seen:
    seen, rows = Seen(), len(objective.batch.ids)

    def keep_gradient(path: str, gradient: Tensor) -> None:
        seen.gradients.setdefault(path, []).extend(_of_first_row(gradient, rows))

    def keep(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        seen.values[path] = _of_first_row((args, kwargs), rows), _of_first_row(output, rows)
        for x in tree_leaves(output):
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(partial(keep_gradient, path))

    with model.lock, ExitStack() as undo:
        for path, module in model.net.named_modules():
            if path:
                undo.callback(module.register_forward_hook(partial(keep, path), with_kwargs=True).remove)
        forward_backward(model, Logits(objective), [Inputs()], rules, strict=strict)
    return seen


def _of_first_row(values: Any, rows: int) -> list[Tensor]:
    """Return copies, because models may change values in place; masks are left out."""
    return [
        x[:1].detach().clone()
        for x in tree_leaves(values)
        if isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 3 and len(x) in (1, rows)
    ]


def _differ(left: list[Tensor], right: list[Tensor]) -> bool:
    pairs = [(a, b) for a, b in zip(left, right, strict=False) if a.shape == b.shape]
    return any((a - b).abs().max() > ROUNDING * a.abs().max() for a, b in pairs)


def remedies(model: Model) -> dict[str, Remedy]:
    """Return by name what may make rows of a batch equal to rows alone, as far as the model does not have it."""
    net, tried = model.net, dict[str, Remedy]()
    if model.config._attn_implementation == "sdpa":
        tried["math attention"] = lambda: sdpa_kernel(SDPBackend.MATH)
    if model.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        tried["no TF32"] = _without_tf32
    size = sum(parameter.numel() * 4 for parameter in net.parameters())
    is_plain = not (model.offloaded or any(map(packed, net.modules())))
    if model.dtype in (torch.float16, torch.bfloat16) and is_plain and size < memory_at_hand(model.device):
        tried["float32"] = partial(_in_float32, model)
    return tried


@dataclass(frozen=True)
class Remedied:
    name: str
    deviation: float
    """Of a row in a batch from the row alone, as a share of the largest value."""
    cost: float
    """The time as a multiple of that without the remedy."""

    def __str__(self) -> str:
        return f"{self.name}: {self.deviation:.0e}, {self.cost:.2g} times as long"


def remedied(model: Model, deviation: Callable[[], float]) -> list[Remedied]:
    """Return what each remedy makes of a deviation, and what it costs."""

    def measured() -> tuple[float, float]:  # rules at modules are proved in the second pass
        return deviation(), min(seconds(deviation, model.device) for _ in range(2))

    before = measured()[1]
    rows = []
    for name, remedy in remedies(model).items():
        with remedy():
            mended, time = measured()
        rows.append(Remedied(name, mended, time / before))
    return rows


@contextmanager
def _without_tf32() -> Iterator[None]:
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = True


@contextmanager
def _in_float32(model: Model) -> Iterator[None]:
    """Compute in float32; afterwards the model has its weights again, not copies."""
    tensors = [*model.net.parameters(), *model.net.buffers()]
    before = [x.data for x in tensors]
    with model.lock:
        try:
            for x in tensors:
                x.data = x.data.float() if x.is_floating_point() else x.data
            yield
        finally:
            for x, values in zip(tensors, before, strict=True):
                x.data = values
