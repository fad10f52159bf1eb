"""Groups of nodes that raise and lower the same likely next words, each named by its joint effect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from icebear.concepts.nodes.controls import random_nodes
from icebear.concepts.results.effect_words import effect_words
from icebear.concepts.results.effects import Patched
from icebear.concepts.statistics import clusters
from icebear.records import Neuron, Ranked

CLOSER = 0.05
"""Nodes of a group are as similar as the most similar 5 % of pairs of random nodes."""
DIFFERENT = 0.25


@dataclass(frozen=True, eq=False)
class EffectGroup:
    """Nodes with similar effects."""

    nodes: tuple[Ranked, ...]
    """The largest relevance first."""
    tokens: tuple[str, ...]
    """(W,) the likely tokens."""
    joint: Tensor
    """(W,) the effect of setting all nodes together."""
    each: Tensor
    """(N, W) the effects of the nodes, one at a time."""

    @property
    def relevance(self) -> float:
        return sum(node.relevance for node in self.nodes)

    @property
    def interacts(self) -> bool:
        """Whether the joint effect differs from the sum by more than a quarter."""
        return bool((self.joint - self.each.sum(0)).norm() > DIFFERENT * self.joint.norm())

    def words(self, k: int = 4) -> tuple[list[str], list[str]]:
        """Return the k likely words that the group raises and lowers most."""
        return effect_words(self.tokens, self.joint, k)

    @property
    def layers(self) -> tuple[int, int]:
        """The first and the last layer."""
        layers = [node.neuron.layer for node in self.nodes]
        return min(layers), max(layers)

    def to_dict(self) -> dict[str, Any]:
        raises, lowers = self.words(10)
        nodes = [node.to_dict() for node in self.nodes]
        totals = {"joint": self.joint.tolist(), "sum": self.each.sum(0).tolist()}
        return {"raises": raises, "lowers": lowers, "relevance": self.relevance, "nodes": nodes, **totals}


def effect_groups(
    patched: Patched, nodes: Sequence[Ranked], count: int, seed: int = 0
) -> tuple[EffectGroup, list[EffectGroup]]:
    """Group nodes by the cosine similarity of their effects; return all nodes as one group, and the `count` groups with
    the largest relevance.

    Average linkage; two groups are joined while their nodes are closer than the closest 5 % of pairs among as many
    random nodes of the same sites (`random_nodes`).
    """
    rows = patched.effects([[node] for node in nodes])[0]
    labels = [0] * len(nodes)
    if len(nodes) > 1:
        others = random_like(patched, nodes, seed)
        random = patched.effects([[node] for node in others])[0] if len(others) > 1 else rows  # of a site that is full
        apart = torch.pdist(normalize(random.double())).square() / 2  # cosine distances
        units = normalize(rows.double())
        labels = clusters((units @ units.T).numpy(), "average", apart.quantile(CLOSER).item())
    members = [[index for index, label in enumerate(labels) if label == member_label] for member_label in set(labels)]
    members.sort(key=lambda indices: -abs(sum(nodes[index].relevance for index in indices)))
    shown = [list(range(len(nodes))), *members[:count]]
    joint = patched.effects([[nodes[index] for index in indices] for indices in shown])[0]
    all_nodes, *groups = [
        EffectGroup(tuple(nodes[index] for index in indices), patched.tokens, together, rows[indices])
        for indices, together in zip(shown, joint, strict=True)
    ]
    return all_nodes, groups


def random_like(patched: Patched, nodes: Sequence[Ranked], seed: int) -> list[Ranked]:
    """Draw as many other nodes of the same sites (`random_nodes`)."""
    generator, drawn = torch.Generator().manual_seed(seed), []
    for site in dict.fromkeys(node.neuron.site for node in nodes):
        layers = patched.model.layers_with("attn") if site == "head" else None
        coordinates = random_nodes(patched.relevance.mask(nodes, site), site, generator, layers).nonzero().tolist()
        drawn += [Ranked(Neuron(layer, site, index), position, None, 0.0) for layer, position, index in coordinates]
    return drawn
