"""A circuit: its groups, nodes and edges, and the interventions that test it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from icebear.app.cli.tables.grid import grid
from icebear.app.cli.tables.nodes import ablation_table
from icebear.concepts.circuits.drawing import summary, top_sources
from icebear.concepts.results.effect_words import effect_text

if TYPE_CHECKING:
    import icebear
    from icebear.concepts.circuits.records import EdgeFaithfulness, GroupAblation
    from icebear.concepts.nodes.controls import Ablation


def circuit_report(graph: icebear.Graph, measured: tuple[Ablation, EdgeFaithfulness] | None) -> Group:
    """A circuit: its groups, its nodes from the last layer to the first with their largest sources, and measurements
    of nodes and edges."""
    parts: list[Any] = [Text(summary(graph)), groups_table(graph), _tree(graph)]
    if measured:
        ablation, edges = measured
        line = (
            f"The {edges.edges} edges have a sufficiency of {edges.sufficiency:.0%}. As many random edges into the "
            f"same targets from the same layers have {edges.random_sufficiency:.0%}. All edges between the nodes have "
            f"{edges.all_edges:.0%}."
        )
        parts += [ablation_table([ablation]), Text(line, "dim")]
    return Group(*parts)


def groups_table(graph: icebear.Graph, without: Sequence[GroupAblation] = ()) -> Table:
    """A circuit's groups. With `without` only the first ones, each with the model's answer without it."""
    rows = [[group.name, str(len(group.nodes)), f"{group.score:+.3f}"] for group in graph.groups]
    if not without:
        return grid("group", ">nodes", ">score", rows=rows, title="Groups")
    for row, off in zip(rows, without, strict=False):
        row += [f"{off.necessity:.0%}", f"{off.random_necessity:.0%}", repr(off.predictions[0].text)]
    return grid(
        *("group", ">nodes", ">score", ">necessity", ">random", "answer without"),
        rows=rows[: len(without)],
        title="Groups",
        caption="random: the necessity of as many random nodes of the same layers and tokens",
    )


def _tree(graph: icebear.Graph) -> Tree:
    tree = Tree(Text(f"{graph.answer}  from {top_sources(graph, graph.answer, 3)}"))
    branches: dict[int, Tree] = {}
    for node in sorted(graph.nodes, key=lambda node: -node.neuron.layer):
        layer = node.neuron.layer
        branch = branches.get(layer) or branches.setdefault(layer, tree.add(f"L{layer}"))
        words = effect_text(node.raises[:2], node.lowers[:2])
        token = repr(graph.tokens[node.position].text)
        branch.add(Text(f"{node} {token} {node.score:+.3f}  {words}  from {top_sources(graph, node, 3)}"))
    return tree
