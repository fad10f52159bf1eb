"""Activations and relevances of neurons, as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from icebear.concepts.lrp import rules
from icebear.concepts.models.model import Model
from icebear.concepts.models.prompts import Batch
from icebear.concepts.passes.sites import hooks


class Recorder:
    """Hands each place's activations, and then its relevance, to `begin` and `end` of a kind of recorder.

    Relevance is activation x gradient, in float32 (float64 for a float64 model); what a gradient never came to has
    none. Of an encoder-decoder T counts the tokens of the encoder, then those of the decoder.
    """

    def __init__(
        self,
        model: Model,
        batch: Batch,
        sites: Iterable[str],
        positions: Sequence[Sequence[int]] | None = None,
        stop: bool = False,
    ) -> None:
        """positions: for each row the columns kept; None for all T.
        stop: no relevance goes past these neurons; what is recorded is what comes to them directly."""
        self.model, self.batch, self.stop = model, batch, stop
        self.places = [(site, layer) for site in sites for layer in model.layers_with(site)]
        self.columns, self.kept = None, batch.spans[1].stop
        if positions is not None:
            self.counts = [len(row) for row in positions]
            self.kept = max(self.counts)
            padded = [[*row, *[row[0]] * (self.kept - len(row))] for row in positions]
            self.columns = torch.tensor(padded, device=model.device)  # (B, P)
        self.options: dict[str, Any] = {
            "dtype": torch.promote_types(model.dtype, torch.float32),
            "device": model.device,
        }
        self._stopped: dict[tuple[str, int], Tensor] = {}

    def begin(self, site: str, layer: int, activation: Tensor) -> None:
        """activation: (B, P, N), or with all positions those of the layer's own stack."""

    def end(self, site: str, layer: int, activation: Tensor, gradient: Tensor) -> None:
        """The same place in the backward pass."""

    @contextmanager
    def reading(self, model: Model) -> Iterator[None]:
        with hooks(model, self.places, self._visit):
            yield

    @property
    def leaves(self) -> Sequence[Tensor]:
        return list(self._stopped.values())

    def finish(self, gradients: Sequence[Tensor | None]) -> None:
        for (place, x), g in zip(self._stopped.items(), gradients, strict=True):
            if g is not None:
                self.end(*place, self._chosen(place[1], x.detach()), self._chosen(place[1], g))

    def _visit(self, site: str, layer: int, x: Tensor) -> Tensor | None:  # (B, T, N)
        activation = self._chosen(layer, x.detach())
        self.begin(site, layer, activation)
        if self.stop:
            return self._stopped.setdefault((site, layer), x.detach().requires_grad_())
        return rules.CaptureGradient.apply(x, activation, partial(self._come, site, layer)) if x.requires_grad else None

    def _come(self, site: str, layer: int, activation: Tensor, gradient: Tensor) -> None:
        self.end(site, layer, activation, self._chosen(layer, gradient))

    def _chosen(self, layer: int, x: Tensor) -> Tensor:
        """(B, P, N) of (B, T, N); zero for positions of the other stack."""
        if self.columns is None:
            return x
        span, columns = self.batch.span_of(self.model, layer), self.columns.to(x.device)
        inside = (columns >= span.start) & (columns < span.stop)
        places = (columns - span.start).clamp(0, x.shape[1] - 1)
        rows = torch.arange(len(x), device=x.device)[:, None]
        return x[rows, places] * inside[..., None]

    def span(self, layer: int) -> slice:
        """Where `begin` and `end` of a layer are among what is kept."""
        return self.batch.span_of(self.model, layer) if self.columns is None else slice(0, self.kept)


class Values(Recorder):
    """Keeps the activations (B, L, P, N) of each site."""

    def __init__(
        self,
        model: Model,
        batch: Batch,
        sites: Iterable[str],
        positions: Sequence[Sequence[int]] | None = None,
        stop: bool = False,
    ) -> None:
        sites = tuple(sites)
        super().__init__(model, batch, sites, positions, stop)
        self.activation = self._space(sites)

    def _space(self, sites: Sequence[str]) -> dict[str, Tensor]:
        rows, model = len(self.batch.ids), self.model
        everywhere = not self.batch.decoder and all(len(model.layers_with(site)) == model.layers for site in sites)
        empty = torch.empty if everywhere else torch.zeros
        options = {**self.options, "device": "cpu"}  # of a long prompt they take more than the pass
        return {site: empty(rows, model.layers, self.kept, model.width(site), **options) for site in sites}

    def begin(self, site: str, layer: int, activation: Tensor) -> None:
        here = self.activation[site][:, layer, self.span(layer)]
        here.copy_(activation.view_as(here))

    def values(self, row: int, kept: Tensor) -> Tensor:
        """(L, P, N) of one prompt without padding, on the CPU; of kept (B, L, P, N)."""
        columns = self.batch.columns(row)
        if self.columns is not None:
            chosen: slice | list[int] = slice(self.counts[row])
        else:  # a slice makes no copy
            chosen = slice(len(columns)) if columns == list(range(len(columns))) else columns
        copied = len(self.batch.ids) > 1  # a view would keep all rows alive
        return kept[row][:, chosen].to("cpu", copy=copied)


class AllNeurons(Values):
    """Keeps relevance as well. Memory is that of the result: gradients are multiplied and dropped."""

    def __init__(
        self,
        model: Model,
        batch: Batch,
        sites: Iterable[str],
        positions: Sequence[Sequence[int]] | None = None,
        stop: bool = False,
        compared: Callable[[str, int, Tensor], Tensor] | None = None,
    ) -> None:
        """compared: of a site, a layer and the activations there (B, P, N) what they are more than elsewhere, which is
        kept in their place: relevance is then difference x gradient."""
        sites = tuple(sites)
        super().__init__(model, batch, sites, positions, stop)
        self.compared = compared
        self.relevance = self._space(sites)
        self.reached: set[tuple[str, int]] = set()

    def begin(self, site: str, layer: int, activation: Tensor) -> None:
        super().begin(site, layer, self.compared(site, layer, activation) if self.compared else activation)

    def end(self, site: str, layer: int, activation: Tensor, gradient: Tensor) -> None:
        out = self._of(site, layer)
        kept = self.activation[site][:, layer, self.span(layer)]
        torch.mul(kept, gradient.to(kept.device).view_as(kept), out=out)
        self.reached.add((site, layer))

    def _of(self, site: str, layer: int) -> Tensor:
        return self.relevance[site][:, layer, self.span(layer)]

    def finish(self, gradients: Sequence[Tensor | None]) -> None:
        super().finish(gradients)
        for site, layer in set(self.places) - self.reached:
            self.relevance[site][:, layer] = 0

    def row(self, row: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Relevance and activation of one prompt: site -> (L, P, N), without padding, on the CPU."""
        relevance, activation = (
            {site: self.values(row, x) for site, x in part.items()} for part in (self.relevance, self.activation)
        )
        return relevance, activation


class BlockedNeurons:
    """No relevance goes through some neurons."""

    leaves = ()

    def __init__(self, columns: Mapping[tuple[str, int], Sequence[int] | slice]) -> None:
        """columns: site and layer -> which of its neurons."""
        self.columns = columns

    @contextmanager
    def reading(self, model: Model) -> Iterator[None]:
        with hooks(model, self.columns, self._stop):
            yield

    def _stop(self, site: str, layer: int, x: Tensor) -> Tensor:
        stopped = torch.zeros(x.shape[-1], dtype=torch.bool, device=x.device)
        stopped[self.columns[site, layer]] = True
        return torch.where(stopped, x.detach(), x)

    def finish(self, gradients: Sequence[Tensor | None]) -> None:
        pass
