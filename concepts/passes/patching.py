"""Activation patching of sets of nodes: some are recomputed, and all others of their sites take other values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from icebear.concepts.passes.run import Logits, forward
from icebear.concepts.passes.sites import hooks, neuron_site
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.models.objective import Objective
from icebear.records import TokenScore

SETS_PER_PASS = 24
"""The number of node sets that go through the model at once."""


@dataclass(frozen=True, eq=False)
class PatchableNodes:
    """The nodes of some sites that can be patched: their activations (L, T, N) in the prompt and the counterfactual.

    A set of nodes is a mask (L, T, W) over the neurons of all sites side by side (for the site ``head``, the heads).
    """

    model: Model
    objective: Objective
    sites: tuple[str, ...]
    activation: dict[str, Tensor]
    counterfactual: dict[str, Tensor]
    number_c: float | None = None
    """m(c); None for the number when all nodes take their counterfactual values."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(L, T, W)"""
        layers, tokens, _ = self.activation[self.sites[0]].shape
        return layers, tokens, sum(self.widths)

    @property
    def widths(self) -> list[int]:
        """The number of nodes of each site at a layer and token."""
        return [self.model.width(site) for site in self.sites]

    def numbers(self, chosen: Sequence[Tensor]) -> list[float]:
        """Return the explained number for each mask (L, T, W) of recomputed nodes."""
        numbers: list[float] = []
        for recomputed in torch.stack(list(chosen)).split(SETS_PER_PASS):
            with self.patched(recomputed):
                numbers += forward(self.model, Logits(self.objective.rows([0] * len(recomputed))), []).tolist()
        return numbers

    def predictions(self, recomputed: Tensor) -> list[TokenScore]:
        """Return the five most probable answers for a mask (L, T, W) of recomputed nodes."""
        target = Logits(self.objective)
        with self.patched(recomputed):
            forward(self.model, target, [])
        return self.model.top_tokens(target.logits[0, -1].float(), 5)

    @cached_property
    def ends(self) -> tuple[float, float]:
        """m(x) and m(c). Raises `InputError` if they are equal, or if patching the whole site changes nothing."""
        number_x, empty = self.extremes
        number_c = empty if self.number_c is None else self.number_c
        if number_x in (number_c, empty):
            raise InputError(
                "The explained number does not change when all neurons of the site take their counterfactual values; "
                "choose another counterfactual or another site."
            )
        return number_x, number_c

    @cached_property
    def empty_share(self) -> float:
        """F of no nodes."""
        (number_x, number_c), (_, empty) = self.ends, self.extremes
        return (empty - number_c) / (number_x - number_c)

    @cached_property
    def extremes(self) -> tuple[float, float]:
        """The explained number with all nodes recomputed, and with none."""
        everything = torch.ones(self.shape, dtype=torch.bool)
        complete, empty = self.numbers([everything, ~everything])
        return complete, empty

    def change(self) -> Tensor:
        """Return (L, T, W) sizes of the activation differences; for heads, norms."""
        values = {site: (self.activation[site] - x_c).abs() for site, x_c in self.counterfactual.items()}
        return self.side_by_side(values, lambda x: x.norm(dim=-1))

    def side_by_side(self, values: dict[str, Tensor], by_head: Callable[[Tensor], Tensor]) -> Tensor:
        """Concatenate values (L, T, N) of each site to (L, T, W)."""
        parts = (by_head(x.unflatten(-1, (self.model.heads, -1))) if s == "head" else x for s, x in values.items())
        return torch.cat(list(parts), -1)

    @contextmanager
    def patched(self, recomputed: Tensor) -> Iterator[None]:
        """Give all nodes outside of a mask (..., L, T, W) their counterfactual values."""
        parts = dict(zip(self.sites, recomputed.split(self.widths, -1), strict=True))
        patches: dict[str, tuple[Tensor, Tensor]] = {}
        for site, part in parts.items():
            x = self.counterfactual[site].to(self.model.device, self.model.dtype)
            patches[neuron_site(site)] = (part.repeat_interleave(x.shape[-1] // part.shape[-1], -1).to(x.device), x)

        def patch(site: str, layer: int, x: Tensor) -> Tensor:
            mask, values = patches[site]
            return torch.where(mask[..., layer, :, :], x, values[layer])

        site_layers = [(name, layer) for name in patches for layer in self.model.layers_with(name)]
        with self.model.lock, hooks(self.model, site_layers, patch):
            yield
