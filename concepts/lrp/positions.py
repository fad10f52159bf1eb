"""Positional sinks of PA-LRP (Bakish et al. 2025): where relevance that goes to positions ends, layer by layer.

Positions come into a layer as cos and sin, as ALiBi or as a relative bias, or into the model as an embedding that is
added to the tokens'. Each is made a leaf of the graph here: the rules for products (Eq. 15: a rotation gives half to
what it turns and half to the position) and sums (Eq. 8) do the rest.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from icebear.concepts.lrp.rules import product
from icebear.concepts.models.lock import replaced
from icebear.values import one_of

if TYPE_CHECKING:
    from icebear.concepts.models.model import Model
    from icebear.concepts.models.prompts import Batch

ROWS = -2
"""The axis of token positions in cos and sin (B, T, d), and in an embedding (B, T, D)."""
KEYS = -1
"""That of what is added to scores (B, H, T, T): it is credited to the position that is looked at."""


@dataclass(frozen=True)
class Sink:
    leaf: Tensor
    layer: int
    """0 too for an embedding at the input."""
    axis: int
    columns: slice
    """Of all tokens in one row, those that the axis is."""


Reading = Literal["relu", "signed"]


def over_layers(positions: Tensor, reading: Reading = "relu") -> Tensor:
    """(T,) PA-LRP's Eq. 11, a sum over layers of "only the positive contributions"; positions (K, T).

    ``relu`` takes a layer's relevance of a token's position where it is positive; ``signed`` takes all of it, so that
    the sum is conserved.
    """
    one_of(reading, "reading", get_args(Reading))
    return (positions.clamp(min=0) if reading == "relu" else positions).sum(0)


class Sinks:
    """The sinks of one forward pass, and after the backward pass their relevance."""

    def __init__(self, model: Model, batch: Batch):
        self.model, self.batch = model, batch
        self.found: list[Sink] = []
        self.relevance = torch.empty(0)
        """(B, K, T), layer by layer; K is 1 for an embedding at the input."""

    @contextmanager
    def reading(self, model: Model) -> Iterator[None]:
        """A context in which a forward pass of the model runs into sinks."""
        with ExitStack() as undo:
            layer = 0
            for stack, (family, modules) in enumerate(model.stacks):
                columns = self.batch.spans[stack]
                for module in modules:
                    sink = _maker(self, layer, columns)
                    for name in family.position_inputs:
                        hook = _argument_hook(module, name, sink)
                        undo.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
                    path, _, name = family.position_method.rpartition(".")
                    if name:
                        undo.enter_context(_method(module.get_submodule(path), name, sink))
                    layer += 1
            if model.family.position_embedding:
                sink = _maker(self, 0, self.batch.spans[0])
                undo.enter_context(_embedding(model.net, model.family.position_embedding, sink))
            yield

    @property
    def leaves(self) -> list[Tensor]:
        return [sink.leaf for sink in self.found]

    def finish(self, gradients: Sequence[Tensor | None]) -> None:
        """Gradients of `leaves`, None where none came."""
        count, length = len(self.batch.ids), self.batch.spans[1].stop
        layers = self.model.layers if not self.model.family.position_embedding else 1
        dtype = torch.promote_types(self.model.dtype, torch.float32)
        relevance = torch.zeros(count, layers, length, dtype=dtype, device=self.model.device)
        for sink, gradient in zip(self.found, gradients, strict=True):
            if gradient is None:
                continue
            share = product(sink.leaf.detach().to(dtype), gradient.to(dtype), "positions")
            share = share.transpose(sink.axis, -1).reshape(count, -1, share.shape[sink.axis])  # (B, entries, positions)
            width = sink.columns.stop - sink.columns.start
            relevance[:, sink.layer, sink.columns] += share.sum(1)[:, :width].to(relevance.device)
        self.relevance = relevance


def _maker(sinks: Sinks, layer: int, columns: slice) -> Callable[[Any, int], Any]:
    """A function from positions (a tensor, or cos and sin) to leaves of the same values, one row for each prompt."""

    def sink(value: Any, axis: int) -> Any:
        if isinstance(value, tuple):
            return tuple(sink(part, axis) for part in value)
        count = len(sinks.batch.ids)
        value = value.detach()
        rows = value.expand(count, *value.shape[1:]) if len(value) == 1 else value
        if not value.is_floating_point():  # the positions' numbers, by which GPT-J looks up what its method gives
            return rows
        leaf = rows.clone().requires_grad_()
        sinks.found.append(Sink(leaf, layer, axis, columns))
        return leaf

    return sink


def _argument_hook(module: nn.Module, name: str, sink: Callable) -> Callable:
    signature = inspect.signature(type(module).forward)

    def before(_: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        bound = signature.bind(module, *args, **kwargs)
        given = bound.arguments if name in bound.arguments else bound.arguments.get("kwargs", {})
        if given.get(name) is None:
            return None
        given[name] = sink(given[name], ROWS if name == "position_embeddings" else KEYS)
        mask = bound.arguments.get("attention_mask")
        if name == "alibi" and isinstance(mask, Tensor) and mask.is_floating_point():
            bound.arguments["attention_mask"] = sink(mask, KEYS)  # Falcon's fused attention gets the ALiBi in it
        return bound.args[1:], bound.kwargs

    return before


@contextmanager
def _method(module: nn.Module, name: str, sink: Callable) -> Iterator[None]:
    """The instance's method `name`, if its class has one that is in use, gives a sink."""
    own = getattr(module, name)
    made: list[Tensor] = []

    def give(*args: Any, **kwargs: Any) -> Any:
        if not made:  # else a checkpoint recomputes
            made.append(sink(own(*args, **kwargs), KEYS if "bias" in name else ROWS))
        return made[0]

    with replaced(module, name, give):
        yield


@contextmanager
def _embedding(net: nn.Module, path: str, sink: Callable) -> Iterator[None]:
    """The output of a module, or a parameter, is a sink."""
    home, _, name = path.rpartition(".")
    parent = net.get_submodule(home)
    value = getattr(parent, name)
    if isinstance(value, nn.Module):
        handle = value.register_forward_hook(lambda module, args, output: sink(output, ROWS))
        try:
            yield
        finally:
            handle.remove()
        return
    del parent._parameters[name]
    parent.__dict__[name] = sink(value, ROWS)
    try:
        yield
    finally:
        del parent.__dict__[name]
        parent._parameters[name] = value
