"""The most relevant neurons of a pass, and sums over all neurons, in little memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from icebear.concepts.models.model import Model
from icebear.concepts.models.prompts import Batch
from icebear.concepts.passes.neurons import NeuronRecorder
from icebear.errors import InputError
from icebear.records import Neuron, Ranked


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

    def top(self, k: int, site: str, sign: str) -> list[Ranked]:
        if k > self.k:
            raise InputError(
                f"Only the {self.k} largest of each site were recorded; pass attribute(k={k}), or keep='all'."
            )
        return sorted(self.ranked[site], key=lambda r: (-r.relevance if sign == "+" else r.relevance, r.neuron))[:k]


class LargestNeurons(NeuronRecorder):
    """Record, for each row, site and sign, the k largest relevances, and sums by layer (B, L, T) and head (B, L, T, H).
    Beyond these it takes the memory of the activations of one place."""

    def __init__(
        self,
        model: Model,
        batch: Batch,
        sites: Iterable[str],
        k: int,
        apart: Callable[[int], Iterable[int]] = lambda row: (),
        partner: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """apart: returns the positions of a row that are not ranked; called in the backward pass, when sinks are known.
        partner: returns the counterfactual of activations (B, T, N); relevance is then that of the difference."""
        sites = tuple(sites)
        super().__init__(model, batch, sites)
        self.k, self.apart, self.partner, rows = k, apart, partner, len(batch.ids)
        self.sums = {site: torch.zeros(rows, model.layers, self.width, **self.options) for site in sites}
        self.heads = torch.zeros(rows, model.layers, self.width, model.heads, **self.options)
        self.unranked: Tensor | None = None
        """(B, T) padding, and positions set apart."""
        kinds = 1 if partner is None else 2
        self.best = {
            site: (
                torch.zeros(rows, 2, 0, **self.options),
                torch.zeros(rows, 2, 0, kinds, **self.options),
                torch.zeros(rows, 2, 0, 3, dtype=torch.long, device=model.device),
            )
            for site in sites
        }
        """Largest first: relevance (B, 2, <= k), times -1 in the second half, the most negative; activation (and its
        counterfactual), (B, 2, <= k, 1 or 2); layer, column and index (B, 2, <= k, 3)."""

    def end(self, site: str, layer: int, activation: Tensor, gradient: Tensor) -> None:
        dtype, span = self.options["dtype"], self.span(layer)
        kinds = [activation] if self.partner is None else [activation, self.partner(activation)]
        difference = kinds[0].to(dtype) if self.partner is None else (kinds[0] - kinds[1]).to(dtype)
        relevance = difference * gradient.to(dtype)  # (B, T, N)
        self.sums[site][:, layer, span] = relevance.sum(-1)
        if site == "attn":
            self.heads[:, layer, span] = relevance.unflatten(-1, (self.model.heads, -1)).sum(-1)
        unranked = self._unranked()[:, span, None].to(relevance.device)
        halves = []
        for sign in (1, -1):
            flat = relevance.masked_fill_(unranked, -sign * torch.inf).flatten(1)  # (B, T * N)
            best, at = flat.topk(min(self.k, flat.shape[1]), -1, largest=sign > 0)
            place, index = at // relevance.shape[-1] + span.start, at % relevance.shape[-1]
            where = torch.stack((torch.full_like(at, layer), place, index), -1)
            values = torch.stack([x.flatten(1).gather(1, at).to(dtype) for x in kinds], -1)
            halves.append((sign * best, values, where))
        self._merge(site, [torch.stack(parts, 1) for parts in zip(*halves, strict=True)])

    def _unranked(self) -> Tensor:
        if self.unranked is None:
            self.unranked = torch.ones(len(self.batch.ids), self.width, dtype=torch.bool)
            for row, unranked in enumerate(self.unranked):
                apart = set(self.apart(row))
                unranked[[at for place, at in enumerate(self.batch.columns(row)) if place not in apart]] = False
        return self.unranked

    def _merge(self, site: str, halves: Sequence[Tensor]) -> None:
        pairs = zip(self.best[site], halves, strict=True)
        relevance, values, where = (torch.cat((best, x.to(best.device)), 2) for best, x in pairs)
        relevance, order = relevance.topk(min(self.k, relevance.shape[-1]), -1)
        values, where = (x.gather(2, order[..., None].expand(-1, -1, -1, x.shape[-1])) for x in (values, where))
        self.best[site] = relevance, values, where

    def row(self, row: int) -> Largest:
        """Return the result for one prompt, on the CPU."""
        columns = self.batch.columns(row)
        return Largest(
            self.k,
            {site: tuple(self._ranked(row, site, columns)) for site in self.best},
            {site: sums[row][:, columns].cpu() for site, sums in self.sums.items()},
            self.heads[row][:, columns].cpu() if "attn" in self.sums else None,
        )

    def _ranked(self, row: int, site: str, columns: Sequence[int]) -> Iterable[Ranked]:
        for half, sign in enumerate((1, -1)):
            parts = (x[row, half].tolist() for x in self.best[site])
            for relevance, (here, *there), (layer, column, index) in zip(*parts, strict=True):
                if relevance > -torch.inf:
                    yield Ranked(Neuron(layer, site, index), columns.index(column), here, sign * relevance, *there)
