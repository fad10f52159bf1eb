"""Whether a list of nodes is the cause: the others take the other prompt's activations, and what is left is measured.

A node is a neuron (or head) at a token. F(K) = (m(K) - m(0)) / (m(x) - m(0)), m the number explained: the nodes in K
are computed as ever, from what comes to them, all others of the site have the other prompt's activations; in m(0) all
have. Kept is F(K), left without is F of all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from concepts.models.model import Model
from concepts.models.plan import Plan, plan
from concepts.passes.run import look
from concepts.passes.sites import visiting
from concepts.passes.targets import Logits
from concepts.relevance import Relevance
from icebear.errors import InputError

ROWS = 24
"""Choices of nodes that go through the model at once."""
DRAWS = 5
"""Of nodes at random."""


@dataclass(frozen=True, eq=False)
class Nodes:
    """The activations of a site in both prompts, (L, T, N), that can be exchanged; and the number explained."""

    model: Model
    one: Plan
    site: str
    own: Tensor
    there: Tensor

    @classmethod
    def of(cls, model: Model, relevance: Relevance, site: str = "ffn") -> Nodes:
        """Of a relevance with `versus` that recorded all positions. Raises `InputError` for others."""
        if relevance.versus is None:
            raise InputError("Only a list that is compared with another prompt can be ablated; give versus.")
        if len(relevance.recorded) != len(relevance.tokens) or not model.task.looks_back:
            raise InputError("Ablation is for causal models, and for what recorded all positions.")
        name = "attn" if site == "head" else site
        if relevance.target is None:
            raise InputError("Only an answer of one token is ablated; give a target.")
        contrast = relevance.contrast.id if relevance.contrast else None
        one = plan(model, [list(relevance.token_ids)], relevance.target.id, contrast)
        return cls(model, one, site, relevance.activation(name), relevance.versus.activation[name])

    @property
    def shape(self) -> tuple[int, int, int]:
        """(L, T, N), of heads (L, T, H)."""
        layers, tokens, width = self.own.shape
        return layers, tokens, self.model.heads if self.site == "head" else width

    def numbers(self, chosen: Sequence[Tensor]) -> list[float]:
        """The number explained with each choice (L, T, N) of nodes kept."""
        there = self.there.to(self.model.device, self.model.dtype)
        found: list[float] = []
        for start in range(0, len(chosen), ROWS):
            kept = torch.stack(list(chosen[start : start + ROWS]))
            with self._exchanged(kept, there):
                found += look(self.model, Logits(self.one.repeated(0, len(kept))), []).tolist()
        return found

    def ends(self) -> tuple[float, float]:
        """The number explained with all nodes kept, and with none. Raises `InputError` where they are the same."""
        everything = torch.ones(self.shape, dtype=torch.bool)
        whole, none = self.numbers([everything, ~everything])
        if whole == none:
            raise InputError("Exchanging all these neurons changes nothing; compare with another prompt, or others.")
        return whole, none

    def gains(self, kept: Tensor) -> Tensor:
        """(L, T, N) what each other node adds to the number explained, to first order, where these are kept: gradient x
        difference."""
        own, there = (x.to(self.model.device, self.model.dtype) for x in (self.own, self.there))
        leaves = there.clone().requires_grad_()
        with self._exchanged(kept, leaves):
            logits = self.model.logits(self.one.batch, self.one.needed)
            (gradient,) = torch.autograd.grad(self.one.explained(logits)[1].sum(), leaves)
        found = ((own - there) * gradient).float().cpu()
        return self._by_head(found).sum(-1) if self.site == "head" else found

    def change(self) -> Tensor:
        """(L, T, N) by how much activations differ; of heads the length of that vector."""
        found = (self.own - self.there).abs()
        return self._by_head(found).norm(dim=-1) if self.site == "head" else found

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.model.heads, -1))

    @contextmanager
    def _exchanged(self, kept: Tensor, there: Tensor) -> Iterator[None]:
        """All nodes but those kept (..., L, T, N) have the activations `there` (L, T, width)."""
        name = self.site
        if self.site == "head":
            name, kept = "attn", kept.repeat_interleave(there.shape[-1] // kept.shape[-1], -1)
        kept = kept.to(there.device)

        def exchanged(site: str, layer: int, x: Tensor) -> Tensor:
            return torch.where(kept[..., layer, :, :], x, there[layer])

        places = [(name, layer) for layer in self.model.layers_with(name)]
        with self.model.lock, visiting(self.model, places, exchanged):
            yield


def largest(scores: Tensor, k: int) -> Tensor:
    """The k nodes with the largest |score|, as a choice of the scores' shape."""
    flat = scores.abs().flatten()
    chosen = torch.zeros(len(flat), dtype=torch.bool)
    chosen[flat.topk(min(k, len(flat))).indices] = True
    return chosen.view(scores.shape)


def matched(chosen: Tensor, generator: torch.Generator) -> Tensor:
    """As many nodes at the same layers and tokens, drawn from the others there (from all, where there are too few)."""
    draw = torch.rand(chosen.shape, generator=generator).masked_fill(chosen, -1)
    counts = chosen.sum(-1, keepdim=True)
    order = draw.argsort(-1, descending=True).argsort(-1)  # the rank of each
    return order < counts


@dataclass(frozen=True)
class Ablation:
    """What a list of nodes carries."""

    nodes: int
    kept: float
    """F of the list: what is there when all others take the other prompt's activations."""
    left: float
    """F of all others: what is there without the list."""
    matched_kept: float
    """The same of as many nodes drawn at the same layers and tokens, the mean of `DRAWS`."""
    matched_left: float
    changed_kept: float
    """Of as many nodes that change most, by |a - a'|."""
    changed_left: float


def ablation(model: Model, relevance: Relevance, k: int, site: str = "ffn", seed: int = 0) -> Ablation:
    """What the k nodes of largest |relevance| carry, beside controls."""
    nodes = Nodes.of(model, relevance, site)
    scores = relevance.heads() if site == "head" else relevance.of(site)
    generator = torch.Generator().manual_seed(seed)
    best = largest(scores, k)
    choices = [best, largest(nodes.change(), k), *(matched(best, generator) for _ in range(DRAWS))]
    kept, left = shares(nodes, choices)
    return Ablation(k, kept[0], left[0], fmean(kept[2:]), fmean(left[2:]), kept[1], left[1])


def shares(
    nodes: Nodes, choices: Sequence[Tensor], ends: tuple[float, float] | None = None
) -> tuple[list[float], list[float]]:
    """F of each choice, and of all others. ends: `Nodes.ends`, where they are known."""
    whole, none = ends or nodes.ends()
    numbers = nodes.numbers([*choices, *(~choice for choice in choices)])
    found = [(number - none) / (whole - none) for number in numbers]
    return found[: len(choices)], found[len(choices) :]
