"""Groups of similar nodes: the same tokens act on them, they act on the same nodes, and they write alike."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from icebear.concepts.circuits.circuit_records import Group, Node
from icebear.concepts.circuits.nodes import activation_difference, moved_words
from icebear.concepts.circuits.wiring import Wiring
from icebear.concepts.passes.sites import neuron_columns
from icebear.concepts.results.effect_words import effect_text
from icebear.concepts.statistics import clusters
from icebear.concepts.vocabulary import weight_rows

DISTANCE = 0.6
"""The largest mean cosine distance inside a group."""
NAMED = 2
"""Words of each kind in the name of a group."""


def grouped(graph: Wiring) -> tuple[Group, ...]:
    """Return all nodes of a graph in groups, the groups with the largest score first.

    Agglomerative clustering (complete linkage) by the mean of cosine similarities of the nodes' input, effect and
    output profiles. No two nodes of a group have a larger distance than `DISTANCE`.
    """
    labels = [0] * len(graph.nodes)
    if len(graph.nodes) > 1:
        profiles = [input_profiles(graph), effect_profiles(graph), output_profiles(graph)]
        units = [normalize(profile, dim=-1) for profile in profiles]
        similarities = torch.stack([unit @ unit.T for unit in units]).mean(0)
        labels = clusters(similarities.numpy(), "complete", DISTANCE)
    members: dict[int, list[Node]] = defaultdict(list)
    for label, node in zip(labels, graph.nodes, strict=True):
        members[label].append(node)
    token_nodes = [[(node.neuron, node.position) for node in nodes] for nodes in members.values()]
    words = moved_words(graph.model, graph.relevance, token_nodes)
    groups = [
        Group(_name(graph, nodes, *moved), tuple(nodes), *moved)
        for nodes, moved in zip(members.values(), words, strict=True)
    ]
    return tuple(_distinct(sorted(groups, key=lambda group: -abs(group.score))))


def input_profiles(graph: Wiring) -> Tensor:
    """Return the share (K, T) of each node's difference that comes from each token: directly, through the remainders
    at that token, and through other nodes."""
    start, count = len(graph.tokens), len(graph.nodes)
    fractions = (graph.contribution / graph.difference.masked_fill(graph.difference == 0, 1)[:, None])[:count]
    remainders = fractions[:, start + count :].unflatten(-1, (-1, start)).sum(1)  # (K, T), of all layers
    between = fractions[:, start : start + count]
    return torch.linalg.solve(torch.eye(count, dtype=fractions.dtype) - between, fractions[:, :start] + remainders)


def effect_profiles(graph: Wiring) -> Tensor:
    """Return the effects (K, K + 1) of each node on the answer: through each other node, weighted by the score of that
    node per difference, and directly."""
    start, count = len(graph.tokens), len(graph.nodes)
    difference = graph.difference[:count]
    weights = difference.new_tensor([node.score for node in graph.nodes]) / difference.masked_fill(difference == 0, 1)
    weights = torch.cat((weights, difference.new_ones(1)))
    return (graph.effect[:, start : start + count] * weights[:, None]).T


def output_profiles(graph: Wiring) -> Tensor:
    """Return what the difference of each node adds to the residual stream, (K, D)."""
    rows = []
    for node in graph.nodes:
        if node.neuron.site == "head":
            layer, part = node.neuron.layer, neuron_columns(node.neuron, graph.model.head_dim)
            w_out = weight_rows.direct_rows(graph.model, "attn", layer, part)
            assert w_out is not None
            differences = activation_difference(graph.relevance, "attn")[layer, node.position, part]
            rows.append(differences.to(w_out.dtype) @ w_out.cpu())
        else:
            difference = node.activation - node.counterfactual
            rows.append(weight_rows.direct_row(graph.model, node.neuron).cpu() * difference)
    return torch.stack(rows).to(graph.difference)


def _name(graph: Wiring, nodes: list[Node], raises: Sequence[str], lowers: Sequence[str]) -> str:
    """Return the words that the nodes raise and lower together, or, if there are none, their tokens and layers."""
    if raises or lowers:
        return effect_text(raises[:NAMED], lowers[:NAMED])
    tokens = dict.fromkeys(graph.tokens[node.position].text.strip() for node in nodes)
    layers = sorted({node.neuron.layer for node in nodes})
    span = f"L{layers[0]}" if layers[0] == layers[-1] else f"L{layers[0]}-{layers[-1]}"
    return f"{', '.join(map(repr, list(tokens)[:3]))} {span}"


def _distinct(groups: Iterable[Group]) -> Iterator[Group]:
    """Number the groups that have the name of an earlier one, because a group is asked for by its name."""
    seen: Counter[str] = Counter()
    for group in groups:
        seen[group.name] += 1
        again = seen[group.name]
        yield replace(group, name=f"{group.name} ({again})") if again > 1 else group
