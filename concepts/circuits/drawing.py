"""A graph as a picture: tokens from left to right, layers from bottom to top.

This file places the boxes; the template draws them and escapes all text; `graph.js` highlights what is pointed at. The
same SVG is in pages, notebooks, the app and papers.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from icebear.concepts.circuits.circuit_records import (
    AnswerNode,
    CircuitToken,
    Edge,
    EdgeFaithfulness,
    EdgeSource,
    EdgeTarget,
    Node,
)
from icebear.concepts.results.effect_words import IN_PROMPT, effect_parts
from icebear.concepts.stages.stage_sentences import whole_texts
from icebear.render import NEGATIVE, POSITIVE, hexadecimal, render, visible

if TYPE_CHECKING:
    from icebear.concepts.circuits.wiring import Wiring

EDGES_AT_FIRST = 60
"""The edges that an interactive picture shows at first."""
STRONGEST = 5
"""Inputs and outputs of a node in the panel next to the picture."""
WIDE = 70
"""The width of a node's box, in pixels like all sizes."""
HIGH = 40
"""The height of a node's box."""
GAP = 5
"""The gap between boxes."""
ROW = 24
"""The gap between layers."""
PER_ROW = 5
"""The number of nodes of a layer and token in a row."""
LEFT = 36
"""The space for the numbers of the layers."""
TOP = 34
"""The space above the answer, for the caption."""
GROUP_WIDE = 216
"""The width of a group's box."""
GROUP_HIGH = 60
"""The height of a group's box."""
UNDER = "var(--st-background-color, Canvas)"
"""The background of the page, under boxes, so that no edge is seen through them."""
COLORS = "#4e79a7 #f28e2b #59a14f #b07aa1 #9c755f #76b7b2 #edc948 #ff9da7 #e15759 #86bcb6".split()
"""Colors of the first groups (Tableau 10); further groups are grey."""
GREY = "#999999"


@dataclass(frozen=True)
class Box:
    x: float
    y: float
    wide: float = WIDE
    high: float = HIGH

    @property
    def middle(self) -> float:
        return self.x + self.wide / 2


@dataclass(frozen=True)
class Layout:
    boxes: dict[str, Box]
    """By the id of a token, a node or the answer."""
    layers: dict[int, float]
    """Layer -> the y of its name; only layers that have nodes."""
    wide: float
    high: float


def layout(graph: Wiring) -> Layout:
    """Give each layer that has nodes a row, and each token a column as wide as its fullest row."""
    cells: dict[tuple[int, int], list[Node]] = defaultdict(list)
    for node in graph.nodes:
        cells[node.neuron.layer, node.position].append(node)
    columns, x = [], float(LEFT)
    for token in graph.tokens:
        most = max((len(nodes) for (_, position), nodes in cells.items() if position == token.position), default=1)
        wide = min(most, PER_ROW) * (WIDE + GAP)
        columns.append((x, x + wide))
        x += wide + ROW / 2
    start, end = columns[graph.answer.position]
    boxes = {graph.answer.id: Box(start, TOP, max(end - start, 3 * WIDE) - GAP)}
    layers, y = {}, float(TOP + HIGH + ROW)
    for layer in sorted({node.neuron.layer for node in graph.nodes}, reverse=True):
        rows = max(-(-len(nodes) // PER_ROW) for (at, _), nodes in cells.items() if at == layer)
        layers[layer] = y + HIGH * 0.7
        for (at, position), nodes in cells.items():
            for index, node in enumerate(nodes if at == layer else ()):
                down, right = divmod(index, PER_ROW)
                boxes[node.id] = Box(columns[position][0] + right * (WIDE + GAP), y + down * (HIGH + GAP))
        y += rows * (HIGH + GAP) + ROW / 2
    y += ROW / 2
    for token, (start, end) in zip(graph.tokens, columns, strict=True):
        boxes[token.id] = Box(start, y, end - start - GAP)
    return Layout(boxes, layers, x, y + HIGH + ROW)


def svg(graph: Wiring) -> Markup:
    """Return the picture alone, in the colors of its page."""
    picture, parts = layout(graph), direct_shares(graph)
    answer = picture.boxes[graph.answer.id]
    wide = max(picture.wide, LEFT + 2 * (GROUP_WIDE + GAP), answer.x + answer.wide + GAP)
    colors = [*COLORS, *[GREY] * len(graph.groups)]
    return render(
        "icebear.concepts/circuit.svg",
        graph=graph,
        layout=picture,
        edges=graph.edges,
        direct=parts,
        caption=caption(parts),
        group_colors={
            node.id: color for group, color in zip(graph.groups, colors, strict=False) for node in group.nodes
        },
        ranked=[node.id for node in sorted(graph.nodes, key=lambda node: -abs(node.score))],
        wide=wide,
        group_lines=[effect_parts(group.raises[:3], group.lowers[:3]) or [group.name] for group in graph.groups],
        per_row=int((wide - LEFT) // (GROUP_WIDE + GAP)),
        size={"left": LEFT, "high": HIGH, "gap": GAP, "group_wide": GROUP_WIDE, "group_high": GROUP_HIGH},
        colors={"under": UNDER, "grey": GREY, "positive": hexadecimal(POSITIVE), "negative": hexadecimal(NEGATIVE)},
    )


def direct_shares(graph: Wiring) -> dict[str, float]:
    """Return the direct contributions to the answer as shares of its difference; they sum to 1."""
    token_count, count = len(graph.tokens), len(graph.nodes)
    parts = graph.contribution[-1] / graph.difference[-1]
    sizes = [token_count, count, len(parts) - token_count - count]
    tokens, nodes, outside = (part.sum().item() for part in parts.split(sizes))
    return {"nodes": nodes, "tokens": tokens, "outside the circuit": outside}


def caption(parts: dict[str, float]) -> str:
    """Return `direct_shares` in words, and say so if the circuit has little of the answer."""
    total = sum(map(abs, parts.values()))
    more = ": most of this answer is elsewhere" if abs(parts["outside the circuit"]) > 0.8 * total else ""
    shares = ", ".join(f"{name} {share:.0%}" for name, share in parts.items())
    return f"directly from {shares}{more}"


def fragment(graph: Wiring, actions: Mapping[str, str] | None = None) -> Markup:
    """Return the interactive picture for a notebook or a page: no frames, nothing fetched.

    actions: name -> label of the buttons in the panel of a node or group; a click dispatches the event "act".
    """
    script = files("icebear.concepts.circuits").joinpath("graph.js").read_text(encoding="utf-8")
    data = json.dumps({"cards": cards(graph), "actions": dict(actions or {})})
    return render(
        "icebear.concepts/circuit.html",
        graph=graph,
        first=EDGES_AT_FIRST,
        nodes=nodes_text(graph),
        check=check_text(graph),
        control=control_text(graph.edges),
        edges=graph.edges,
        picture=svg(graph),
        data=Markup(data.replace("<", "\\u003c")),
        script=Markup(script),
        colors={"positive": hexadecimal(POSITIVE), "negative": hexadecimal(NEGATIVE)},
    )


def summary(graph: Wiring) -> str:
    """Return what is drawn, the direct contributions to the answer, what the edges recover, and the largest group."""
    shares = direct_shares(graph)
    sentences = [
        f"{graph.answer}: {graph.meaning}. The difference is {graph.difference[-1].item():.2f} logits.",
        nodes_text(graph),
        f"Of the difference, {shares['nodes']:.0%} comes directly from nodes, {shares['tokens']:.0%} from tokens and "
        f"{shares['outside the circuit']:.0%} from outside the circuit (contributions by difference rules).",
        check_text(graph),
        control_text(graph.edges),
        f"The largest group: {visible(graph.groups[0].name)}.",
    ]
    return " ".join(filter(None, sentences))


def nodes_text(graph: Wiring) -> str:
    """Return how many nodes there are, and what is recomputed beside them."""
    heads = sum(node.neuron.site == "head" for node in graph.nodes)
    neurons = len(graph.nodes) - heads
    counted = [
        f"{count} {name}{'s' * (count != 1)}" for count, name in ((heads, "head"), (neurons, "FFN neuron")) if count
    ]
    if graph.whole_parts:
        return f"Nodes: the {' and '.join(counted)} of the stages, with all of {whole_text(graph)} recomputed."
    return f"Nodes: {' and '.join(counted)} with the largest relevance."


def whole_text(graph: Wiring) -> str:
    """Name the whole parts; empty without any."""
    return " and of ".join(whole_texts([token.text for token in graph.tokens], graph.whole_parts))


def check_text(graph: Wiring) -> str:
    """Return what the edges recover, if their number was chosen by it."""
    return edges_text(graph.edge_check, bool(graph.edges)) if graph.edge_check else ""


def control_text(edges: Sequence[Edge]) -> str:
    """Return how many edges have a measured effect that is no larger than those of random sources."""
    controlled = [edge for edge in edges if edge.random_effect is not None]
    if not controlled:
        return "No edge has a control: fewer than ten random sources affect its target." if edges else ""
    alike = sum(edge.is_like_random for edge in controlled)
    left = f"; {len(edges) - len(controlled)} have no control" if len(edges) > len(controlled) else ""
    verb = "is" if alike == 1 else "are"
    return f"Measured alone, {alike} of {len(controlled)} edges {verb} no larger than random ones{left}."


def edges_text(check: EdgeFaithfulness, are_shown: bool) -> str:
    """Return what the edges recover, with the control."""
    if check.edges == check.total and are_shown:
        return f"All edges between the nodes ({check.total}) recover {check.all_edges:z.0%} of the difference."
    edges, random = f"The {check.edges} strongest edges recover", "as many random ones"
    if check.edges == 1:
        edges, random = "The strongest edge recovers", "a random one"
    shares = (
        f"{edges} {check.sufficiency:z.0%} of the difference, {random} {check.random_sufficiency:z.0%}, all "
        f"{check.total} between the nodes {check.all_edges:z.0%}"
    )
    return f"{shares}." if are_shown else f"{shares}, so none is shown."


def cards(graph: Wiring) -> dict[str, dict[str, Any]]:
    """Return what the panel shows of each token, node, answer and group."""
    outgoing: dict[str, list[Edge]] = defaultdict(list)
    for edge in graph.edges:
        outgoing[edge.source.id].append(edge)
    everything: tuple[CircuitToken | Node | AnswerNode, ...] = (*graph.shown, graph.answer)
    result = {part.id: _card(graph, part, outgoing[part.id]) for part in everything}
    for number, group in enumerate(graph.groups):
        rows = [(node.id, name_of(graph, node), f"{node.score:+.2f}") for node in group.nodes]
        result[f"group {number}"] = {
            "title": f"Group {number + 1}",
            "lines": [group.name] * (not group.raises and not group.lowers)
            + [f"score {group.score:+.2f}", f"{IN_PROMPT}, all together:"],
            "raises": group.raises,
            "lowers": group.lowers,
            "lists": {"Nodes, with their scores": rows},
            "acts": True,
        }
    return result


def _card(graph: Wiring, part: CircuitToken | Node | AnswerNode, outgoing: Sequence[Edge]) -> dict[str, Any]:
    lines: list[str] = []
    lists: dict[str, list[tuple[str | None, str, str]]] = {}
    if isinstance(part, Node):
        token = graph.tokens[part.position]
        lines = [
            f"at {token}",
            f"{part.activation:+.2f} here, {part.counterfactual:+.2f} in the counterfactual",
            f"{'supports' if part.score >= 0 else 'opposes'} the answer: {part.score:+.2f} of "
            f"{graph.difference[-1].item():.2f} logits",
        ]
    if not isinstance(part, CircuitToken):
        edges, outside = graph.sources_of(part, STRONGEST)
        rows = [(edge.source.id, name_of(graph, edge.source), _share(edge)) for edge in edges]
        rest = [] if outside is None else [(None, "outside (contribution)", signed_percent(outside))]
        lists["Strongest inputs (effect)"] = [*rows, *rest]
    if outgoing:
        strongest = sorted(outgoing, key=lambda edge: -abs(edge.effect))[:STRONGEST]
        lists["Strongest outputs (effect)"] = [
            (edge.target.id, name_of(graph, edge.target), _number(edge)) for edge in strongest
        ]
    return {
        "title": name_of(graph, part) if not isinstance(part, Node) else str(part.neuron),
        "lines": [*lines, f"{IN_PROMPT}, alone:"]
        if getattr(part, "raises", ()) or getattr(part, "lowers", ())
        else lines,
        "raises": getattr(part, "raises", ()),
        "lowers": getattr(part, "lowers", ()),
        "lists": lists,
        "acts": isinstance(part, Node),
    }


def _share(edge: Edge) -> str:
    """Return an effect as a share of its target's difference, or with its unit where that hardly differs."""
    return _number(edge) if edge.effect_share is None else signed_percent(edge.effect_share)


def _number(edge: Edge) -> str:
    """Return an effect with its unit."""
    return f"{edge.effect:+.2f} {'logits' if isinstance(edge.target, AnswerNode) else 'activation'}"


def top_sources(graph: Wiring, target: Node | AnswerNode, k: int) -> str:
    """Return the largest effects on a target, and the contribution of all that is outside the circuit, in words."""
    edges, outside = graph.sources_of(target, k)
    effects = ", ".join(f"{edge.source} {_share(edge)}{' (as random)' * edge.is_like_random}" for edge in edges)
    return effects if outside is None else f"{effects}; outside {signed_percent(outside)}"


def signed_percent(share: float) -> str:
    """Return a signed share in whole percent, without a negative zero."""
    return f"{round(100 * share):+d}%"


def name_of(graph: Wiring, part: EdgeSource | EdgeTarget) -> str:
    """Return the name of a part of the picture for readers: a node with its token instead of its position."""
    return f"{part.neuron} at {graph.tokens[part.position].text!r}" if isinstance(part, Node) else str(part)


def on_paper(graph: Wiring) -> str:
    """Return the picture on a white background, for a file."""
    picture = str(svg(graph)).replace("currentColor", "#111111").replace(UNDER, "#ffffff")
    return picture.replace('height="100%" fill="none"', 'height="100%" fill="#ffffff"', 1)
