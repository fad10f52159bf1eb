"""Whether a list of nodes is the cause: the others take the other prompt's activations, and what is left is measured.

A node is a neuron (or head) at a token. F(K) = (m(K) - m(0)) / (m(x) - m(0)), m the number explained: the nodes in K
are computed as ever, from what comes to them, all others of the site have the other prompt's activations; in m(0) all
have. Kept is F(K), left without is F of all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import Tensor

from icebear.concepts.attribution.result import Relevance
from icebear.concepts.models.model import Model
from icebear.concepts.models.objective import Objective
from icebear.concepts.passes.run import forward
from icebear.concepts.passes.sites import hooks
from icebear.concepts.passes.targets import Logits
from icebear.errors import InputError
from icebear.records import TokenScore
from icebear.values import seed_of, shown, whole

ROWS = 24
"""Choices of nodes that go through the model at once."""
DRAWS = 5
"""Of nodes at random."""


@dataclass(frozen=True, eq=False)
class Nodes:
    """The activations of sites in both prompts, (L, T, N) each, that can be exchanged; and the number explained.

    A choice of nodes is (L, T, W), the sites side by side: their neurons, or of the site ``head`` the heads.
    """

    model: Model
    one: Objective
    sites: tuple[str, ...]
    own: dict[str, Tensor]
    there: dict[str, Tensor]

    @classmethod
    def of(cls, model: Model, relevance: Relevance, *sites: str) -> Nodes:
        """Of a relevance with `counterfactual` that recorded all positions; the sites are ffn, unless told otherwise.
        Raises `InputError` for others."""
        if relevance.counterfactual is None:
            raise InputError("Only a list that is compared with another prompt can be ablated; give counterfactual.")
        if len(relevance.neurons.recorded) != len(relevance.tokens) or not model.task.is_causal:
            raise InputError("Ablation is for causal models, and for what recorded all positions.")
        if relevance.contrast_phrase:
            raise InputError("A phrase against another one is not ablated; leave the contrast out.")
        contrast = relevance.contrast.id if relevance.contrast else None
        one = replace(relevance.counterfactual.pairs[0].rows([0]), contrasts=(contrast,))
        sites = sites or ("ffn",)
        own = {site: relevance.activation(neuron_site(site)) for site in sites}
        there = {site: relevance.neurons.counterfactual[neuron_site(site)] for site in sites}
        return cls(model, one, sites, own, there)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(L, T, W)"""
        layers, tokens, _ = self.own[self.sites[0]].shape
        return layers, tokens, sum(self.widths)

    @property
    def widths(self) -> list[int]:
        """Of each site, in a choice."""
        return [self.model.width(site) for site in self.sites]

    def numbers(self, chosen: Sequence[Tensor]) -> list[float]:
        """The number explained with each choice (L, T, W) of nodes kept."""
        numbers: list[float] = []
        for kept in torch.stack(list(chosen)).split(ROWS):
            with self._exchanged(kept, self.there):
                numbers += forward(self.model, Logits(self.one.rows([0] * len(kept))), []).tolist()
        return numbers

    def predictions(self, kept: Tensor, k: int = 5) -> list[TokenScore]:
        """The most probable answers with a choice (L, T, W) of nodes kept."""
        target = Logits(self.one)
        with self._exchanged(kept, self.there):
            forward(self.model, target, [])
        return self.model.top_tokens(target.logits[0, -1].float(), k)

    def ends(self) -> tuple[float, float]:
        """The number explained with all nodes kept, and with none. Raises `InputError` where they are the same."""
        everything = torch.ones(self.shape, dtype=torch.bool)
        whole, none = self.numbers([everything, ~everything])
        if whole == none:
            raise InputError("Exchanging all these neurons changes nothing; compare with another prompt, or others.")
        return whole, none

    def gains(self, kept: Tensor) -> Tensor:
        """(L, T, W) what each other node adds to the number explained, to first order, where these are kept: gradient x
        difference."""
        leaves = {
            site: x.to(self.model.device, self.model.dtype, copy=True).requires_grad_()
            for site, x in self.there.items()
        }
        with self._exchanged(kept, leaves):
            logits = self.model.logits(self.one.batch, self.one.all_positions)
            gradients = torch.autograd.grad(self.one.evaluate(logits)[1].sum(), list(leaves.values()))
        pairs = zip(self.there.items(), gradients, strict=True)
        values = {site: ((self.own[site] - there) * gradient.cpu()).float() for (site, there), gradient in pairs}
        return self._side_by_side(values, lambda x: x.sum(-1))

    def change(self) -> Tensor:
        """(L, T, W) by how much activations differ; of heads the length of that vector."""
        values = {site: (self.own[site] - there).abs() for site, there in self.there.items()}
        return self._side_by_side(values, lambda x: x.norm(dim=-1))

    def _side_by_side(self, values: dict[str, Tensor], by_head: Callable[[Tensor], Tensor]) -> Tensor:
        """(L, T, W) of each site's values (L, T, N)."""
        parts = (by_head(x.unflatten(-1, (self.model.heads, -1))) if s == "head" else x for s, x in values.items())
        return torch.cat(list(parts), -1)

    @contextmanager
    def _exchanged(self, kept: Tensor, there: dict[str, Tensor]) -> Iterator[None]:
        """All nodes but those kept (..., L, T, W) have the activations `there` (L, T, N)."""
        parts = dict(zip(self.sites, kept.split(self.widths, -1), strict=True))
        stays: dict[str, tuple[Tensor, Tensor]] = {}
        for site, part in parts.items():
            x = there[site].to(self.model.device, self.model.dtype)
            stays[neuron_site(site)] = (part.repeat_interleave(x.shape[-1] // part.shape[-1], -1).to(x.device), x)

        def exchanged(site: str, layer: int, x: Tensor) -> Tensor:
            own, other = stays[site]
            return torch.where(own[..., layer, :, :], x, other[layer])

        places = [(name, layer) for name in stays for layer in self.model.layers_with(name)]
        with self.model.lock, hooks(self.model, places, exchanged):
            yield


def neuron_site(site: str) -> str:
    """Where a relevance keeps a site's activations: heads are in `attn`."""
    return "attn" if site == "head" else site


def largest(scores: Tensor, k: int) -> Tensor:
    """The k nodes with the largest |score|, as a choice of the scores' shape."""
    flat = scores.abs().flatten()
    chosen = torch.zeros(len(flat), dtype=torch.bool)
    chosen[flat.topk(min(k, len(flat))).indices] = True
    return chosen.view(scores.shape)


def random_nodes(chosen: Tensor, generator: torch.Generator) -> Tensor:
    """As many nodes at the same layers and tokens, drawn from the others there (from all, where there are too few)."""
    draw = torch.rand(chosen.shape, generator=generator).masked_fill(chosen, -1)
    counts = chosen.sum(-1, keepdim=True)
    order = draw.argsort(-1, descending=True).argsort(-1)  # the rank of each
    return order < counts


@dataclass(frozen=True)
class Ablation:
    """Sufficiency and necessity of a list of nodes, with two controls. They may be below 0 or above 1 (overshoot)."""

    nodes: int
    sufficiency: float
    """F of the list: the share of the difference that comes about when all other nodes take their counterfactual
    values."""
    necessity: float
    """1 - F of all other nodes: the share that is lost when only the list takes its counterfactual values."""
    random_sufficiency: float
    """Sufficiency of as many random nodes at the same layers and tokens, the mean of `DRAWS` draws."""
    random_necessity: float
    most_changed_sufficiency: float
    """Sufficiency of as many nodes whose activations change most, by |a - a'|."""
    most_changed_necessity: float


def ablation(model: Model, relevance: Relevance, k: int, site: str = "ffn", seed: int = 0) -> Ablation:
    """What the k nodes of largest |relevance| carry, beside controls."""
    if not isinstance(relevance, Relevance):
        raise InputError(
            f"What is ablated is a Relevance, not {shown(relevance)}; give one of attribute(counterfactual=...)."
        )
    k, seed = whole(k, "The number of nodes"), seed_of(seed)
    scores = relevance.heads() if site == "head" else relevance.of(site)
    nodes = Nodes.of(model, relevance, site)
    return ablate(nodes, largest(scores, k), torch.Generator().manual_seed(seed))


def ablate(nodes: Nodes, chosen: Tensor, generator: torch.Generator) -> Ablation:
    """What a choice of nodes (L, T, W) carries, beside controls."""
    count = int(chosen.sum())
    parts = chosen.split(nodes.widths, -1)
    draws = [torch.cat([random_nodes(part, generator) for part in parts], -1) for _ in range(DRAWS)]
    choices = [chosen, largest(nodes.change(), count), *draws]
    sufficiency, remaining = recovered_shares(nodes, choices)
    necessity = [1 - share for share in remaining]
    random = (fmean(values[2:]) for values in (sufficiency, necessity))
    return Ablation(count, sufficiency[0], necessity[0], *random, sufficiency[1], necessity[1])


def recovered_shares(
    nodes: Nodes, choices: Sequence[Tensor], ends: tuple[float, float] | None = None
) -> tuple[list[float], list[float]]:
    """F of each choice, and of all others. ends: `Nodes.ends`, where they are known."""
    whole, none = ends or nodes.ends()
    numbers = nodes.numbers([*choices, *(~choice for choice in choices)])
    carried = [(number - none) / (whole - none) for number in numbers]
    return carried[: len(choices)], carried[len(choices) :]
