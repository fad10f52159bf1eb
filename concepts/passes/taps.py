"""Read, and edit, the neuron sites of a model through hooks that are removed on exit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from concepts.lrp.context import wrapped
from concepts.models import experts, images
from concepts.models.batch import Batch
from concepts.models.model import Model
from icebear.errors import NumericalError

SINK_RATIO = 4
"""A sink's residual stream exceeds the median position's this many times, in most layers. Massive activations
(Sun et al. 2024) reach 10 to 150 on SmolLM2 and Gemma 3, other positions stay under 2."""

Visit = Callable[[str, int, Tensor], Tensor | None]


@contextmanager
def visiting(model: Model, places: Iterable[tuple[str, int]], visit: Visit) -> Iterator[None]:
    """Call `visit(site, layer, activations (B, T, N))` whenever the model passes one of `places`.

    What `visit` returns, unless it is None, replaces the activations.
    """
    mixed: dict[int, list[str]] = {}
    with ExitStack() as undo:
        for site, layer in places:
            if site in ("ffn", "router") and model.family.experts:
                mixed.setdefault(layer, []).append(site)
            elif site in ("ffn", "attn", "cross"):
                _input(model, site, layer, visit, undo)
            else:
                _output(model, site, layer, visit, undo)
        for layer, sites in mixed.items():
            _experts(model, sites, layer, visit, undo)
        yield


def _input(model: Model, site: str, layer: int, visit: Visit, undo: ExitStack) -> None:
    """The site is the input of a linear map."""
    shape = _shape(model, layer, undo)

    def before(_: Any, args: tuple) -> tuple | None:
        if args[0].dim() == 3:
            changed = visit(site, layer, args[0])
            return None if changed is None else (changed, *args[1:])
        x = args[0].unflatten(0, shape)  # some (OPT) run their FFN on (B * T, D); the gradient shall pass here
        changed = visit(site, layer, x)
        return ((x if changed is None else changed).flatten(0, 1), *args[1:])

    undo.callback(model.site_module(site, layer).register_forward_pre_hook(before).remove)


def _output(model: Model, site: str, layer: int, visit: Visit, undo: ExitStack) -> None:
    """The site is the output of a linear map, or a part of it."""
    columns = model.columns(site)

    def after(_: Any, args: Any, output: Tensor) -> Tensor | None:
        if columns is None:
            return visit(site, layer, output)
        # A part is taken out and put back, so that its gradient is its own.
        places = columns.to(output.device)
        x = output.index_select(-1, places)
        changed = visit(site, layer, x)
        return output.index_copy(-1, places, x if changed is None else changed)

    undo.callback(model.site_module(site, layer).register_forward_hook(after).remove)


def _experts(model: Model, sites: list[str], layer: int, visit: Visit, undo: ExitStack) -> None:
    """The sites are inside a mixture of experts."""
    mixture = model.experts(layer)
    shape = _shape(model, layer, undo)

    def inside(site: str, neurons: Tensor) -> Tensor:  # (B * T, N)
        x = neurons.unflatten(0, shape)
        changed = visit(site, layer, x)
        return (x if changed is None else changed).flatten(0, 1)

    visits: dict[str, Callable[[Tensor], Tensor]] = {site: partial(inside, site) for site in sites}
    undo.enter_context(wrapped(mixture, lambda forward: experts.forward_past(mixture, visits)))


def _shape(model: Model, layer: int, undo: ExitStack) -> list[int]:
    """Always holds B and T of the running forward pass."""
    shape: list[int] = []

    def enter(_: Any, args: tuple) -> None:
        shape[:] = args[0].shape[:2]

    undo.callback(model.layer_modules[layer].register_forward_pre_hook(enter).remove)
    return shape


class Taps:
    """Activations and relevances of `sites` in one forward and backward pass, each (B, L, T, N) in float32.

    (float64 for a float64 model.) T counts the tokens of the encoder, then those of the decoder; a layer is zero at
    those of the other. Memory is that of the result: gradients are multiplied and dropped as they come.
    """

    def __init__(self, model: Model, sites: Iterable[str], batch: Batch):
        self.model, self.batch = model, batch
        count, tokens = len(batch.ids), batch.spans[1].stop
        self.places = [(site, layer) for site in sites for layer in model.layers_with(site)]
        empty = torch.zeros if batch.decoder else torch.empty
        self.options: dict[str, Any] = {
            "dtype": torch.promote_types(model.dtype, torch.float32),
            "device": model.device,
        }
        self.activation, self.relevance = (
            {site: empty(count, model.layers, tokens, model.width(site), **self.options) for site in sites}
            for _ in range(2)
        )
        self.reached: set[tuple[str, int]] = set()
        """The places that a gradient came to; elsewhere relevance is zero."""
        self.stream = torch.zeros(count, model.layers, tokens, **self.options)
        """Norms of the residual stream behind each layer."""
        self.gradient = torch.zeros(model.layers, **self.options)
        """The sum of the gradient behind each layer: finite if the gradient is."""

    def columns(self, layer: int) -> slice:
        """The tokens that a layer reads."""
        return self.batch.spans[self.model.stack_of(layer) if self.batch.decoder else 0]

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A context in which forward and backward passes are recorded."""
        with ExitStack() as undo:
            undo.enter_context(visiting(self.model, self.places, self._read))
            for layer, module in enumerate(self.model.layer_modules):
                undo.enter_context(_removing(module.register_forward_hook(partial(self._read_stream, layer))))
            yield

    def _read(self, site: str, layer: int, x: Tensor) -> None:
        activation = self.activation[site][:, layer, self.columns(layer)]
        relevance = self.relevance[site][:, layer, self.columns(layer)]
        activation.copy_(x.detach().view_as(activation))

        def on_gradient(g: Tensor) -> None:
            torch.mul(activation, g.view_as(activation), out=relevance)
            self.reached.add((site, layer))

        if x.requires_grad:
            x.register_hook(on_gradient)

    def _read_stream(self, layer: int, module: Any, args: Any, output: Any) -> None:
        x = output[0] if isinstance(output, tuple) else output  # (B, T, D)
        self.stream[:, layer, self.columns(layer)] = torch.linalg.vector_norm(
            x.detach(), dim=-1, dtype=self.options["dtype"]
        )
        if x.requires_grad:
            x.register_hook(lambda g: _sum_into(self.gradient, layer, g))

    def finish(self) -> None:
        """Call after the backward pass: zero relevance where no gradient came. Raises `NumericalError`."""
        for site, layer in self.places:
            if (site, layer) not in self.reached:
                self.relevance[site][:, layer] = 0
        bad = ~torch.isfinite(self.gradient)
        if bad.any():
            raise NumericalError(
                f"The backward pass is NaN or infinite from layer {int(bad.nonzero()[-1])} down; try --dtype float32."
            )

    def row(self, row: int) -> dict[str, tuple[Tensor, Tensor]]:
        """site -> (relevance, activation) of one prompt, each (L, T, N), on the CPU."""
        columns = self.batch.columns(row)
        length = len(columns)
        if columns == list(range(length)):  # no copy
            columns = slice(length)  # type: ignore[assignment]
        return {
            site: (self.relevance[site][row, :, columns].cpu(), self.activation[site][row, :, columns].cpu())
            for site in self.activation
        }

    def sinks(self, row: int) -> tuple[int, ...]:
        """Positions of a prompt to set apart: the first, special tokens, and huge residual streams."""
        ids, read = self.batch.row_ids(row), self.batch.lengths[row]
        if self.model.task == "image":
            return tuple(range(len(ids) - math.prod(images.grid(self.model))))
        stream = self.stream[row][:, self.batch.columns(row)]  # (L, T) norms
        special = self.model.special_ids()
        found = {0, *(place for place, token in enumerate(ids) if token in special)}
        for start, part in ((0, stream[:, :read]), (read, stream[:, read:])):  # of the encoder, of the decoder
            norms = part[(part != 0).any(1)]
            if norms.numel():
                ratio = norms / norms.median(dim=1, keepdim=True).values
                huge = (ratio.median(dim=0).values > SINK_RATIO).nonzero().flatten()
                found |= {start, *(huge + start).tolist()}
        return tuple(sorted(found))

    def check_forward(self) -> None:
        """Raise `NumericalError` naming the first layer whose output is not finite where there is a token."""
        bad = torch.zeros(self.model.layers, dtype=torch.bool)
        for row in range(len(self.batch.ids)):
            bad |= ~torch.isfinite(self.stream[row, :, self.batch.columns(row)]).all(-1).cpu()
        if bad.any():
            raise NumericalError(
                f"The output of layer {int(bad.nonzero()[0])} is NaN or infinite; try --dtype float32, or check "
                "the weights."
            )


def _sum_into(sums: Tensor, layer: int, g: Tensor) -> None:
    sums[layer] = g.sum()


@contextmanager
def _removing(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()
