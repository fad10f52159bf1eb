"""Groups: nodes that are fed by the same tokens, move the same things and write the same words."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import normalize

from icebear.concepts import vocabulary
from icebear.concepts.circuits.nodes import change
from icebear.concepts.circuits.records import Group, Node
from icebear.extras import need
from icebear.values import real

if TYPE_CHECKING:
    from icebear.concepts.circuits.graph import Graph
    from icebear.db.store import Store

APART = 0.6
"""Mean cosine distance at which groups are not joined any more."""


def grouped(graph: Graph, store: Store | None = None, apart: float = APART) -> tuple[Group, ...]:
    """All nodes of a graph in groups, those of the largest score first.

    Agglomerative clustering (complete linkage) by the mean of cosine similarities of what each node is fed by, what it
    moves, what its difference writes and, with a store, which sentences it is most active in. apart: no group has two
    nodes that are further from each other.
    """
    real(apart, "The distance of groups", 0)
    if len(graph.nodes) < 2:
        return tuple(Group(_name(graph, [node]), (node,)) for node in graph.nodes)
    need("circuits")
    from sklearn.cluster import AgglomerativeClustering

    views = [fed(graph), moved(graph), written(graph), *([] if store is None else [lit(graph, store)])]
    alike = torch.stack([normalize(view, dim=-1) @ normalize(view, dim=-1).T for view in views]).mean(0)
    distances = (1 - alike).clamp(min=0).fill_diagonal_(0)
    clustering = AgglomerativeClustering(None, metric="precomputed", linkage="complete", distance_threshold=apart)
    labels = clustering.fit(distances.numpy()).labels_.tolist()
    members: dict[int, list[Node]] = {}
    for label, node in zip(labels, graph.nodes, strict=True):
        members.setdefault(label, []).append(node)
    found = [Group(_name(graph, nodes), tuple(nodes)) for nodes in members.values()]
    return tuple(sorted(found, key=lambda group: -abs(group.score)))


def fed(graph: Graph) -> Tensor:
    """(K, T) the share of each node's difference that is from each token: directly, from what is not shown at that
    token, and through other nodes."""
    first, count = len(graph.tokens), len(graph.nodes)
    shares = (graph.contribution / graph.difference.masked_fill(graph.difference == 0, 1)[:, None])[:count]
    rest = shares[:, first + count :].unflatten(-1, (-1, first)).sum(1)  # (K, T), of all layers
    between = shares[:, first : first + count]
    return torch.linalg.solve(torch.eye(count, dtype=shares.dtype) - between, shares[:, :first] + rest)


def moved(graph: Graph) -> Tensor:
    """(K, K + 1) each node's effects on the answer: by way of each other node, so much as that one's score is for its
    difference, and directly."""
    first, count = len(graph.tokens), len(graph.nodes)
    own = graph.difference[:count]
    weights = own.new_tensor([node.score for node in graph.nodes]) / own.masked_fill(own == 0, 1)
    weights = torch.cat((weights, own.new_ones(1)))
    return (graph.effect[:, first : first + count] * weights[:, None]).T


def written(graph: Graph) -> Tensor:
    """(K, D) what each node's difference writes to the residual stream."""
    moves = change(graph.relevances[0], "attn") if graph.heads else torch.empty(0)

    def row(node: Node) -> Tensor:
        if node.neuron.site != "head":
            return vocabulary.w2_row(graph.model, node.neuron).cpu() * (node.activation - node.counterfactual)
        dim, layer = graph.model.head_dim, node.neuron.layer
        part = slice(node.neuron.index * dim, (node.neuron.index + 1) * dim)
        rows = vocabulary.written(graph.model, "attn", layer, part)
        assert rows is not None
        return moves[layer, node.position, part].to(rows.dtype) @ rows.cpu()

    return torch.stack([row(node).to(graph.difference) for node in graph.nodes])


def lit(graph: Graph, store: Store) -> Tensor:
    """(K, sentences) whether each is among a node's examples in the store."""
    kept = [
        {example.sentence.id for example in store.examples(node.neuron, polarity="+" if node.activation > 0 else "-")}
        if node.neuron.site != "head"
        else set()
        for node in graph.nodes
    ]
    known = sorted(set().union(*kept))
    return graph.difference.new_tensor([[float(sentence in some) for sentence in known] or [0.0] for some in kept])


def _name(graph: Graph, nodes: list[Node]) -> str:
    """Words that at least half of them write; else their tokens and layers."""
    each = [dict.fromkeys(word.strip().lower() for word in node.words) for node in nodes]
    counts = Counter(word for words in each for word in words if word)
    shared = [
        word for word, count in counts.most_common(3) if count * 2 >= len(nodes) and (count > 1 or len(nodes) == 1)
    ]
    if shared:
        return ", ".join(shared)
    tokens = dict.fromkeys(graph.tokens[node.position].text.strip() for node in nodes)
    layers = sorted({node.neuron.layer for node in nodes})
    span = f"L{layers[0]}" if layers[0] == layers[-1] else f"L{layers[0]}-{layers[-1]}"
    return f"{', '.join(map(repr, list(tokens)[:3]))} {span}"
