"""Parts of a model in words that fit any pair of prompts, and the share of the difference that they give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch
from torch import Tensor

from icebear.concepts.passes.sites import neuron_site
from icebear.concepts.stages.patched_pair import PART_SITES, PatchedPair, State
from icebear.models.model import Model
from icebear.models.parts.linear import Linear
from icebear.records import Neuron

WholeKinds = frozenset[tuple[str, str]]
"""Whole parts without their tokens, such as ``("ffn", "differing")``: attention or the FFN of all layers at the
``differing`` tokens, the tokens ``between`` them and the explained one, all ``other`` tokens, or the ``last`` token,
which is explained."""
WHOLE_KINDS: WholeKinds = frozenset((kind, where) for kind in PART_SITES for where in ("differing", "between"))
"""The whole parts of earlier tokens."""
HEAD_SITES = PART_SITES["attn"]
OTHERS: WholeKinds = frozenset({("attn", "other"), ("ffn", "other")})
LAST: WholeKinds = frozenset({("attn", "last"), ("ffn", "last")})
LAST_FFN: WholeKinds = frozenset({("ffn", "last")})


@dataclass(frozen=True, eq=False)
class Recomputed:
    """Whole parts, and nodes of the last token, that are recomputed."""

    whole_kinds: WholeKinds = frozenset()
    nodes: Mapping[str, Tensor] = field(default_factory=dict)
    """Site -> (L, W)."""

    def state(self, pair: PatchedPair) -> State:
        tokens = {
            "differing": pair.differing,
            "between": pair.between,
            "other": pair.all_tokens - {pair.position},
            "last": frozenset({pair.position}),
        }
        attn, ffn = (
            frozenset().union(*(tokens[where] for part, where in self.whole_kinds if part == kind))
            for kind in PART_SITES
        )
        return State(attn, ffn, self.nodes)


class ExplainedTokenNodes:
    """The heads and neurons of a model at the token that is explained."""

    def __init__(self, model: Model, stack: int) -> None:
        """stack: that of the explained token."""
        self.model = model
        at = {site: [n for n in model.layers_with(site) if model.stack_of(n) == stack] for site in model.sites}
        self.layers = {site: at[site] for sites in PART_SITES.values() for site in sites if at.get(site)}
        self.head_sites = [site for site in HEAD_SITES if site in self.layers]

    def width(self, site: str) -> int:
        return self.model.heads if site in HEAD_SITES else self.model.width(site)

    def masks(self, nodes: Sequence[Neuron]) -> dict[str, Tensor]:
        """Return site -> (L, W) of nodes; a head of the site ``attn`` is named by the site ``head``."""
        at: dict[str, list[tuple[int, int]]] = {}
        for node in nodes:
            at.setdefault(neuron_site(node.site), []).append((node.layer, node.index))
        masks = {site: torch.zeros(self.model.layers, self.width(site), dtype=torch.bool) for site in at}
        for site, mask in masks.items():
            mask[tuple(zip(*at[site], strict=True))] = True
        return masks

    def without(self, nodes: Sequence[Neuron]) -> Recomputed:
        """Return everything but some nodes."""
        every = {site: torch.ones(self.model.layers, self.width(site), dtype=torch.bool) for site in self.layers}
        for site, mask in self.masks(nodes).items():
            every[site] &= ~mask
        return Recomputed(OTHERS, every)

    def heads(self) -> list[Neuron]:
        """Return all heads at the explained token."""
        return [head for site in self.head_sites for layer in self.layers[site] for head in self.heads_of(site, layer)]

    def heads_of(self, site: str, layer: int) -> list[Neuron]:
        name = "head" if site == "attn" else site
        return [Neuron(layer, name, index) for index in range(self.model.heads)]

    def random(self, nodes: Sequence[Neuron], generator: torch.Generator) -> list[Neuron]:
        """Draw as many heads, of all layers, and as many neurons in each layer, as there are nodes; none of them."""
        taken, drawn = set(nodes), []
        free = [head for head in self.heads() if head not in taken]
        neurons = [(node.layer, node.site) for node in nodes if neuron_site(node.site) not in HEAD_SITES]
        count = len(nodes) - len(neurons)
        drawn += [free[index] for index in torch.randperm(len(free), generator=generator)[:count].tolist()]
        for layer, site in dict.fromkeys(neurons):
            order = torch.randperm(self.model.width(site), generator=generator).tolist()
            chosen = {node.index for node in nodes if (node.layer, node.site) == (layer, site)}
            others = [index for index in order if index not in chosen]
            drawn += [Neuron(layer, site, index) for index in others[: len(chosen)]]
        return drawn

    def most_changed(self, pairs: Sequence[PatchedPair], taken: Sequence[Neuron], count: int) -> list[Neuron]:
        """Return the heads, none of them taken, for which what they write changes most between the prompts."""
        sizes: dict[Neuron, float] = {}
        for site in self.head_sites:
            changes = [torch.sub(*pair.at_explained(site)) for pair in pairs]
            heads = [head for layer in self.layers[site] for head in self.heads_of(site, layer)]
            each = [
                torch.cat(
                    [self._written_sizes(change[layer], site, layer).to(change.device) for layer in self.layers[site]]
                )
                for change in changes
            ]
            sizes |= zip(heads, torch.stack(each).double().mean(0).tolist(), strict=True)
        return sorted(sizes.keys() - set(taken), key=lambda head: (-sizes[head], head))[:count]

    def _written_sizes(self, change: Tensor, site: str, layer: int) -> Tensor:
        """Return (H,) for each head the norm of W_O times the change (W) of its output."""
        weights = Linear(self.model.site_module(site, layer)).columns(dtype=change.dtype)
        written = (weights * change.to(weights.device)).unflatten(-1, (self.model.heads, -1)).sum(-1)  # (D, H)
        return written.norm(dim=0)


class Shares:
    """The share of the difference that what is recomputed gives, the mean over pairs of prompts."""

    def __init__(self, pairs: Sequence[PatchedPair]) -> None:
        self.pairs = pairs

    def of(self, recomputed: Sequence[Recomputed]) -> list[float]:
        return self.of_states([[each.state(pair) for each in recomputed] for pair in self.pairs])

    def of_states(self, states: Sequence[Sequence[State]]) -> list[float]:
        """states: of each pair."""
        rows = [pair.shares(pair.logits(of_pair)) for pair, of_pair in zip(self.pairs, states, strict=True)]
        return [fmean(column) for column in zip(*rows, strict=True)]
