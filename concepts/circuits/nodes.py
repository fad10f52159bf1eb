"""The nodes of a circuit: scored, chosen, and as numbers inside the model."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor

from icebear.concepts.attribution.controls import Nodes, largest, shares
from icebear.concepts.attribution.result import Relevance
from icebear.concepts.circuits.edges import Place, Probe
from icebear.concepts.circuits.records import Node
from icebear.concepts.models.model import Model
from icebear.concepts.models.objective import Objective
from icebear.errors import InputError
from icebear.records import Neuron

MOST = 1024
"""Nodes of a graph; more are a cloud."""


def scored(relevance: Relevance, heads: bool) -> Tensor:
    """(L, T, W) relevance of neurons, and of heads beside them."""
    return torch.cat((relevance.ffn, relevance.heads()), -1) if heads else relevance.ffn


def exchangeable(model: Model, relevance: Relevance, heads: bool) -> Nodes:
    """What can be exchanged between both prompts."""
    return Nodes.of(model, relevance, *(("ffn", "head") if heads else ("ffn",)))


def fewest(model: Model, found: Sequence[Relevance], scores: Tensor, wanted: float, heads: bool) -> int:
    """The smallest number of nodes that carries what is wanted, if more nodes carry more. Raises `InputError`."""
    pairs = [exchangeable(model, relevance, heads) for relevance in found]
    ends = [nodes.ends() for nodes in pairs]

    def carried(counts: Sequence[int]) -> list[float]:
        choices = [largest(scores, count) for count in counts]
        each = [shares(nodes, choices, end)[0] for nodes, end in zip(pairs, ends, strict=True)]
        return [median(row) for row in zip(*each, strict=True)]

    powers = [1 << power for power in range(MOST.bit_length())]
    reached = carried(powers)
    high = next((count for count, share in zip(powers, reached, strict=True) if share >= wanted), None)
    if high is None:
        raise InputError(f"Even {powers[-1]} nodes carry only {reached[-1]:.0%}; ask for less.")
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if carried([middle])[0] >= wanted else (middle, high)
    return high


def places(model: Model, chosen: Tensor) -> list[Place]:
    """By layer, in it heads before neurons, which read them, then by token."""
    width = model.width("ffn")
    found = [
        ("ffn", layer, token, index) if index < width else ("head", layer, token, index - width)
        for layer, token, index in chosen.nonzero().tolist()
    ]
    return sorted(found, key=lambda place: (place[1], place[0] == "ffn", *place[2:]))


def column(model: Model, neuron: Neuron) -> int:
    """Where a neuron, or a head behind all neurons, is in a choice (L, T, W)."""
    return neuron.index + model.width("ffn") * (neuron.site == "head")


def places_of(nodes: Sequence[Node]) -> list[Place]:
    """Where nodes are."""
    return [(node.neuron.site, node.neuron.layer, node.position, node.neuron.index) for node in nodes]


def probes(relevance: Relevance, places: Sequence[Place]) -> list[Probe]:
    """What each node is a number of: a neuron its activation, a head its output times the answer's coefficients."""
    found = []
    for site, layer, token, index in places:
        if site != "head":
            found.append(Probe(site, layer, token, slice(index, index + 1), relevance.tokens.new_ones(1)))
            continue
        dim = relevance.attn.shape[-1] // relevance.neurons.head_count
        part = slice(index * dim, (index + 1) * dim)
        moved = change(relevance, "attn")[layer, token, part]
        coefficient = relevance.attn[layer, token, part] / moved.masked_fill(moved == 0, 1)
        found.append(Probe("attn", layer, token, part, coefficient))
    return found


def change(relevance: Relevance, site: str) -> Tensor:
    """(L, T, N) activations in the prompt less those in the other one."""
    assert relevance.counterfactual is not None
    return relevance.activation(site) - relevance.neurons.counterfactual[site]


def own_and_other(relevance: Relevance, places: Sequence[Place]) -> tuple[Tensor, Tensor]:
    """(K + 1,) each node's number and the answer's, in the prompt and in the other one."""
    assert relevance.counterfactual is not None
    there, (number,) = relevance.neurons.counterfactual, relevance.counterfactual.numbers
    own, other = [], []
    for probe in probes(relevance, places):
        own.append(relevance.activation(probe.site)[probe.layer, probe.position, probe.places] @ probe.direction)
        other.append(there[probe.site][probe.layer, probe.position, probe.places] @ probe.direction)
    numbers = torch.tensor([relevance.conservation().target + number, number], dtype=relevance.tokens.dtype)
    return torch.stack([*own, numbers[0]]), torch.stack([*other, numbers[1]])


def pair_of(relevance: Relevance) -> Objective:
    """Both prompts, and what is explained of them."""
    assert relevance.counterfactual is not None
    return relevance.counterfactual.pairs[0]
