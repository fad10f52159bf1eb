"""The most relevant neurons of a pass, and sums over all neurons, in little memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from icebear.concepts.passes.neurons import NeuronRecorder
from icebear.errors import InputError
from icebear.models.batch import Batch
from icebear.models.model import Model
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
        apart: Callable[[int], Iterable[int]] = lambda row: (),
        paired: bool = False,
    ) -> None:
        """apart: returns the positions of a row that are not ranked; called in the backward pass, when sinks are known.
        paired: whether the second half of rows are counterfactuals of the first, whose difference is then recorded."""
        sites = tuple(sites)
        super().__init__(model, batch, sites)
        self.k, self.apart, self.paired, rows = k, apart, paired, len(batch.ids) // (1 + paired)
        self.sums = {site: torch.zeros(rows, model.layers, self.width, **self.options) for site in sites}
        self.heads = torch.zeros(rows, model.layers, self.width, model.heads, **self.options)
        self.unranked: Tensor | None = None
        """(B, T) padding, and positions set apart."""
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
        unranked = self._unranked()[:, span, None].to(relevance.device)
        for sign in (1, -1):
            flat = relevance.masked_fill_(unranked, -sign * torch.inf).flatten(1)  # (B, T * N)
            best, at = flat.topk(min(self.k, flat.shape[1]), -1, largest=sign > 0)
            column, index = at // relevance.shape[-1] + span.start, at % relevance.shape[-1]
            where = torch.stack((torch.full_like(at, layer), column, index), -1)
            values = torch.stack([x.flatten(1).gather(1, at).to(dtype) for x in kinds], -1)
            self.best[site, sign].append((sign * best, values, where))

    def _unranked(self) -> Tensor:
        if self.unranked is None:
            self.unranked = torch.ones(len(self.heads), self.width, dtype=torch.bool)
            for row, unranked in enumerate(self.unranked):
                apart = set(self.apart(row))
                unranked[[at for position, at in enumerate(self.batch.columns(row)) if position not in apart]] = False
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
            layers = [[part[row].cpu() for part in parts] for parts in self.best[site, sign]]
            if layers:
                relevance, values, where = (torch.cat(parts) for parts in zip(*layers, strict=True))
                order = relevance.topk(min(self.k, int((relevance > -torch.inf).sum()))).indices
                for best, (activation, *other), (layer, column, index) in zip(
                    relevance[order].tolist(), values[order].tolist(), where[order].tolist(), strict=True
                ):
                    yield Ranked(Neuron(layer, site, index), columns.index(column), activation, sign * best, *other)
