"""`circuit`: the nodes that make the difference between two prompts, and the direct edges between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.circuits import nodes as choosing
from icebear.concepts.circuits.checks import EDGE_COUNTS, enough_edges
from icebear.concepts.circuits.circuit_records import Node
from icebear.concepts.circuits.edges import direct, inputs_of
from icebear.concepts.circuits.graph import Graph
from icebear.concepts.circuits.measured_edges import EdgeMeasurement
from icebear.concepts.circuits.stages_set import stages_set, whole_tokens
from icebear.concepts.methods.difference_rules import DIFFERENCE, Difference
from icebear.concepts.nodes.controls import most_relevant
from icebear.concepts.passes.prefix import after_common_beginning
from icebear.concepts.passes.run import TokenNode
from icebear.concepts.passes.sites import neuron_site
from icebear.concepts.results.ranking import Ranking
from icebear.concepts.results.result import Relevance
from icebear.concepts.stages.stage_records import WholePart
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.models.objective import Token
from icebear.models.text.answer import Span
from icebear.models.text.prompts import PromptLike
from icebear.steps import OnProgress, counting, unwatched
from icebear.values import check_int, typed

DEFAULT_EDGES = EDGE_COUNTS[-1]
"""The number of edges if `nodes` is given: of the numbers tried, the one with which the edges of 60 neurons exceed
random edges most (docs/circuits.md)."""
DEFAULT_NODES = {True: 15, False: 60}
"""Whether heads are nodes -> the number of nodes where no set of the last token suffices."""


@typed
def circuit(
    model: Model,
    prompt: PromptLike,
    target: Token | None = None,
    contrast: Token | None = None,
    *,
    counterfactual: PromptLike,
    span: Span | None = None,
    position: int | Sequence[int] | None = None,
    nodes: int | None = None,
    heads: bool = True,
    edges: int | None = None,
    on_progress: OnProgress = unwatched,
) -> Graph:
    """Find the circuit of a prediction: the heads and neurons that make the difference between two prompts, and their
    edges.

    Edges are direct, through no other head or neuron but those of whole parts (`Graph.whole_parts`), which are
    recomputed. An edge has an effect (measured: the source alone takes its counterfactual value), an estimate of it
    (gradient x difference) and a contribution (by difference rules, so that the contributions to a target sum to its
    difference).

    Parameters
    ----------
    model
        A model of any family with neurons.
    prompt, target, contrast, counterfactual, span, position
        As of `attribute`; the counterfactual prompt has as many tokens as the prompt.
    nodes
        The number of nodes: the most relevant (neuron, token) pairs by difference rules (largest positive relevance,
        without sinks). Default: the heads and neurons of the last token that suffice, with their whole parts
        (`stages`); where there is no such set, 15 nodes, without heads 60.
    heads
        Whether attention heads are nodes too, except those of attention to an encoder.
    edges
        The number of edges: the most influential ones between tokens, nodes and the answer (`Graph.influence`).
        Default: of 1, 2, 4, 8, 16, 32, 64 and 100 the least that recovers 80 % of what all edges recover, or none if
        random edges recover as much (`Graph.edge_check`); with a number of nodes, and for images, 100.
    on_progress
        Called with the number of finished steps and of all: targets of backward passes, and measured sources.

    Returns
    -------
    Graph
        Its nodes, edges and groups, with methods that check them.

    Raises
    ------
    InputError
        If an argument is out of range, or the prompts cannot be compared token by token.

    References
    ----------
    Marks et al. 2025, "Sparse Feature Circuits" (effects); circuit-tracer (influence and pruning); the contributions
    are those of `icebear.lrp.differences`.
    """
    if nodes is not None:
        check_int(nodes, "The number of nodes", 1, choosing.MOST)
    if edges is not None:
        check_int(edges, "The number of edges")
    heads = heads and "attn" in model.sites
    sites = tuple(map(neuron_site, choosing.node_sites(model, heads)))
    arguments: dict[str, Any] = {"counterfactual": counterfactual, "span": span, "position": position, "sites": sites}
    relevance = attribute(model, prompt, target, contrast, **arguments)
    check_comparable(relevance)
    if relevance.prompt.image_positions:
        raise InputError("Circuits explain texts, or images alone; leave the image out of the prompt.")
    scores = choosing.scored(model, relevance, heads)
    known = stages_set(model, relevance) if heads and nodes is None else None
    whole_parts: tuple[WholePart, ...] = ()
    if known:
        rows, whole_parts = known
        chosen = choosing.mask_of(model, scores.shape, [(row.neuron, row.position) for row in rows])
    else:
        free = sorted(Ranking(position="all").positions(relevance.prompt))  # without sinks and template
        chosen = most_relevant(scores, nodes or DEFAULT_NODES[heads], free)
    if not chosen.any():
        raise InputError(
            "No node contributes to the difference between the prompts; exchange target and contrast, or give another "
            "counterfactual."
        )
    options = {"nodes": nodes, "heads": heads, "edges": edges}
    graph = graph_of(model, relevance, scores, chosen, heads, edges or DEFAULT_EDGES, whole_parts, on_progress)
    graph = replace(graph, made_with={**graph.made_with, "options": options})
    if edges is not None or nodes is not None or relevance.image:  # the check exchanges tokens
        return graph
    count, check = enough_edges(graph)
    return replace(graph, edge_count=count, edge_check=check)


def graph_of(
    model: Model,
    relevance: Relevance,
    scores: Tensor,
    chosen: Tensor,
    heads: bool,
    edges: int = DEFAULT_EDGES,
    whole_parts: tuple[WholePart, ...] = (),
    on_progress: OnProgress = unwatched,
) -> Graph:
    """Return the circuit of the nodes of a mask (L, T, W), with their scores (L, T, W)."""
    token_nodes = choosing.token_nodes(model, chosen)
    values = choosing.node_values(relevance, token_nodes)
    nodes = _nodes(model, relevance, token_nodes, scores, values)
    measurement = EdgeMeasurement(model, relevance, [*nodes, choosing.answer_node(relevance)], whole_parts)
    on_steps = counting(on_progress, 2 * (len(nodes) + 1) + measurement.row_count)
    estimate, contribution = _edges(model, relevance, token_nodes, whole_parts, on_steps, (None, DIFFERENCE))
    return Graph(
        model,
        relevance,
        nodes,
        *measurement.effects(on_steps),
        estimate,
        contribution,
        values,
        edges,
        heads,
        whole_parts,
        made_with=model.made_with,
    )


def check_comparable(relevance: Relevance) -> None:
    """Raise `InputError` for a relevance that has no circuit."""
    if isinstance(relevance, list):
        raise InputError("A circuit is of one prompt and one counterfactual; call circuit for each of them.")
    other = relevance.counterfactual
    if other is None or len(other.prompts) != 1:
        raise InputError("A circuit explains the difference between two prompts; give one counterfactual prompt.")
    if relevance.contrast_phrase:
        raise InputError("A circuit cannot use a phrase as the contrast; give one token, or no contrast.")
    counts = len(relevance.tokens), len(other.prompts[0])
    if other.at != "both":
        raise InputError(
            f"A circuit compares token by token, but the prompt has {counts[0]} tokens and the counterfactual "
            f"{counts[1]}; give a counterfactual of {counts[0]} tokens."
        )
    if not relevance.conservation().target:
        raise InputError(
            "The explained number is the same in both prompts, so there is nothing to explain; give another "
            "counterfactual."
        )


def _edges(
    model: Model,
    relevance: Relevance,
    token_nodes: Sequence[TokenNode],
    whole_parts: Sequence[WholePart],
    on_targets: Callable[[int], None],
    methods: Sequence[Difference | None],
) -> list[Tensor]:
    """Return the edges (K + 1, S) by each method: contributions by difference rules, estimated effects by None."""
    count = len(relevance.tokens)
    pair, start = after_common_beginning(model, choosing.pair_of(relevance), min(token for _, token in token_nodes))
    probes = [replace(probe, position=probe.position - start) for probe in choosing.probes(relevance, token_nodes)]
    sources = [(neuron, token - start) for neuron, token in token_nodes]
    difference = {site: choosing.activation_difference(relevance, site)[:, start:] for site in relevance.sites}
    input_differences = [x[0] - x[1] for x in inputs_of(model, pair)]
    recomputed = {site: mask[start:] for site, mask in whole_tokens(whole_parts, count).items()}

    def edges(method: Difference | None) -> Tensor:
        targets = (*probes, None)
        entries = direct(model, pair, targets, sources, input_differences, difference, on_targets, recomputed, method)
        tokens, nodes, remainders = entries.split([count - start, len(token_nodes), model.layers * (count - start)], 1)
        rows = pad(remainders.unflatten(1, (model.layers, -1)), (start, 0)).flatten(1)
        return torch.cat((pad(tokens, (start, 0)), nodes, rows), 1)  # nothing comes from the common beginning

    return list(map(edges, methods))


def contribution_shares(
    model: Model, relevance: Relevance, token_nodes: Sequence[TokenNode], whole_parts: Sequence[WholePart] = ()
) -> Tensor:
    """Return (K + 1, T + K) the share of the difference of each of K nodes, and of the answer, that each token and node
    contributes through no other neuron but those of whole parts, by difference rules."""
    check_comparable(relevance)
    values = choosing.node_values(relevance, token_nodes)
    [contribution] = _edges(model, relevance, token_nodes, whole_parts, lambda targets: None, [DIFFERENCE])
    difference = (values[0] - values[1])[:, None]
    shares = contribution[:, : len(relevance.tokens) + len(token_nodes)] / difference
    return shares.where(difference != 0, 0.0)


def _nodes(
    model: Model, relevance: Relevance, token_nodes: Sequence[TokenNode], scores: Tensor, values: Tensor
) -> tuple[Node, ...]:
    """Return the nodes, with the words that each raises and lowers."""
    words = choosing.moved_words(model, relevance, [[token_node] for token_node in token_nodes])
    nodes = []
    for (neuron, token), (x, c), moved in zip(token_nodes, values.T[:-1].tolist(), words, strict=True):
        score = scores[neuron.layer, token, choosing.column(model, neuron)].item()
        nodes.append(Node(neuron, token, score, x, c, *moved))
    return tuple(nodes)
