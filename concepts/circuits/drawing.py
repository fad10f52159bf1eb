"""A graph as a picture: tokens left to right, layers upwards; the same SVG for page, notebook, app and paper.

Places and curves are computed here; `graph.js` only lights what is pointed at. All text is escaped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from icebear.concepts.circuits.records import Answer, Edge, Group, Node, Token
from icebear.concepts.render import NEGATIVE, POSITIVE, hexadecimal, page, said, visible
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


def svg(graph: Graph) -> str:
    """The picture by itself, in a page's colours."""
    places, of_group = layout(graph), colors(graph)
    shown = drawn(graph)
    most = max((edge.influence for edge in shown), default=1.0)
    ranks = _ranks(graph)
    answer = places.boxes[graph.answer.id]
    wide = max(places.wide, LEFT + 2 * (GROUP + GAP), answer.x + answer.wide + GAP)
    beside = int((wide - LEFT) // (GROUP + GAP))
    high = places.high + -(-len(graph.groups) // beside) * GROUPS
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {high:.0f}" width="{wide:.0f}" '
        f'height="{high:.0f}" font-family="system-ui, sans-serif" font-size="10" role="group" '
        f'aria-label="{_safe(repr(graph))}">',
        '<rect width="100%" height="100%" fill="none"/>',
        *(
            f'<text x="4" y="{y:.0f}" fill="currentColor" opacity="0.6">L{layer}</text>'
            for layer, y in places.layers.items()
        ),
        _bar(shares(graph), wide - LEFT - GAP),
        '<g fill="none">',
        *(_curve(edge, places, rank, edge.influence / most) for rank, edge in enumerate(shown)),
        "</g>",
        _labelled(graph.answer, answer, (str(graph.answer),), GREY, 0),
        *(
            _labelled(node, places.boxes[node.id], _lines(node), of_group[node.id], ranks[node.id])
            for node in graph.nodes
        ),
        *(_labelled(token, places.boxes[token.id], _both(token), GREY, 0) for token in graph.tokens),
        *(
            _group(
                group,
                number,
                of_group[group.nodes[0].id],
                LEFT + number % beside * (GROUP + GAP),
                places.high + number // beside * GROUPS,
            )
            for number, group in enumerate(graph.groups)
        ),
        "</svg>",
    ]
    return "".join(parts)


def shares(graph: Graph) -> dict[str, float]:
    """What gives the answer its difference directly; sums to 1."""
    first, count = len(graph.tokens), len(graph.nodes)
    parts = graph.contribution[-1] / graph.difference[-1]
    sizes = [first, count, len(parts) - first - count]
    tokens, nodes, outside = (part.sum().item() for part in parts.split(sizes))
    return {"nodes": nodes, "tokens": tokens, "outside the circuit": outside}


def _bar(parts: dict[str, float], wide: float) -> str:
    """The shares above the picture, by size."""
    whole = sum(map(abs, parts.values()))
    told = ", ".join(f"{name} {share:.0%}" for name, share in parts.items())
    more = ": most of this answer is elsewhere" if abs(parts["outside the circuit"]) > (1 - ELSEWHERE) * whole else ""
    x, drawn = float(LEFT), []
    for (name, share), opacity in zip(parts.items(), (0.8, 0.5, 0.15), strict=True):
        part = wide * abs(share) / whole
        drawn.append(
            f'<rect class="share" data-share="{name}" x="{x:.1f}" y="2" width="{part:.1f}" height="{BAR}" '
            f'fill="currentColor" fill-opacity="{opacity}"/>'
        )
        x += part
    return f'{"".join(drawn)}<text x="{LEFT}" y="{BAR + 14}" fill="currentColor">{told}{more}</text>'


def _ranks(graph: Graph) -> dict[str, int]:
    """Of each node among all by the size of its score, from 0."""
    order = sorted(graph.nodes, key=lambda node: -abs(node.score))
    return {node.id: rank for rank, node in enumerate(order)}


def _curve(edge: Edge, places: Layout, rank: int, share: float) -> str:
    start, end = places.boxes[edge.source.id], places.boxes[edge.target.id]
    low, high = start.y, end.y + end.high
    bend = max(12.0, (low - high) / 2)
    color = signed(edge.share)
    return (
        f'<path class="edge" data-source="{edge.source.id}" data-target="{edge.target.id}" data-rank="{rank}" '
        f'd="M{start.middle:.0f} {low:.0f}C{start.middle:.0f} {low - bend:.0f} {end.middle:.0f} {high + bend:.0f} '
        f'{end.middle:.0f} {high:.0f}" stroke="{color}" stroke-width="{0.6 + 3.4 * share:.1f}" '
        f'stroke-opacity="{0.12 + 0.5 * share**0.5:.2f}"/>'
    )


def signed(number: float) -> str:
    """The colour of its sign."""
    return hexadecimal(POSITIVE if number >= 0 else NEGATIVE)


def _labelled(what: Token | Node | Answer, box: Box, lines: Sequence[str], color: str, rank: int) -> str:
    """A box with a text; the strip on its left is the group's colour, its own the sign of the score."""
    score = what.score if isinstance(what, Node) else 0.0
    fill = signed(score) if score else "#888888"
    label = _safe(" ".join(lines))
    first = box.y + box.high / 2 + 3.5 - 6 * (len(lines) - 1)
    texts = "".join(
        f'<text x="{box.x + 8:.0f}" y="{first + 12 * number:.1f}" fill="currentColor" '
        f'opacity="{0.65 if number < len(lines) - 1 else 1}">{_safe(_cut(line, int((box.wide - 9) / 6)))}</text>'
        for number, line in enumerate(lines)
    )
    return (
        f'<g class="node" data-id="{what.id}" data-rank="{rank}" tabindex="0" role="button" aria-label="{label}">'
        f'<rect x="{box.x:.0f}" y="{box.y:.0f}" width="{box.wide:.0f}" height="{box.high:.0f}" rx="4" '
        f'style="fill:{UNDER}"/>'
        f'<rect x="{box.x:.0f}" y="{box.y:.0f}" width="{box.wide:.0f}" height="{box.high:.0f}" rx="4" fill="{fill}" '
        f'fill-opacity="{0.25 if score else 0.12}" stroke="{fill}" stroke-opacity="0.6"/>'
        f'<rect x="{box.x:.0f}" y="{box.y:.0f}" width="5" height="{box.high:.0f}" rx="2" fill="{color}"/>{texts}</g>'
    )


def _safe(text: str) -> str:
    """Escaped, and without what XML forbids."""
    return escape(re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]", "\ufffd", text), quote=True)


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


def _group(group: Group, number: int, color: str, x: float, y: float) -> str:
    """A box under the picture."""
    count = f"{len(group.nodes)} node{'s' * (len(group.nodes) != 1)}, score {group.score:+.2f}"
    return (
        f'<g class="group" data-group="{number}" tabindex="0" role="button" '
        f'aria-label="{_safe(group.name)}"><rect x="{x:.0f}" y="{y:.0f}" width="{GROUP}" '
        f'height="{HIGH * 1.4:.0f}" rx="4" fill="{color}" fill-opacity="0.15" stroke="{color}"/>'
        f'<text x="{x + 8:.0f}" y="{y + 16:.0f}" fill="currentColor" font-weight="600">{_safe(_cut(group.name, 36))}'
        f'</text><text x="{x + 8:.0f}" y="{y + 31:.0f}" fill="currentColor" opacity="0.7">{escape(count)}</text></g>'
    )


# --- pages ---------------------------------------------------------------------------------------------


def fragment(graph: Graph) -> str:
    """The picture that answers to pointing, for a notebook or a page: no frames, nothing fetched."""
    data = json.dumps(cards(graph)).replace("<", "\\u003c")
    script = files("icebear.concepts.circuits").joinpath("graph.js").read_text(encoding="utf-8")
    count = len(drawn(graph))
    return (
        f'<div class="circuit"><p>{escape(summary(graph))} {LEGEND}</p>'
        f'<p class="choices"><label>nodes <input type="range" name="nodes" min="1" max="{len(graph.nodes)}" '
        f'value="{len(graph.nodes)}"></label> <label>edges <input type="range" name="edges" min="0" max="{count}" '
        f'value="{count}"></label> <span class="told" role="status"></span></p>'
        f'<div class="card" aria-live="polite"></div><div class="picture">{svg(graph)}</div>{_edge_table(graph)}'
        f'<script type="application/json">{data}</script>'
        f"<style>{STYLE}</style><script>{script}\nwatchCircuits(document);</script></div>"
    )


LEGEND = "Red gives to its target's difference, blue takes from it; the wider, the more influence."
STYLE = (
    ".circuit .picture{overflow-x:auto}.circuit svg{display:block}"
    ".circuit .node,.circuit .group{cursor:pointer;outline-offset:2px}"
    ".circuit .dim{opacity:.12}.circuit .lit{stroke-opacity:.95}.circuit .gone{display:none}"
    ".circuit .card{height:9em;overflow:auto;font-size:.85em}"
    ".circuit table{border-collapse:collapse;font-size:.85em}.circuit .choices label{margin-right:1.5em}"
    ".circuit td,.circuit th{padding:.1em .7em;text-align:right}"
    ".circuit td:nth-child(-n+2),.circuit th:nth-child(-n+2){text-align:left}"
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
    everything: tuple[Token | Node | Answer, ...] = (*graph.shown, graph.answer)
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


def sources(graph: Graph, target: Node | Answer, k: int) -> str:
    """What gives it most, in words."""
    edges, hidden = graph.sources_of(target, k)
    return ", ".join([*(f"{edge.source} {edge.share:+.0%}" for edge in edges), f"not shown {hidden:+.0%}"])


def _edge_table(graph: Graph) -> str:
    """For those who cannot see the picture."""
    rows = "".join(
        f"<tr><td>{escape(str(edge.source))}</td><td>{escape(str(edge.target))}</td><td>{edge.effect:+.3f}</td>"
        f"<td>{edge.patterns:+.3f}</td><td>{edge.share:+.1%}</td><td>{edge.influence:.2%}</td></tr>"
        for edge in drawn(graph)
    )
    return (
        f"<details><summary>The edges as a table</summary><table><thead><tr><th>from</th><th>to</th><th>effect</th>"
        "<th>through patterns</th><th>share of the target</th><th>influence</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></details>"
    )


def html(graph: Graph) -> str:
    """A self-contained page."""
    foot = f"<p><small>{escape(said(graph.made_with))}</small></p>"
    return page("icebear circuit", fragment(graph) + foot, "body{max-width:80rem}")


def on_paper(graph: Graph) -> str:
    """The picture on white, for a file of its own."""
    found = svg(graph).replace("currentColor", "#111111").replace(UNDER, "#ffffff")
    return found.replace('height="100%" fill="none"', 'height="100%" fill="#ffffff"', 1)


def png(graph: Graph, scale: float = 2) -> bytes:
    """The same as pixels, by vl-convert."""
    need("circuits")
    import vl_convert

    real(scale, "The scale of a picture", 0.1, 20)
    return vl_convert.svg_to_png(on_paper(graph), scale=scale)
