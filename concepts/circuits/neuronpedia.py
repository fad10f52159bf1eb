"""A graph as a file of circuit-tracer and Neuronpedia (their `graph-schema.json`, schema version 1).

Neurons are features, remainders are error nodes, and the weight of a link is its contribution. The contributions of all
sources sum to the difference of the target, so the sites' replacement and completeness scores are the share that the
neurons of the graph explain.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from icebear.concepts.circuits.nodes import column
from icebear.concepts.circuits.records import AnswerNode, Remainder, Source, Target, Token
from icebear.concepts.results.effect_words import effect_parts
from icebear.errors import InputError

if TYPE_CHECKING:
    from icebear.concepts.circuits.graph import Graph


def graph_file(graph: Graph, slug: str) -> dict[str, Any]:
    """See `Graph.to_neuronpedia`."""
    if not re.fullmatch(r"[\w.-]+", slug, re.ASCII):
        raise InputError(f"{slug!r} cannot name a graph; use letters, digits, dots, dashes and underscores.")
    first = graph.relevances[0]
    made = graph.made_with
    nodes = {what.id: _node(graph, what) for what in (*graph.sources, graph.answer)}
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
            "pruning_settings": {"node_threshold": 1.0, "edge_threshold": graph.edge_threshold},
        },
        "qParams": {
            "pinnedIds": [],
            "supernodes": [
                [group.name, *(nodes[node.id]["node_id"] for node in group.nodes)] for group in graph.groups
            ],
            "linkType": "both",
            "clickedId": "",
            "sg_pos": "",
        },
        "nodes": [{**nodes[id], "influence": share} for id, share in _influence(graph)] + [nodes[graph.answer.id]],
        "links": [
            {
                "source": nodes[edge.source.id]["node_id"],
                "target": nodes[edge.target.id]["node_id"],
                "weight": edge.contribution,
            }
            for edge in graph.edges
        ],
    }


def _influence(graph: Graph) -> list[tuple[str, float]]:
    """Return the sources that are shown or have an edge, each with the cumulative influence at which it enters."""
    linked = {edge.source.id for edge in graph.edges}
    weights = dict(zip((source.id for source in graph.sources), graph.influence.sum(0).tolist(), strict=True))
    used = [source.id for source in graph.sources if not isinstance(source, Remainder) or source.id in linked]
    whole, running, enters = sum(weights.values()) or 1.0, 0.0, {}
    for id in sorted(used, key=lambda id: -weights[id]):
        running += weights[id] / whole
        enters[id] = running
    return [(id, enters[id]) for id in used]


def _node(graph: Graph, what: Source | Target) -> dict[str, Any]:
    position, more, label = what.position, {}, str(what)
    if isinstance(what, Token):
        token = graph.relevances[0].prompt.ids[position]
        layer, feature, kind = "E", position, "embedding"
        id, js = f"E_{token}_{position}", f"E_{token}-{position}"
    elif isinstance(what, Remainder):
        layer, feature, kind = str(what.layer), -1, "mlp reconstruction error"
        # circuit-tracer's own 0_layer_token is also a neuron of layer 0.
        id, js = f"remainder_{layer}_{position}", f"{layer}_{position}-0"
    elif isinstance(what, AnswerNode):
        target = graph.relevances[0].target
        assert target is not None
        layer, feature, kind = str(graph.model.layers + 1), target.id, "logit"
        id, js = f"{layer}_{feature}_{position}", f"L_{feature}-{position}"
        more = {"is_target_logit": True, "token_prob": target.probability or 0.0}
        label = f'Output "{what.text}" (p={target.probability or 0.0:.3f})'  # both sites split it at `(p=`
    else:
        index = column(graph.model, what.neuron)
        layer, kind = str(what.neuron.layer), "cross layer transcoder"
        pair = what.neuron.layer + index
        feature = pair * (pair + 1) // 2 + index  # Cantor's pairing, as in schema version 1
        id, js = f"{layer}_{index}_{position}", f"{layer}_{index}-0"
        more, label = (
            {"activation": what.activation},
            "; ".join(effect_parts(what.raises, what.lowers)) or str(what.neuron),
        )
    return {
        "node_id": id,
        "feature": feature,
        "layer": layer,
        "ctx_idx": position,
        "feature_type": kind,
        "jsNodeId": js,
        "clerp": label,
        **more,
    }
