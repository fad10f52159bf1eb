"""Ranked nodes and circuits, and the interventions that test them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from icebear.app.cli.tables.grid import grid
from icebear.concepts.circuits.drawing import edges_text, summary, top_sources
from icebear.concepts.results.effect_words import effect_text
from icebear.explanation.sentences import empty_shares, hardly_differs
from icebear.render import quoted

if TYPE_CHECKING:
    import icebear
    from icebear.concepts.circuits.circuit_records import EdgeFaithfulness, Node
    from icebear.concepts.nodes.controls import Ablation

Words = Literal["effects", "direct"]
OVERVIEW = 4
"""The nodes of an overview."""


def nodes_table(explanation: icebear.Explanation, title: str = "", words: Words = "effects") -> Table:
    """The nodes with the words that they raise and lower in this prompt, or that they promote on the direct path."""
    compared = explanation.relevance.counterfactual
    measured = words == "effects" and explanation.effects is not None
    has_control = bool(explanation.random_log_probabilities)
    rows = []
    for node in explanation.nodes:
        row = node.ranked
        activation = "" if row.neuron.site == "head" else f"{row.activation:+.3f}"
        other = ["" if row.counterfactual is None else f"{row.counterfactual:+.3f}"] if compared else []
        shown = [", ".join(node.raises[:3]), ", ".join(node.lowers[:3])] if measured else [node.words]
        change = "" if node.log_probability is None else f"{node.log_probability:+z.3f}"
        numbers = [activation, *other, f"{row.relevance:+.3f}", *([change] if has_control else [])]
        rows.append([str(row.neuron), repr(node.token), *numbers, *shown])
    counterfactual = [">base model" if compared.model else ">counterfactual"] if compared else []
    shown = ["raises", "lowers"] if measured else ["promotes"]
    log_probability = [">log p"] if has_control else []
    names = ("neuron", "token", ">activation", *counterfactual, ">relevance", *log_probability, *shown)
    caption = log_probability_caption(explanation) if has_control else ""
    return grid(*names, rows=rows, title=title or _nodes_title(explanation), caption=caption)


def log_probability_caption(explanation: icebear.Explanation) -> str:
    """Say what the log-probabilities of a table of nodes are, with those of random nodes."""
    sizes = sorted(map(abs, explanation.random_log_probabilities))
    set_to = "counterfactual value" if explanation.relevance.counterfactual else "mean on the calibration texts"
    return (
        f"log p: log-probability of {quoted(explanation.relevance.target_text)} minus that with the neuron set to its "
        f"{set_to}, in nats. {len(sizes)} random neurons of the same layers and tokens: median size "
        f"{median(sizes):.3f}, largest {sizes[-1]:.3f}."
    )


TITLES = {
    "positive": "Most relevant neurons",
    "negative": "Neurons with the most negative relevance",
    "absolute": "Neurons with the largest absolute relevance",
}
"""How neurons are ranked -> the title of their table."""


def _nodes_title(explanation: icebear.Explanation) -> str:
    relevance, ranking, position = explanation.relevance, explanation.ranking, explanation.ranking.position
    where = {"all": "at all tokens", "last": "at the predicting token"}.get(str(position), f"at position {position}")
    compared = relevance.counterfactual
    title = f"Neurons that pass most on, {where}" if compared and compared.model else f"{TITLES[ranking.by]} {where}"
    if position == "all" and not ranking.include_sinks:
        title += f", attention sinks excluded: {list(relevance.prompt.sinks)}"
    if position == "all" and relevance.prompt.turns and not ranking.include_template:
        title += ", the chat template excluded"
    return title


def ablation_table(ablations: Sequence[Ablation]) -> Table:
    columns = ("sufficiency", "necessity")
    names = [f"{control}{column}" for control in ("", "random_", "most_changed_") for column in columns]
    rows = [[row.site, f"{row.nodes:,}", *(f"{getattr(row, name):z.2f}" for name in names)] for row in ablations]
    caption = [
        "random: as many other neurons of the same layers and tokens, or heads of the same tokens; median of sets.",
        "most changed: nodes whose activations change most.",
        *dict.fromkeys(filter(None, map(hardly_differs, ablations))),
        *(f"No {site} nodes at all: sufficiency {share:z.2f}." for site, share in empty_shares(ablations).items()),
    ]
    return grid(
        "site",
        ">nodes",
        *(f">{name.replace('random_', 'random: ').replace('most_changed_', 'most changed: ')}" for name in names),
        rows=rows,
        title="Sufficiency and necessity, with controls",
        caption=" ".join(caption),
    )


def circuit_report(
    graph: icebear.Graph, measured: tuple[Ablation, EdgeFaithfulness] | None, is_drawn: bool = False
) -> Group:
    """A circuit: its groups, its nodes from the last layer to the first with their largest sources, and measurements
    of nodes and edges. is_drawn: without what a picture shows."""
    rows = [[group.name, str(len(group.nodes)), f"{group.score:+.3f}"] for group in graph.groups]
    groups = grid("group", ">nodes", ">score", rows=rows, title="Groups")
    parts: list[Any] = [Text(summary(graph)), *([] if is_drawn else [groups, _tree(graph)])]
    if measured:
        ablation, edges = measured
        lines = [edges_text(edges, bool(graph.edges))]
        if edges.matched_sufficiency is not None and edges.edges < edges.total:
            matched = "As many random edges into the same targets from the same layers"
            lines.append(f"{matched}: {edges.matched_sufficiency:z.0%}.")
        parts += [ablation_table([ablation]), Text(" ".join(lines), "dim")]
    return Group(*parts)


def circuit_overview(graph: icebear.Graph) -> Group:
    """The nodes of a circuit with the largest scores, a line each."""
    largest = sorted(graph.nodes, key=lambda node: -abs(node.score))[:OVERVIEW]
    lines = [Text(_node_text(graph, node), no_wrap=True, overflow="ellipsis") for node in largest]
    rest = len(graph.nodes) - len(largest)
    return Group(
        Text(summary(graph)), *lines, *([Text(f"{rest} more nodes: icebear circuit, below", "dim")] if rest else [])
    )


def _node_text(graph: icebear.Graph, node: Node) -> str:
    token, words = repr(graph.tokens[node.position].text), effect_text(node.raises[:2], node.lowers[:2])
    sources = f"  from {top_sources(graph, node, 3)}" if graph.edges else ""
    return f"{node} {token} {node.score:+.3f}  {words}{sources}"


def _tree(graph: icebear.Graph) -> Tree:
    sources = f"  from {top_sources(graph, graph.answer, 3)}" if graph.edges else ""
    tree = Tree(Text(f"{graph.answer}{sources}"))
    branches: dict[int, Tree] = {}
    for node in sorted(graph.nodes, key=lambda node: -node.neuron.layer):
        layer = node.neuron.layer
        branch = branches.get(layer) or branches.setdefault(layer, tree.add(f"L{layer}"))
        branch.add(Text(_node_text(graph, node)))
    return tree
