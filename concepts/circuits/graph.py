"""`Graph`: nodes, direct edges between them, and what is known of both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from icebear.concepts.circuits import checks, drawing
from icebear.concepts.circuits import records as parts
from icebear.concepts.circuits.groups import DISTANCE, grouped
from icebear.concepts.circuits.nodes import column, pair_of, patchable
from icebear.concepts.circuits.records import Edge, EdgeFaithfulness, Group, GroupAblation, Node
from icebear.concepts.files import SavedResult
from icebear.concepts.nodes.controls import Ablation, ablate
from icebear.concepts.results.result import Relevance
from icebear.convert import Tabled
from icebear.edits import Edit
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.recipe import Recipe
from icebear.values import seed_of, several, shown, whole

if TYPE_CHECKING:
    import pandas

    from icebear.db.store import Store

EDGES = 100
"""Of the measured numbers of edges, the one at which they recover most above random edges (docs/circuits.md)."""


@dataclass(frozen=True, eq=False, repr=False)
class Graph(SavedResult, Tabled):
    """The circuit of an answer: the neurons that make it, and the direct edges between them.

    Rows of its matrices are targets, the nodes and then the answer (K + 1); columns are `sources`: the tokens (T), the
    nodes (K), and the remainder of each layer and token (L * T). With several pairs of prompts, all numbers are means.
    """

    model: Model
    relevances: tuple[Relevance, ...]
    """One for each pair of prompts."""
    nodes: tuple[Node, ...]
    """By layer, then token."""
    effect: Tensor
    contribution: Tensor
    difference: Tensor
    """(K + 1,) the value of each target in the prompt minus that in the counterfactual prompt."""
    edge_count: int = EDGES
    heads: bool = False
    made_with: dict[str, Any] = field(default_factory=dict)
    other_groups: tuple[Group, ...] | None = None
    """Replace the default groups, see `regrouped`."""

    def __repr__(self) -> str:
        return f"<Graph of {len(self.nodes)} nodes and {len(self.edges)} edges for {self.answer}, {self.meaning}>"

    def __hash__(self) -> int:
        return hash((self.relevances, self.nodes))

    @property
    def meaning(self) -> str:
        """What the prompt is compared with, in words."""
        first, others = self.relevances[0], len(self.relevances) - 1
        if first.image:
            return "one image compared with another"
        counterfactual = "".join(token.counterfactual for token in self.tokens)
        more = f" and {others} more pairs" if others else ""
        return f"{''.join(first.prompt.strings)!r} compared with {counterfactual!r}{more}"

    @cached_property
    def tokens(self) -> tuple[parts.Token, ...]:
        first = self.relevances[0]
        assert first.counterfactual is not None
        there = first.prompt.strings if first.image else first.counterfactual.prompts[0]
        return tuple(map(parts.Token, range(len(there)), first.prompt.strings, there))

    @cached_property
    def answer(self) -> parts.AnswerNode:
        first = self.relevances[0]
        return parts.AnswerNode(first.predicted_at, first.target_text, first.contrast.text if first.contrast else None)

    @cached_property
    def shown(self) -> tuple[parts.Token | Node, ...]:
        """Tokens and nodes, in the order of `sources`."""
        return (*self.tokens, *self.nodes)

    @cached_property
    def sources(self) -> tuple[parts.Source, ...]:
        layers, tokens = range(self.model.layers), range(len(self.tokens))
        return (*self.shown, *(parts.Remainder(layer, token) for layer in layers for token in tokens))

    @cached_property
    def targets(self) -> tuple[parts.Target, ...]:
        return (*self.nodes, self.answer)

    @cached_property
    def influence(self) -> Tensor:
        """The influence (K + 1, S) of each edge on the answer along all paths; sums to 1.

        Absolute contributions, normalized over all sources of a target, remainders too (circuit-tracer, `graph.py`).
        Effects rank edges worse, because gradients vanish where attention or a step saturates (docs/truth.md).
        """
        sizes = self.contribution.abs().double()
        normalized = sizes / sizes.sum(-1, keepdim=True).clamp(min=1e-30)
        first, count = len(self.tokens), len(self.nodes)
        between = normalized[:, first : first + count]  # (K + 1, K)
        # The influence of nodes along all paths is p = share of the answer + N^T p, where N is acyclic.
        weights = torch.linalg.solve(torch.eye(count).double() - between[:count].T, between[count])
        scores = torch.cat((weights, torch.ones(1).double()))[:, None] * normalized
        return scores / scores.sum().clamp(min=1e-30)

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """The `edge_count` most influential edges from tokens and nodes, the largest first; at most all that exist."""
        influence = self.influence[:, : len(self.shown)]
        count = min(self.edge_count, int(influence.count_nonzero()))
        order = influence.flatten().argsort(descending=True, stable=True)[:count]
        return tuple(self._edge(*divmod(number, len(self.shown))) for number in order.tolist())

    def _edge(self, row: int, column: int) -> Edge:
        contribution, difference = self.contribution[row, column].item(), self.difference[row].item()
        return Edge(
            self.shown[column],
            self.targets[row],
            self.effect[row, column].item(),
            contribution,
            contribution / difference if difference else 0.0,
            self.influence[row, column].item(),
        )

    def sources_of(self, target: parts.Target | str, k: int) -> tuple[list[Edge], float]:
        """Return the k edges to a target (or its id) with the largest share of its difference, and the share of all
        remainders. Raises `InputError`."""
        k = whole(k, "The number of edges")
        row = next((row for row, one in enumerate(self.targets) if target in (one, one.id)), None)
        if row is None:
            raise InputError(f"{shown(target)} is not a target of this graph; give one of its nodes, or 'answer'.")
        contribution, difference = self.contribution[row], self.difference[row].item()
        hidden = contribution[len(self.shown) :].sum().item() / difference if difference else 0.0
        order = contribution[: len(self.shown)].abs().argsort(descending=True, stable=True)[:k].tolist()
        return [self._edge(row, column) for column in order if contribution[column]], hidden

    def mask(self, nodes: Sequence[Node] | None = None) -> Tensor:
        """Return nodes (default: all) as a choice (L, T, W) of `icebear.concepts.nodes.controls.Nodes`."""
        width = self.model.ffn_width + self.model.heads * self.heads
        chosen = torch.zeros(self.model.layers, len(self.tokens), width, dtype=torch.bool)
        for node in self.nodes if nodes is None else several(nodes):
            if not isinstance(node, Node):
                raise InputError(f"{shown(node)} is not a node of this graph; choose nodes from graph.nodes.")
            chosen[node.neuron.layer, node.position, column(self.model, node.neuron)] = True
        return chosen

    def ablation(self, seed: int = 0) -> Ablation:
        """Measure sufficiency and necessity of the nodes, with random controls; for several pairs their mean."""
        generator = torch.Generator().manual_seed(seed_of(seed))
        each = [
            ablate(patchable(self.model, relevance, self.heads), self.mask(), generator)
            for relevance in self.relevances
        ]
        shares = [name for name in vars(each[0]) if name not in ("site", "nodes")]
        means: dict[str, Any] = {name: fmean(getattr(one, name) for one in each) for name in shares}
        return replace(each[0], **means)

    def faithfulness(self, edges: int | None = None, seed: int = 0) -> EdgeFaithfulness:
        """Measure the share of the difference that edges alone recover.

        Node by node, upwards, each node is computed while its sources along these edges have the values computed so
        far, and all else keeps its counterfactual value; the answer is last. For several pairs the mean.

        Parameters
        ----------
        edges
            The number of edges from tokens and nodes, the most influential first; None for all edges of the graph.
        seed
            The seed of the random edges.
        """
        return checks.faithfulness(self, [edges], seed)[0]

    def interventions(self) -> pandas.DataFrame:
        """Measure each possible edge from a token or node to a node or the answer, in the first pair of prompts.

        Returns
        -------
        pandas.DataFrame
            A row an edge. ``effect`` and ``contribution`` are predictions. ``one_sided`` is the change of the target
            when the source alone takes its counterfactual value while all other neurons are fixed; ``two_sided`` is
            the mean of that and of the same from the counterfactual prompt to the prompt.
        """
        return checks.interventions(self)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Similar nodes (`icebear.concepts.circuits.groups`), the groups with the largest score first."""
        return grouped(self) if self.other_groups is None else self.other_groups

    def regrouped(self, store: Store | None = None, distance: float = DISTANCE) -> Graph:
        """Return the same graph with other groups: also by the sentences of a store, or up to another distance."""
        return replace(self, other_groups=grouped(self, store, distance))

    def group(self, group: Group | str) -> Group:
        """Return a group, or the group of a name. Raises `InputError` if there is none."""
        for one in self.groups if isinstance(group, str) else ():
            if one.name == group:
                return one
        if not isinstance(group, Group):
            names = ", ".join(repr(one.name) for one in self.groups[:5])
            raise InputError(f"{shown(group)} is not a group of this graph; take one of its groups, such as {names}.")
        return group

    def without(self, group: Group | str) -> GroupAblation:
        """Give the nodes of a group their counterfactual values while all other neurons are recomputed, in the first
        pair of prompts. Raises `InputError`."""
        mask = self.mask(self.group(group).nodes)
        nodes = patchable(self.model, self.relevances[0], self.heads)
        measured = ablate(nodes, mask, torch.Generator().manual_seed(0))
        return GroupAblation(measured.necessity, measured.random_necessity, tuple(nodes.predictions(~mask)))

    def recipe(self, group: Group | str, off: bool = False) -> Recipe:
        """Return edits that set the nodes of a group to their counterfactual values, at their tokens; off: to zero.
        Raises `InputError` for a head that is not switched off, which has no single value."""
        edits, group = [], self.group(group)
        for node in group.nodes:
            if node.neuron.site == "head" and not off:
                raise InputError(
                    f"{node.neuron} is a head, which has no single value to be set to; pass off=True for zero."
                )
            stack = pair_of(self.relevances[0]).batch.span_of(self.model.stack_of(node.neuron.layer))
            where = f"position:{node.position - stack.start}"
            edits.append(Edit(node.neuron, "scale" if off else "set", 0.0 if off else node.counterfactual, where=where))
        prompt = "".join(self.relevances[0].prompt.strings)
        return Recipe.for_model(
            self.model, f"without the group: {group.name}", edits, found_by="circuit", prompt=prompt
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the graph as a dictionary for JSON."""
        groups = {node.id: group.name for group in self.groups for node in group.nodes}
        return {
            "icebear_circuit": 1,  # the version of the format
            "prompt": [token.text for token in self.tokens],
            "counterfactual": [token.counterfactual for token in self.tokens],
            "pairs": len(self.relevances),
            "target": self.answer.text,
            "contrast": self.answer.contrast,
            "difference": self.difference[-1].item(),
            "nodes": [
                {"id": node.id, **vars(node), "neuron": str(node.neuron), "group": groups[node.id]}
                for node in self.nodes
            ],
            "groups": [
                {**vars(group), "score": group.score, "nodes": [node.id for node in group.nodes]}
                for group in self.groups
            ],
            "edges": self.to_frame().to_dict("records"),
            **self.made_with,
        }

    def to_json(self) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), ensure_ascii=False, indent=1)

    def to_svg(self) -> str:
        """Return the picture: tokens from left to right, layers from bottom to top."""
        return drawing.on_paper(self)

    def to_png(self, scale: float = 2) -> bytes:
        """Return the picture as a PNG file; scale: pixels per unit of the SVG."""
        return drawing.png(self, scale)

    def to_html(self) -> str:
        """Return a self-contained page with an interactive picture."""
        return drawing.html(self)

    def _repr_html_(self) -> str:
        return drawing.fragment(self)

    def to_frame(self) -> pandas.DataFrame:
        """Return the edges as a pandas table, a row each; `to_arrow` returns an Arrow table."""
        import pandas

        rows = [{**vars(edge), "source": edge.source.id, "target": edge.target.id} for edge in self.edges]
        return pandas.DataFrame(rows)

    def nodes_frame(self) -> pandas.DataFrame:
        """Return the nodes as a pandas table, a row each."""
        import pandas

        tokens = [self.tokens[node.position].text for node in self.nodes]
        words = {side: [", ".join(getattr(node, side)) for node in self.nodes] for side in ("raises", "lowers")}
        return pandas.DataFrame(self.to_dict()["nodes"]).assign(token=tokens, **words)
