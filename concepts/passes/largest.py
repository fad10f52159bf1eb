"""The most relevant neurons of a pass and the sums over all of them, without keeping all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from concepts.models.batch import Batch
from concepts.models.model import Model
from concepts.passes.neurons import Recorder
from icebear.records import Neuron, Ranked


class LargestNeurons(Recorder):
    """Keeps, for each row and sign, the k largest relevances, and the sums by layer and by head.

    Memory is one place's activations beyond what is kept: sums take (B, L, P), those of heads (B, L, P, H).
    """

    def __init__(
        self,
        model: Model,
        batch: Batch,
        sites: Iterable[str],
        k: int,
        positions: Sequence[Sequence[int]] | None = None,
        stop: bool = False,
    ) -> None:
        sites = tuple(sites)
        super().__init__(model, batch, sites, positions, stop)
        self.k, rows = k, len(batch.ids)
        self.sums = {site: torch.zeros(rows, model.layers, self.kept, **self.options) for site in sites}
        self.heads = torch.zeros(rows, model.layers, self.kept, model.heads, **self.options)
        """Of the site `attn`."""
        self.relevance = torch.zeros(rows, 2, 0, **self.options)
        """(B, 2, <= k) signed as -r for the second, which are the most negative; largest first."""
        self.activation = torch.zeros(rows, 2, 0, **self.options)
        self.where = torch.zeros(rows, 2, 0, 4, dtype=torch.long, device=model.device)
        """(B, 2, <= k, 4) index among `sites`, layer, place among what is kept, index."""
        self.names = sites

    def end(self, site: str, layer: int, activation: Tensor, gradient: Tensor) -> None:
        dtype, span = self.options["dtype"], self.span(layer)
        activation = activation.to(dtype)
        relevance = activation * gradient.to(dtype)  # (B, P, N)
        self.sums[site][:, layer, span] = relevance.sum(-1)
        if site == "attn":
            self.heads[:, layer, span] = relevance.unflatten(-1, (self.model.heads, -1)).sum(-1)
        flat = relevance.flatten(1)
        signed = torch.stack((flat, -flat), 1)  # (B, 2, P * N)
        found, at = signed.topk(min(self.k, signed.shape[-1]), -1)
        place, index = at // relevance.shape[-1] + span.start, at % relevance.shape[-1]
        number = torch.full_like(at, self.names.index(site))
        where = torch.stack((number, torch.full_like(at, layer), place, index), -1)
        values = activation.flatten(1)[:, None].expand(-1, 2, -1).gather(-1, at)
        self._merge(*(x.to(self.where.device) for x in (found, values, where)))

    def _merge(self, relevance: Tensor, activation: Tensor, where: Tensor) -> None:
        both = torch.cat((self.relevance, relevance), -1)
        self.relevance, order = both.topk(min(self.k, both.shape[-1]), -1)
        self.activation = torch.cat((self.activation, activation), -1).gather(-1, order)
        self.where = torch.cat((self.where, where), 2).gather(2, order[..., None].expand(-1, -1, -1, 4))

    def row(self, row: int, sign: str = "+") -> list[Ranked]:
        """The largest of one prompt, those that speak for the target or (``-``) against it; `Ranked.position` is the
        place among what is kept."""
        half, factor = (0, 1) if sign == "+" else (1, -1)
        parts = (self.where[row, half], self.activation[row, half], factor * self.relevance[row, half])
        return [
            Ranked(Neuron(layer, self.names[site], index), place, activation, relevance)
            for (site, layer, place, index), activation, relevance in zip(*(x.tolist() for x in parts), strict=True)
        ]
