"""Recorders of the activations and the relevance of neurons: of all, or of the most relevant in little memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from icebear.concepts.passes.run import Recorder
from icebear.concepts.passes.sites import hooks, not_called
from icebear.concepts.passes.storage import SiteValues, memory_at_hand, planned
from icebear.errors import InputError
from icebear.lrp import rules
from icebear.models.batch import Batch
from icebear.models.model import Model
from icebear.records import WRITERS, Neuron, Ranked


class NeuronRecorder(Recorder):
    """Pass the activations, and then the relevance, at each site and layer to `begin` and `end` of a subclass.

    Relevance is activation x gradient, in float32 (float64 for a float64 model); neurons without a gradient have none.
    In an encoder-decoder T counts the tokens of the encoder, then those of the decoder.
    """

    stop = False
    """Whether no relevance goes past these neurons, so that the recorded relevance is the direct one."""

    def __init__(
        self, model: Model, batch: Batch, sites: Iterable[str], columns: Sequence[Sequence[int]] | None = None
    ) -> None:
        """columns: those to record of each row; None for all T."""
        self.model, self.batch = model, batch
        self.site_layers = [(site, layer) for site in sites for layer in model.layers_with(site)]
        self.columns, self.width = None, batch.spans[1].stop
        if columns is not None:
            self.counts = [len(row) for row in columns]
            self.width = max(self.counts)
            padded = [[*row, *[row[0]] * (self.width - len(row))] for row in columns]
            self.columns = torch.tensor(padded, device=model.device)  # (B, P)
        self.options = model.sums_in
        self._stopped: dict[tuple[str, int], Tensor] = {}
        self._seen: set[tuple[str, int]] = set()

    def begin(self, site: str, layer: int, activation: Tensor) -> None:
        """Take the activations (B, P, N); if all positions are recorded, those of the layer's own stack."""

    def end(self, site: str, layer: int, activation: Tensor, gradient: Tensor) -> None:
        """Take the activations and gradients of a site and layer, in the backward pass."""

    @contextmanager
    def reading(self, model: Model) -> Iterator[None]:
        self._seen.clear()
        with hooks(model, self.site_layers, self._see):
            yield
        unseen = sorted(set(self.site_layers) - self._seen, key=lambda each: each[1])
        parts = set(model.net.modules()) if unseen else ()
        for site, layer in unseen:
            if model.layer_modules[layer] in parts:  # the others were left out, and have neither value
                raise not_called(model, site, layer)

    @property
    def leaves(self) -> Sequence[Tensor]:
        return list(self._stopped.values())

    def finish(self, gradients: Sequence[Tensor | None]) -> None:
        for (site_layer, x), g in zip(self._stopped.items(), gradients, strict=True):
            if g is not None:
                self.end(*site_layer, self._chosen(site_layer[1], x.detach()), self._chosen(site_layer[1], g))

    def _see(self, site: str, layer: int, x: Tensor) -> Tensor | None:  # (B, T, N)
        self._seen.add((site, layer))
        values = x.detach() if site in WRITERS else x.detach().clone()  # queries and values may be clipped in place
        activation = self._chosen(layer, values)
        self.begin(site, layer, activation)
        if self.stop:
            return self._stopped.setdefault((site, layer), x.detach().requires_grad_())
        captured = lambda activation, gradient: self.end(site, layer, activation, self._chosen(layer, gradient))  # noqa: E731
        return rules.CaptureGradient.apply(x, activation, captured) if x.requires_grad else None

    def _chosen(self, layer: int, x: Tensor) -> Tensor:
        """Return the recorded positions (B, P, N) of (B, T, N); zero for those of the other stack."""
        if self.columns is None:
            return x
        span, columns = self.batch.span_of(self.model.stack_of(layer)), self.columns.to(x.device)
        inside = (columns >= span.start) & (columns < span.stop)
        offsets = (columns - span.start).clamp(0, x.shape[1] - 1)
        rows = torch.arange(len(x), device=x.device)[:, None]
        return x[rows, offsets] * inside[..., None]

    def span(self, layer: int) -> slice:
        """Return the recorded positions that `begin` and `end` of a layer have."""
        return self.batch.span_of(self.model.stack_of(layer)) if self.columns is None else slice(0, self.width)


class Values(NeuronRecorder):
    """Record the activations (B, L, P, N) of each site, where `planned` says. They are there after `reading`."""

    def __init__(
        self,
        model: Model,
        batch: Batch,
        sites: Iterable[str],
        columns: Sequence[Sequence[int]] | None = None,
        relevance_rows: int = 0,
    ) -> None:
        """relevance_rows: of the relevance that a subclass records. It must lie where the activations do."""
        self.sites = tuple(sites)
        super().__init__(model, batch, self.sites, columns)
        rows, dtype = len(batch.ids), self.options["dtype"]
        row_size = sum(model.layers * self.width * model.width(site) for site in self.sites) * dtype.itemsize
        self.where = planned((rows + relevance_rows) * row_size, model.device, memory_at_hand)
        self.activation = self._allocated(rows)
        self.relevance = self._allocated(relevance_rows) if relevance_rows else {}
        self._written: set[tuple[int, str, int]] = set()
        self._devices: set[torch.device] = set()

    def _allocated(self, rows: int) -> dict[str, Tensor]:
        model, dtype, is_pinned = self.model, self.options["dtype"], self.where == "pinned"
        device = model.device if self.where == "device" else torch.device("cpu")
        shapes = {site: (rows, model.layers, self.width, model.width(site)) for site in self.sites}
        return {site: torch.empty(x, dtype=dtype, device=device, pin_memory=is_pinned) for site, x in shapes.items()}

    @property
    def is_far(self) -> bool:
        """Whether they lie on another device than the model, which then computes from copies."""
        return self.where != "device"

    @contextmanager
    def reading(self, model: Model) -> Iterator[None]:
        self._written.clear()
        with super().reading(model):
            yield
        for part in (self.activation, self.relevance):
            for site, layer in product(part, range(self.model.layers)):
                if (id(part), site, layer) not in self._written:  # of a layer that did not run, or has no gradient
                    part[site][:, layer] = 0
        if self.where == "pinned":  # copies may still be under way
            for device in {model.device, *self._devices}:  # weights do not say: offloaded ones are on none
                if device.type == "cuda":
                    torch.cuda.synchronize(device)

    def begin(self, site: str, layer: int, activation: Tensor) -> None:
        stored = self._layer_values(self.activation, site, layer)
        self._store(stored, activation.view_as(stored))

    def _layer_values(self, part: dict[str, Tensor], site: str, layer: int) -> Tensor:
        """Return the activations, or the relevance, of a layer, to be written."""
        self._written.add((id(part), site, layer))
        values, span = part[site][:, layer], self.span(layer)
        if span != slice(0, self.width):
            values.zero_()  # the tokens of the other stack
        return values[:, span]

    def _store(self, stored: Tensor, values: Tensor) -> None:
        """Copy values; only to pinned memory without waiting, because `reading` waits for CUDA devices alone."""
        self._devices.add(values.device)
        stored.copy_(values, non_blocking=self.where == "pinned")

    def _copied(self, stored: Tensor, device: torch.device) -> Tensor:
        return stored.to(device, non_blocking=self.where == "pinned")

    def activations(self, row: int) -> dict[str, Tensor]:
        """Return site -> activations (L, P, N) of one prompt, without padding, where they were recorded."""
        return {site: self.values(row, x) for site, x in self.activation.items()}

    def values(self, row: int, recorded: Tensor) -> Tensor:
        """Return (L, P, N) of one prompt from (B, L, P, N), without padding, where they were recorded."""
        x = recorded[row][:, self._row_columns(row)]
        return x.clone() if len(recorded) > 1 else x  # a view keeps all rows alive

    def _row_columns(self, row: int) -> slice | list[int]:
        """Return which of the P recorded positions are of this row."""
        if self.columns is not None:
            return slice(self.counts[row])
        columns = self.batch.columns(row)
        return slice(len(columns)) if columns == list(range(len(columns))) else columns  # a slice makes no copy


class AllNeurons(Values):
    """Record relevance as well. It takes the memory of the result: gradients are multiplied and dropped."""

    def __init__(
        self,
        model: Model,
        batch: Batch,
        sites: Iterable[str],
        columns: Sequence[Sequence[int]] | None = None,
        difference_of: Callable[[str, int, Tensor], Tensor] | None = None,
    ) -> None:
        """difference_of: takes a site, a layer and their activations (B, P, N), and returns their difference to the
        counterfactual ones, which is recorded in their place; relevance is then difference x gradient."""
        super().__init__(model, batch, sites, columns, relevance_rows=len(batch.ids))
        self.difference_of = difference_of

    def begin(self, site: str, layer: int, activation: Tensor) -> None:
        super().begin(site, layer, self.difference_of(site, layer, activation) if self.difference_of else activation)

    def end(self, site: str, layer: int, activation: Tensor, gradient: Tensor) -> None:
        recorded, out = (
            self.activation[site][:, layer, self.span(layer)],
            self._layer_values(self.relevance, site, layer),
        )
        if self.is_far:
            self._store(out, self._copied(recorded, gradient.device) * gradient.view_as(recorded))
        else:
            torch.mul(recorded, gradient.to(recorded.device).view_as(recorded), out=out)

    def row(self, row: int) -> tuple[SiteValues, SiteValues]:
        """Return relevance and activation of one prompt: site -> (L, P, N), without padding."""
        return self._of_row(row, self.relevance), self._of_row(row, self.activation)

    def _of_row(self, row: int, recorded: dict[str, Tensor]) -> SiteValues:
        return SiteValues({site: self.values(row, x) for site, x in recorded.items()})


class PairedNeurons(Values):
    """Record a prompt and its counterfactual, the rows of the batch: activations, and the relevance of the prompt,
    the difference of both x gradient."""

    def __init__(
        self, model: Model, batch: Batch, sites: Iterable[str], columns: Sequence[Sequence[int]] | None = None
    ) -> None:
        super().__init__(model, batch, sites, columns, relevance_rows=1)

    def end(self, site: str, layer: int, activation: Tensor, gradient: Tensor) -> None:
        prompt_x, other_x = self.activation[site][:, layer, self.span(layer)]
        out = self._layer_values(self.relevance, site, layer)
        if self.is_far:
            prompt_x, other_x = (self._copied(x, gradient.device) for x in (prompt_x, other_x))
            self._store(out[0], (prompt_x - other_x) * gradient[0].view_as(prompt_x))
        else:
            torch.sub(prompt_x, other_x, out=out[0]).mul_(gradient[0].to(out.device).view_as(prompt_x))

    def result(self) -> tuple[SiteValues, SiteValues, SiteValues]:
        """Return relevance, activations and counterfactual activations: site -> (L, P, N), without padding."""
        relevance, activation, counterfactual = (
            SiteValues({site: x[row][:, self._row_columns(row)] for site, x in part.items()})
            for row, part in ((0, self.relevance), (0, self.activation), (1, self.activation))
        )
        return relevance, activation, counterfactual


class BlockedNeurons(Recorder):
    """Let no relevance through the neurons of a site."""

    def __init__(self, site: str) -> None:
        self.site = site

    def reading(self, model: Model) -> AbstractContextManager[None]:
        layers = [(self.site, layer) for layer in model.layers_with(self.site)]
        return hooks(model, layers, lambda site, layer, x: x.detach())


@dataclass(frozen=True, eq=False)
class Largest:
    """The result of ``keep="top"``, for all positions."""

    k: int
    ranked: dict[str, tuple[Ranked, ...]]
    """site -> the k neurons with the largest and the k with the most negative relevance, without sinks and the template
    of a chat."""
    layers: dict[str, Tensor]
    """site -> (L, T) sums over all its neurons."""
    heads: Tensor | None
    """(L, T, H) sums over whole heads, if the sites include ``attn``."""

    def top(self, k: int, site: str) -> tuple[Ranked, ...]:
        """Return what was recorded of a site. Raises `InputError` if that is fewer than k."""
        if k > self.k:
            raise InputError(
                f"Only the {self.k} largest neurons of each site were recorded; pass attribute(k={k}), or keep='all'."
            )
        return self.ranked[site]


class LargestNeurons(NeuronRecorder):
    """Record, for each row, site and sign, the k largest relevances, and sums by layer (B, L, T) and head (B, L, T, H).
    Beyond these it takes the memory of the activations of one site and layer."""

    def __init__(
        self,
        model: Model,
        batch: Batch,
        sites: Iterable[str],
        k: int,
        excluded: Callable[[int], Iterable[int]] = lambda row: (),
        paired: bool = False,
    ) -> None:
        """excluded: returns the positions of a row that are not ranked; called in the backward pass, with the sinks.
        paired: whether the second half of rows are counterfactuals of the first, whose difference is then recorded."""
        sites = tuple(sites)
        super().__init__(model, batch, sites)
        self.k, self.excluded, self.paired, rows = k, excluded, paired, len(batch.ids) // (1 + paired)
        self.sums = {site: torch.zeros(rows, model.layers, self.width, **self.options) for site in sites}
        self.heads = torch.zeros(rows, model.layers, self.width, model.heads, **self.options)
        self.unranked: Tensor | None = None
        """(B, T) padding, and excluded positions."""
        self.best: dict[tuple[str, int], list[tuple[Tensor, Tensor, Tensor]]] = defaultdict(list)
        """(site, sign) -> for each layer the relevance (B, <= k) times the sign, the activation (and its
        counterfactual) (B, <= k, 1 or 2), and layer, column and index (B, <= k, 3)."""

    def end(self, site: str, layer: int, activation: Tensor, gradient: Tensor) -> None:
        dtype, span = self.options["dtype"], self.span(layer)
        kinds = activation.chunk(1 + self.paired)
        difference = kinds[0] - kinds[1] if self.paired else activation
        relevance = difference.to(dtype) * gradient[: len(difference)].to(dtype)  # (B, T, N)
        self.sums[site][:, layer, span] = relevance.sum(-1)
        if site == "attn":
            self.heads[:, layer, span] = relevance.unflatten(-1, (self.model.heads, -1)).sum(-1)
        unranked = self._unranked()[:, span, None].to(relevance.device)  # of a model on several devices
        for sign in (1, -1):
            flat = relevance.masked_fill_(unranked, -sign * torch.inf).flatten(1)  # (B, T * N)
            best, at = flat.topk(min(self.k, flat.shape[1]), -1, largest=sign > 0)
            column, index = at // relevance.shape[-1] + span.start, at % relevance.shape[-1]
            where = torch.stack((torch.full_like(at, layer), column, index), -1)
            values = torch.stack([x.flatten(1).gather(1, at).to(dtype) for x in kinds], -1)
            self.best[site, sign].append((sign * best, values, where))

    def _unranked(self) -> Tensor:
        if self.unranked is None:
            mask = torch.ones(len(self.heads), self.width, dtype=torch.bool)
            for row, unranked in enumerate(mask):
                apart = set(self.excluded(row))
                unranked[[at for position, at in enumerate(self.batch.columns(row)) if position not in apart]] = False
            self.unranked = mask.to(self.model.device)  # once, not in each layer
        return self.unranked

    def row(self, row: int) -> Largest:
        """Return the result for one prompt, on the CPU."""
        columns = self.batch.columns(row)
        return Largest(
            self.k,
            {site: tuple(self._ranked(row, site, columns)) for site in self.sums},
            {site: sums[row][:, columns].cpu() for site, sums in self.sums.items()},
            self.heads[row][:, columns].cpu() if "attn" in self.sums else None,
        )

    def _ranked(self, row: int, site: str, columns: Sequence[int]) -> Iterable[Ranked]:
        for sign in (1, -1):
            layers = [[part[row].to(self.model.device) for part in parts] for parts in self.best[site, sign]]
            if layers:
                relevance, values, where = (torch.cat(parts).cpu() for parts in zip(*layers, strict=True))
                order = relevance.topk(min(self.k, int((relevance > -torch.inf).sum()))).indices
                for best, (activation, *other), (layer, column, index) in zip(
                    relevance[order].tolist(), values[order].tolist(), where[order].tolist(), strict=True
                ):
                    yield Ranked(Neuron(layer, site, index), columns.index(column), activation, sign * best, *other)
