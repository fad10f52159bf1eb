"""The nodes of a circuit: how they are scored, chosen and read inside the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from icebear.concepts.circuits.circuit_records import AnswerNode
from icebear.concepts.circuits.edges import Probe
from icebear.concepts.nodes.controls import nodes_of
from icebear.concepts.passes.patching import PatchableNodes
from icebear.concepts.passes.run import TokenNode
from icebear.concepts.results.effect_words import effect_words
from icebear.concepts.results.effects import NodeEffects
from icebear.concepts.results.result import Relevance
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.models.objective import Objective
from icebear.records import Neuron, Ranked

MOST = 1024
"""The largest number of nodes of a graph."""


def node_sites(model: Model, heads: bool) -> tuple[str, ...]:
    """Return the sites of nodes. Raises `InputError` if there are none."""
    if not {"ffn", "attn"} & set(model.sites):
        raise InputError(
            f"The nodes of circuits are FFN neurons and heads, and {model.name} has none; rank its neurons instead."
        )
    sites = ("ffn",) * ("ffn" in model.sites) + ("head",) * (heads and "attn" in model.sites)
    if not sites:
        raise InputError(
            f"{model.name} has no FFN neurons; take its heads as nodes (leave out --no-heads, in Python heads=False)."
        )
    return sites


def scored(model: Model, relevance: Relevance, heads: bool) -> Tensor:
    """Return the relevance (L, T, W) of neurons, followed by that of heads if they are nodes."""
    parts = (relevance.heads() if site == "head" else relevance.of(site) for site in node_sites(model, heads))
    return torch.cat(list(parts), -1)


def patchable(model: Model, relevance: Relevance, heads: bool) -> PatchableNodes:
    """Return the activations of both prompts, for activation patching."""
    return nodes_of(model, relevance, *node_sites(model, heads))


def mask_of(model: Model, shape: Sequence[int], token_nodes: Sequence[TokenNode]) -> Tensor:
    """Return nodes as a mask of a shape (L, T, W)."""
    chosen = torch.zeros(*shape, dtype=torch.bool)
    for neuron, token in token_nodes:
        chosen[neuron.layer, token, column(model, neuron)] = True
    return chosen


def token_nodes(model: Model, chosen: Tensor) -> list[TokenNode]:
    """Return the chosen (L, T, W) nodes by layer, then heads before neurons (which read them), then by token."""
    width = model.ffn_width
    nodes = [
        (Neuron(layer, "ffn", index) if index < width else Neuron(layer, "head", index - width), token)
        for layer, token, index in chosen.nonzero().tolist()
    ]
    return sorted(nodes, key=lambda at: (at[0].layer, at[0].site == "ffn", at[1], at[0].index))


def moved_words(
    model: Model, relevance: Relevance, sets: Sequence[Sequence[TokenNode]]
) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return the likely next words that the nodes of each set raise and lower together (`NodeEffects.effects`)."""
    node_effects = NodeEffects(model, relevance)
    effects, *_ = node_effects.effects(
        [[Ranked(neuron, token, None, 0.0) for neuron, token in nodes] for nodes in sets]
    )
    words = (effect_words(node_effects.tokens, row) for row in effects)
    return [(tuple(raises), tuple(lowers)) for raises, lowers in words]


def column(model: Model, neuron: Neuron) -> int:
    """Return the index of a neuron or head along the last dimension of a choice (L, T, W): heads follow neurons."""
    return neuron.index + model.ffn_width * (neuron.site == "head")


def probes(relevance: Relevance, token_nodes: Sequence[TokenNode]) -> list[Probe]:
    """Return the number that each node is: of a neuron its activation, of a head its output times the multipliers."""
    numbers = []
    for neuron, token in token_nodes:
        layer, index = neuron.layer, neuron.index
        if neuron.site != "head":
            numbers.append(Probe(neuron.site, layer, token, slice(index, index + 1), relevance.tokens.new_ones(1)))
            continue
        dim = relevance.attn.shape[-1] // relevance.neurons.head_count
        part = slice(index * dim, (index + 1) * dim)
        difference = activation_difference(relevance, "attn")[layer, token, part]
        multiplier = relevance.attn[layer, token, part] / difference.masked_fill(difference == 0, 1)
        numbers.append(Probe("attn", layer, token, part, multiplier))
    return numbers


def activation_difference(relevance: Relevance, site: str) -> Tensor:
    """Return the activations (L, T, N) in the prompt minus those in the counterfactual prompt."""
    return relevance.activation(site) - relevance.neurons.counterfactual[site]


def node_values(relevance: Relevance, token_nodes: Sequence[TokenNode]) -> Tensor:
    """Return the value of each node and of the answer, (2, K + 1), in the prompt and in the counterfactual prompt."""
    assert relevance.counterfactual is not None
    (number_c,) = relevance.counterfactual.numbers
    number_x, rows = relevance.conservation().target + number_c, []
    for activation, answer in ((relevance.neurons.activation, number_x), (relevance.neurons.counterfactual, number_c)):
        values = [
            activation[probe.site][probe.layer, probe.position, probe.columns] @ probe.direction
            for probe in probes(relevance, token_nodes)
        ]
        rows.append(torch.stack([*values, relevance.tokens.new_tensor(answer)]))
    return torch.stack(rows)


def answer_node(relevance: Relevance) -> AnswerNode:
    """Return the number explained as the last target."""
    contrast = relevance.contrast.text if relevance.contrast else None
    return AnswerNode(relevance.predicted_at, relevance.target_text, contrast)


def pair_of(relevance: Relevance) -> Objective:
    """Return both prompts as one objective of two rows."""
    assert relevance.counterfactual is not None
    return relevance.counterfactual.pairs[0]
