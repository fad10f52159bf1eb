"""A graph as a picture: tokens left to right, layers upwards; the same SVG for page, notebook, app and paper.

Places and curves are computed here; `graph.js` only lights what is pointed at. The template escapes all text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from icebear.concepts.circuits.records import AnswerNode, Edge, Node, Token
from icebear.concepts.render import NEGATIVE, POSITIVE, hexadecimal, page, render, visible
from icebear.extras import need
from icebear.values import real

if TYPE_CHECKING:
    from icebear.concepts.circuits.graph import Graph

DRAWN = 300
"""Edges between tokens, nodes and the answer, the most influential."""
WIDE, HIGH, GAP, ROW = 64, 28, 5, 24
"""Of a node's box, in pixels; between boxes, and between rows of layers."""
IN_A_ROW = 5
"""Nodes of a layer at a token, side by side."""
LEFT, TOP, BAR = 36, 34, 10
"""Where the picture begins, under the bar of shares."""
ELSEWHERE = 0.2
"""Of the answer, by size: where the circuit has less, the picture says that most of it is elsewhere."""
GROUP, GROUPS = 216, 45
"""How wide a group's box is, and how high a row of them."""
UNDER = "var(--st-background-color, Canvas)"
"""The page's own colour, under boxes, so that no edge is seen through them."""
COLORS = "#4e79a7 #f28e2b #59a14f #b07aa1 #9c755f #76b7b2 #edc948 #ff9da7 #e15759 #86bcb6".split()
"""Of groups (Tableau 10); more are grey."""
GREY = "#999999"


@dataclass(frozen=True)
class Box:
    """Where something is drawn."""

    x: float
    y: float
    wide: float = WIDE
    high: float = HIGH

    @property
    def middle(self) -> float:
        return self.x + self.wide / 2


@dataclass(frozen=True)
class Layout:
    """Where everything is drawn."""

    boxes: dict[str, Box]
    """By the id of a token, node or the answer."""
    layers: dict[int, float]
    """Layer -> the height of its name; those that have nodes."""
    wide: float
    high: float


def layout(graph: Graph) -> Layout:
    """Each layer that has nodes gets a row, each token a column as wide as its fullest row."""
    cells: dict[tuple[int, int], list[Node]] = {}
    for node in graph.nodes:
        cells.setdefault((node.neuron.layer, node.position), []).append(node)
    columns, x = [], float(LEFT)
    for token in graph.tokens:
        most = max((len(nodes) for (_, position), nodes in cells.items() if position == token.position), default=0)
        wide = max(1, min(most, IN_A_ROW)) * (WIDE + GAP)
        columns.append((x, x + wide))
        x += wide + ROW / 2
    boxes, layers, y = {}, {}, float(TOP)
    start, end = columns[graph.answer.position]
    boxes[graph.answer.id] = Box(start, y, max(end - start, 3 * WIDE) - GAP)
    y += HIGH + ROW
    for layer in sorted({node.neuron.layer for node in graph.nodes}, reverse=True):
        rows = max(-(-len(nodes) // IN_A_ROW) for (at, _), nodes in cells.items() if at == layer)
        layers[layer] = y + HIGH * 0.7
        for (at, position), nodes in cells.items():
            for place, node in enumerate(nodes if at == layer else ()):
                down, right = divmod(place, IN_A_ROW)
                boxes[node.id] = Box(columns[position][0] + right * (WIDE + GAP), y + down * (HIGH + GAP))
        y += rows * (HIGH + GAP) + ROW / 2
    y += ROW / 2
    for token, (start, end) in zip(graph.tokens, columns, strict=True):
        boxes[token.id] = Box(start, y, end - start - GAP)
    return Layout(boxes, layers, x, y + HIGH + ROW)


def drawn(graph: Graph) -> list[Edge]:
    """The edges of the picture, the most influential first."""
    return graph.shown_edges[:DRAWN]


def colors(graph: Graph) -> dict[str, str]:
    """The colour of each node's group, by the node's id."""
    known = [*COLORS, *[GREY] * len(graph.groups)]
    return {node.id: color for group, color in zip(graph.groups, known, strict=False) for node in group.nodes}


def svg(graph: Graph) -> Markup:
    """The picture by itself, in a page's colours."""
    places, of_group, shown = layout(graph), colors(graph), drawn(graph)
    most = max((edge.influence for edge in shown), default=1.0)
    order = sorted(graph.nodes, key=lambda node: -abs(node.score))
    ranks = {node.id: rank for rank, node in enumerate(order)}
    answer = places.boxes[graph.answer.id]
    wide = max(places.wide, LEFT + 2 * (GROUP + GAP), answer.x + answer.wide + GAP)
    beside = int((wide - LEFT) // (GROUP + GAP))
    boxes = [
        _labelled(graph.answer.id, answer, (str(graph.answer),)),
        *(
            _labelled(node.id, places.boxes[node.id], _lines(node), node.score, of_group[node.id], ranks[node.id])
            for node in graph.nodes
        ),
        *(_labelled(token.id, places.boxes[token.id], _both(token)) for token in graph.tokens),
    ]
    groups = [
        {
            "name": _cut(group.name, 36),
            "full_name": group.name,
            "color": of_group[group.nodes[0].id],
            "count": f"{len(group.nodes)} node{'s' * (len(group.nodes) != 1)}, score {group.score:+.2f}",
            "x": LEFT + number % beside * (GROUP + GAP),
            "y": places.high + number // beside * GROUPS,
        }
        for number, group in enumerate(graph.groups)
    ]
    parts = shares(graph)
    return render(
        "icebear.concepts/circuit.svg",
        name=repr(graph),
        wide=wide,
        high=places.high + -(-len(graph.groups) // beside) * GROUPS,
        layers=places.layers,
        bar=_bar(parts, wide - LEFT - GAP),
        bar_caption=bar_caption(parts),
        curves=[_curve(edge, places, rank, edge.influence / most) for rank, edge in enumerate(shown)],
        boxes=boxes,
        groups=groups,
        size={"left": LEFT, "bar": BAR, "group": GROUP, "high": HIGH, "under": UNDER},
    )


def shares(graph: Graph) -> dict[str, float]:
    """What gives the answer its difference directly; sums to 1."""
    first, count = len(graph.tokens), len(graph.nodes)
    parts = graph.contribution[-1] / graph.difference[-1]
    sizes = [first, count, len(parts) - first - count]
    tokens, nodes, outside = (part.sum().item() for part in parts.split(sizes))
    return {"nodes": nodes, "tokens": tokens, "outside the circuit": outside}


def bar_caption(parts: dict[str, float]) -> str:
    """The shares in words, and whether the circuit has next to nothing of the answer."""
    whole = sum(map(abs, parts.values()))
    more = ": most of this answer is elsewhere" if abs(parts["outside the circuit"]) > (1 - ELSEWHERE) * whole else ""
    return ", ".join(f"{name} {share:.0%}" for name, share in parts.items()) + more


def _bar(parts: dict[str, float], wide: float) -> list[dict[str, Any]]:
    """The shares above the picture, by size."""
    whole = sum(map(abs, parts.values()))
    widths = [wide * abs(share) / whole for share in parts.values()]
    starts = accumulate(widths, initial=float(LEFT))
    rows = zip(parts, starts, widths, (0.8, 0.5, 0.15), strict=False)
    return [{"name": name, "x": x, "wide": part, "opacity": opacity} for name, x, part, opacity in rows]


def _curve(edge: Edge, places: Layout, rank: int, share: float) -> dict[str, Any]:
    start, end = places.boxes[edge.source.id], places.boxes[edge.target.id]
    low, high = start.y, end.y + end.high
    bend = max(12.0, (low - high) / 2)
    points = (start.middle, low, start.middle, low - bend, end.middle, high + bend, end.middle, high)
    return {
        "source": edge.source.id,
        "target": edge.target.id,
        "rank": rank,
        "path": "M{:.0f} {:.0f}C{:.0f} {:.0f} {:.0f} {:.0f} {:.0f} {:.0f}".format(*points),
        "color": signed(edge.share),
        "width": 0.6 + 3.4 * share,
        "opacity": 0.12 + 0.5 * share**0.5,
    }


def signed(number: float) -> str:
    """The colour of its sign."""
    return hexadecimal(POSITIVE if number >= 0 else NEGATIVE)


def _labelled(
    id: str, box: Box, lines: Sequence[str], score: float = 0.0, color: str = GREY, rank: int = 0
) -> dict[str, Any]:
    """A box with a text; the strip on its left is the group's colour, its own the sign of the score."""
    first, last = box.y + box.high / 2 + 3.5 - 6 * (len(lines) - 1), len(lines) - 1
    return {
        "id": id,
        "rank": rank,
        "label": " ".join(lines),
        "box": box,
        "fill": signed(score) if score else "#888888",
        "opacity": 0.25 if score else 0.12,
        "strip": color,
        "lines": [
            (first + 12 * number, 0.65 if number < last else 1, _cut(line, int((box.wide - 9) / 6)))
            for number, line in enumerate(lines)
        ],
    }


def _cut(text: str, fits: int) -> str:
    return text if len(text) <= fits else text[: fits - 1] + "…"


def _lines(node: Node) -> tuple[str, ...]:
    """Its number, and the first word that it writes."""
    if not node.words:
        return (f"head {node.neuron.index}",)
    return str(node.neuron.index), visible(node.words[0].strip() or node.words[0])


def _both(token: Token) -> tuple[str, ...]:
    """What the prompts have there."""
    here, there = visible(token.text), visible(token.counterfactual)
    return (here,) if here == there else (here, there)


# --- pages ---------------------------------------------------------------------------------------------


def fragment(graph: Graph) -> Markup:
    """The picture that answers to pointing, for a notebook or a page: no frames, nothing fetched."""
    script = files("icebear.concepts.circuits").joinpath("graph.js").read_text(encoding="utf-8")
    return render(
        "icebear.concepts/circuit.html",
        summary=summary(graph),
        nodes=len(graph.nodes),
        edges=drawn(graph),
        picture=svg(graph),
        cards=Markup(json.dumps(cards(graph)).replace("<", "\\u003c")),
        script=Markup(script),
    )


def summary(graph: Graph) -> str:
    """What is drawn, and how much of the answer it is."""
    told = ", ".join(f"{name} {share:.0%}" for name, share in shares(graph).items())
    return (
        f"{graph.answer}: {graph.meaning}. The difference is {graph.difference[-1].item():.2f} logits, directly from "
        f"{told} (contributions by difference rules)."
    )


def cards(graph: Graph) -> dict[str, list[str]]:
    """What is told of each token, node, answer and group: lines of text."""
    known: dict[str, list[str]] = {}
    out: dict[str, list[Edge]] = {}
    for edge in graph.edges:
        out.setdefault(edge.source.id, []).append(edge)
    everything: tuple[Token | Node | AnswerNode, ...] = (*graph.shown, graph.answer)
    for what in everything:
        lines = [str(what)]
        if isinstance(what, Node):
            lines = [
                f"{what.neuron} at {graph.tokens[what.position].text!r}: {what.activation:+.3f} here, "
                f"{what.counterfactual:+.3f} there, score {what.score:+.3f}",
                *([f"writes {', '.join(map(repr, what.words))}"] if what.words else []),
            ]
        if not isinstance(what, Token):
            lines.append(f"from {sources(graph, what, 6)}")
        moved = sorted(out.get(what.id, ()), key=lambda edge: -edge.influence)[:6]
        if moved:
            lines.append("to " + ", ".join(f"{edge.target} {edge.effect:+.3f}" for edge in moved))
        known[what.id] = lines
    for number, group in enumerate(graph.groups):
        known[f"group {number}"] = [f"{group.name}: score {group.score:+.3f}", ", ".join(map(str, group.nodes))]
    return known


def sources(graph: Graph, target: Node | AnswerNode, k: int) -> str:
    """What gives it most, in words."""
    edges, hidden = graph.sources_of(target, k)
    return ", ".join([*(f"{edge.source} {edge.share:+.0%}" for edge in edges), f"not shown {hidden:+.0%}"])


def html(graph: Graph) -> Markup:
    """A self-contained page."""
    body = render("icebear.concepts/circuit_page.html", fragment=fragment(graph), made_with=graph.made_with)
    return page("icebear circuit", body, "body{max-width:80rem}")


def on_paper(graph: Graph) -> str:
    """The picture on white, for a file of its own."""
    picture = str(svg(graph)).replace("currentColor", "#111111").replace(UNDER, "#ffffff")
    return picture.replace('height="100%" fill="none"', 'height="100%" fill="#ffffff"', 1)


def png(graph: Graph, scale: float = 2) -> bytes:
    """The same as pixels, by vl-convert."""
    need("circuits")
    import vl_convert

    real(scale, "The scale of a picture", 0.1, 20)
    return vl_convert.svg_to_png(on_paper(graph), scale=scale)
