"""A graph as a file of circuit-tracer and Neuronpedia (their `graph-schema.json`, schema version 1).

Neurons are written as features, what is not shown of a layer and token as its error node, and a link's weight is its
contribution. Those of all sources sum to the target's own difference, those of the links that pruning keeps nearly: so
the sites' replacement and completeness scores say what share is explained by the neurons shown.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from icebear.concepts.circuits.nodes import column
from icebear.concepts.circuits.records import AnswerNode, Node, Rest, Source, Target, Token
from icebear.errors import InputError

if TYPE_CHECKING:
    from icebear.concepts.circuits.graph import Graph


def written(graph: Graph, slug: str = "icebear") -> dict[str, Any]:
    """JSON-ready. slug: the graph's name, of letters, digits, dots, dashes and underscores. Raises `InputError`."""
    if not re.fullmatch(r"[\w.-]+", slug, re.ASCII):
        raise InputError(f"{slug!r} cannot name a graph; use letters, digits, dots, dashes and underscores.")
    first = graph.relevances[0]
    made = graph.made_with
    return {
        "metadata": {
            "slug": slug,
            "scan": re.sub(r"[^\w.-]", "-", graph.model.name, flags=re.ASCII),
            "transcoder_list": [],
            "prompt_tokens": list(first.prompt.strings),
            "prompt": first.prompt.text,
            "node_threshold": 1.0,
            "schema_version": 1,
            "info": {
                "description": graph.meaning,
                "generator": {"name": "icebear", "version": made["versions"]["icebear"]},
            },
            "generation_settings": {"neurons": "ffn", "weights": "contributions by difference rules", **made},
            "pruning_settings": {"node_threshold": 1.0, "edge_threshold": graph.kept},
        },
        "qParams": {
            "pinnedIds": [],
            "supernodes": [[group.name, *(_id(graph, node) for node in group.nodes)] for group in graph.groups],
            "linkType": "both",
            "clickedId": "",
            "sg_pos": "",
        },
        "nodes": _nodes(graph),
        "links": [
            {"source": _id(graph, edge.source), "target": _id(graph, edge.target), "weight": edge.contribution}
            for edge in graph.edges
        ],
    }


def _nodes(graph: Graph) -> list[dict[str, Any]]:
    """Those that an edge has, and all that are shown; with the cumulative share of influence at which each comes in."""
    linked = {edge.source.id for edge in graph.edges}
    weights = dict(zip((source.id for source in graph.sources), graph.influence.sum(0).tolist(), strict=True))
    shown = [source for source in graph.sources if not isinstance(source, Rest) or source.id in linked]
    whole, running, enters = sum(weights.values()) or 1.0, 0.0, {}
    for source in sorted(shown, key=lambda source: -weights[source.id]):
        running += weights[source.id] / whole
        enters[source.id] = running
    return [*({**_node(graph, source), "influence": enters[source.id]} for source in shown), _node(graph, graph.answer)]


def _node(graph: Graph, what: Source | Target) -> dict[str, Any]:
    layer, feature, kind, js = _named(graph, what)
    told: dict[str, Any] = {
        "node_id": _id(graph, what),
        "feature": feature,
        "layer": layer,
        "ctx_idx": what.position,
        "feature_type": kind,
        "jsNodeId": js,
        "clerp": _label(graph, what),
    }
    if isinstance(what, Node):
        told["activation"] = what.activation
    if isinstance(what, AnswerNode):
        told |= {"is_target_logit": True, "token_prob": _probability(graph)}
    return told


def _named(graph: Graph, what: Source | Target) -> tuple[str, int, str, str]:
    """Its layer, feature, type and jsNodeId in the schema."""
    if isinstance(what, Token):
        token = graph.relevances[0].prompt.ids[what.position]
        return "E", what.position, "embedding", f"E_{token}-{what.position}"
    if isinstance(what, Rest):
        return str(what.layer), -1, "mlp reconstruction error", f"{what.layer}_{what.position}-0"
    if isinstance(what, AnswerNode):
        return str(graph.model.layers + 1), _target(graph), "logit", f"L_{_target(graph)}-{what.position}"
    layer, index = what.neuron.layer, column(graph.model, what.neuron)
    pairing = (layer + index) * (layer + index + 1) // 2 + index  # Cantor's, as schema version 1 has it
    return str(layer), pairing, "cross layer transcoder", f"{layer}_{index}-0"


def _id(graph: Graph, what: Source | Target) -> str:
    if isinstance(what, Token):
        return f"E_{graph.relevances[0].prompt.ids[what.position]}_{what.position}"
    if isinstance(what, Rest):
        return f"rest_{what.layer}_{what.position}"  # circuit-tracer's 0_layer_token is also a neuron's of layer 0
    if isinstance(what, AnswerNode):
        return f"{graph.model.layers + 1}_{_target(graph)}_{what.position}"
    return f"{what.neuron.layer}_{column(graph.model, what.neuron)}_{what.position}"


def _target(graph: Graph) -> int:
    target = graph.relevances[0].target
    assert target is not None
    return target.id


def _probability(graph: Graph) -> float:
    target = graph.relevances[0].target
    return (target.probability if target else None) or 0.0


def _label(graph: Graph, what: Source | Target) -> str:
    """Both sites split an output's label at `(p=`."""
    if isinstance(what, AnswerNode):
        return f'Output "{what.text}" (p={_probability(graph):.3f})'
    return ", ".join(what.words) or str(what.neuron) if isinstance(what, Node) else str(what)
