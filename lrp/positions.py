"""Positional sinks of PA-LRP (Bakish et al. 2025): the relevance of positions, layer by layer.

Positions enter a layer as cos and sin, as ALiBi or as a relative bias, or the model as an embedding that is added to
the embeddings of tokens. Each is a leaf of the graph here, and the rules for products (Eq. 15: a rotation gives half to
the vector and half to the position) and sums (Eq. 8) do the rest.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from icebear.lrp.rules import product
from icebear.models.batch import Batch
from icebear.models.lock import replaced
from icebear.models.model import Model
from icebear.models.text import images
from icebear.values import one_of

POSITION_AXIS = -2
"""The axis of token positions in cos and sin (B, T, d), and in an embedding (B, T, D)."""
KEY_AXIS = -1
"""The axis of positions in summands of attention scores (B, H, T, T): the position of the key."""


@dataclass(frozen=True)
class Sink:
    leaf: Tensor
    layer: int
    """0 for an embedding at the input."""
    axis: int
    columns: Sequence[int]
    """The columns of the batch that the axis has."""


Reading = Literal["relu", "signed"]


def over_layers(positions: Tensor, reading: Reading = "relu") -> Tensor:
    """Return PA-LRP's Eq. 11, the sum (T,) over layers of the relevance of positions (K, T).

    ``relu`` counts only positive relevance, as the paper; ``signed`` counts all of it, so that the sum is conserved.
    """
    one_of(reading, "reading", get_args(Reading))
    return (positions.clamp(min=0) if reading == "relu" else positions).sum(0)


class Sinks:
    """The sinks of one forward pass, and after the backward pass their relevance."""

    def __init__(self, model: Model, batch: Batch):
        self.model, self.batch = model, batch
        self.sinks: list[Sink] = []
        self.relevance = torch.empty(0)
        """(B, K, T), layer by layer; K is 1 for an embedding at the input."""

    @contextmanager
    def reading(self, model: Model) -> Iterator[None]:
        """Make positions sinks in a forward pass of the model."""
        with ExitStack() as undo:
            layer = 0
            for stack, (family, modules) in enumerate(model.stacks):
                columns = self._columns(stack)
                for module in modules:
                    sink = partial(self._sink, layer, columns)
                    for name in family.position_inputs:
                        hook = _argument_hook(module, name, sink)
                        undo.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
                    path, _, name = family.position_method.rpartition(".")
                    if name:
                        home = module.get_submodule(path)
                        axis = KEY_AXIS if "bias" in name else POSITION_AXIS
                        undo.enter_context(replaced(home, name, _once(getattr(home, name), partial(sink, axis))))
                    layer += 1
                if family.position_embedding:
                    self._embedding(family.position_embedding, partial(self._sink, 0, columns, POSITION_AXIS), undo)
            yield

    def _columns(self, stack: int) -> list[int]:
        """Return the columns of the tokens of a stack that have a position: all, except registers of an image."""
        columns = range(self.batch.spans[1].stop)[self.batch.spans[stack]]
        if self.batch.pixels is None:
            return list(columns)
        names = images.names(self.model, self.batch.pixels)
        return [column for column in columns if names[column] != images.REGISTER]

    def _embedding(self, embedding_path: str, sink: Callable[[Any], Any], undo: ExitStack) -> None:
        """Make the positions that are added to the embeddings of a stack a sink."""
        path, _, name = embedding_path.rpartition(".")
        home = self.model.net.get_submodule(path)
        embedding = getattr(home, name)
        if isinstance(embedding, nn.Module):
            undo.callback(embedding.register_forward_hook(lambda module, args, output: sink(output)).remove)
        else:
            is_method = inspect.ismethod(embedding)
            value = (lambda *args: sink(embedding(*args))) if is_method else sink(embedding)
            undo.enter_context(replaced(home, name, value))

    def _sink(self, layer: int, columns: Sequence[int], axis: int, value: Any) -> Any:
        """Return a leaf of the value of positions (a tensor, or cos and sin), with one row for each prompt."""
        if isinstance(value, tuple):
            return tuple(self._sink(layer, columns, axis, part) for part in value)
        value = value.detach()
        rows = value.expand(len(self.batch.ids), *value.shape[1:]) if len(value) == 1 else value
        if not value.is_floating_point():  # the numbers of positions, which GPT-J uses as indices
            return rows
        leaf = rows.clone().requires_grad_()
        self.sinks.append(Sink(leaf, layer, axis, columns))
        return leaf

    @property
    def leaves(self) -> list[Tensor]:
        return [sink.leaf for sink in self.sinks]

    def finish(self, gradients: Sequence[Tensor | None]) -> None:
        """Take the gradients of the leaves, None where there is none."""
        count, length = len(self.batch.ids), self.batch.spans[1].stop
        layers = self.model.layers if not self.model.family.position_embedding else 1
        relevance = torch.zeros(count, layers, length, **self.model.sums_in)
        dtype = relevance.dtype
        for sink, gradient in zip(self.sinks, gradients, strict=True):
            if gradient is None:
                continue
            share = product(sink.leaf.detach().to(dtype), gradient.to(dtype), "positions")
            share = share.transpose(sink.axis, -1).reshape(count, -1, share.shape[sink.axis])  # (B, entries, positions)
            columns = list(sink.columns)
            relevance[:, sink.layer, columns] += share.sum(1)[:, : len(columns)].to(relevance.device)
        self.relevance = relevance


def _argument_hook(module: nn.Module, name: str, sink: Callable) -> Callable:
    signature = inspect.signature(type(module).forward)

    def before(_: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        bound = signature.bind(module, *args, **kwargs)
        arguments = bound.arguments if name in bound.arguments else bound.arguments.get("kwargs", {})
        if arguments.get(name) is None:
            return None
        arguments[name] = sink(POSITION_AXIS if name == "position_embeddings" else KEY_AXIS, arguments[name])
        mask = bound.arguments.get("attention_mask")
        if name == "alibi" and isinstance(mask, Tensor) and mask.is_floating_point():
            bound.arguments["attention_mask"] = sink(KEY_AXIS, mask)  # Falcon's fused attention gets the ALiBi in it
        return bound.args[1:], bound.kwargs

    return before


def _once(method: Callable, sink: Callable[[Any], Any]) -> Callable:
    """Return a method whose first result is a sink, and its result forever: a checkpoint recomputes."""
    results: list[Tensor] = []

    def result(*args: Any, **kwargs: Any) -> Any:
        if not results:
            results.append(sink(method(*args, **kwargs)))
        return results[0]

    return result
