"""`Graph`: nodes, direct edges between them, and what is known of both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from icebear.concepts import files
from icebear.concepts.attribution.controls import Ablation
from icebear.concepts.attribution.result import Relevance
from icebear.concepts.circuits import checks, drawing, neuronpedia
from icebear.concepts.circuits.groups import APART, grouped
from icebear.concepts.circuits.nodes import column, pair_of
from icebear.concepts.circuits.records import (
    AnswerNode,
    Edge,
    EdgeFaithfulness,
    Group,
    Node,
    Rest,
    Source,
    Target,
    Token,
    Without,
)
from icebear.concepts.models.model import Model
from icebear.edits import Edit
from icebear.errors import InputError
from icebear.recipe import Recipe
from icebear.tables import Tabled
from icebear.values import seed_of, several, shown, whole

if TYPE_CHECKING:
    import pandas

    from icebear.db.store import Store

FORMAT = 1
KEPT = 0.98
"""Of the influence, by the edges that are kept (circuit-tracer's pruning)."""


@dataclass(frozen=True, eq=False, repr=False)
class Graph(Tabled):
    """The circuit of an answer: which neurons make it, and what they give each other.

    Rows of its matrices are targets, the nodes and then the answer (K + 1); columns are `sources`: the tokens (T), the
    nodes (K), and what is not shown of each layer and token (L * T). Of several pairs of prompts all is their mean.
    """

    model: Model
    relevances: tuple[Relevance, ...]
    """Of each pair of prompts."""
    nodes: tuple[Node, ...]
    """By layer, then token."""
    effect: Tensor
    patterns: Tensor
    contribution: Tensor
    difference: Tensor
    """(K + 1,) of each target, between both prompts."""
    kept: float = KEPT
    heads: bool = False
    made_with: dict[str, Any] = field(default_factory=dict)
    other_groups: tuple[Group, ...] | None = None
    """In place of those by default, see `regrouped`."""

    def __repr__(self) -> str:
        return f"<Graph of {len(self.nodes)} nodes and {len(self.edges)} edges for {self.answer}, {self.meaning}>"

    def __eq__(self, other: object) -> bool:
        return files.same(self, other)

    def __hash__(self) -> int:
        return hash((self.relevances, self.nodes))

    @property
    def meaning(self) -> str:
        """What it is compared with, in words."""
        told = self.relevances[0].counterfactual
        assert told is not None
        if self.relevances[0].image:
            return "one image compared with another"
        more = f" and {len(self.relevances) - 1} more pairs" if len(self.relevances) > 1 else ""
        return f"{''.join(self.relevances[0].prompt.strings)!r} compared with {''.join(told.prompts[0])!r}{more}"

    @cached_property
    def tokens(self) -> tuple[Token, ...]:
        first = self.relevances[0]
        assert first.counterfactual is not None
        there = first.prompt.strings if first.image else first.counterfactual.prompts[0]
        pairs = enumerate(zip(first.prompt.strings, there, strict=True))
        return tuple(Token(position, *texts) for position, texts in pairs)

    @cached_property
    def answer(self) -> AnswerNode:
        first = self.relevances[0]
        return AnswerNode(first.predicted_at, first.target_text, first.contrast.text if first.contrast else None)

    @property
    def rests(self) -> tuple[Rest, ...]:
        return tuple(Rest(layer, token) for layer in range(self.model.layers) for token in range(len(self.tokens)))

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        return (*self.shown, *self.rests)

    @cached_property
    def targets(self) -> tuple[Target, ...]:
        return (*self.nodes, self.answer)

    @property
    def shown(self) -> tuple[Token | Node, ...]:
        """Tokens and nodes, in the order of `sources`."""
        return (*self.tokens, *self.nodes)

    @property
    def shown_edges(self) -> list[Edge]:
        """Those from tokens and nodes."""
        return [edge for edge in self.edges if not isinstance(edge.source, Rest)]

    # --- what matters ---------------------------------------------------------------------------------

    @cached_property
    def influence(self) -> Tensor:
        """(K + 1, S) of each edge on the answer, along all paths; sums to 1. Effects by size, each target's normalised
        over all its sources, those not shown too (circuit-tracer, `graph.py`)."""
        sizes = self.effect.abs().double()
        shares = sizes / sizes.sum(-1, keepdim=True).clamp(min=1e-30)
        first, count = len(self.tokens), len(self.nodes)
        between = shares[:, first : first + count]  # (K + 1, K)
        # What comes to a node along all paths p = answer's share + N^T p, N being acyclic.
        weights = torch.linalg.solve(torch.eye(count).double() - between[:count].T, between[count])
        scores = torch.cat((weights, torch.ones(1).double()))[:, None] * shares
        return scores / scores.sum().clamp(min=1e-30)

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """Those that have `kept` of the influence, the largest first."""
        flat = self.influence.flatten()
        order = flat.argsort(descending=True, stable=True)
        running = flat[order].cumsum(0)
        count = int((running < self.kept * running[-1]).sum()) + 1 if len(running) else 0
        sources, targets = self.sources, self.targets
        found = []
        for place in order[:count].tolist():
            row, column = divmod(place, len(sources))
            contribution, whole = self.contribution[row, column].item(), self.difference[row].item()
            found.append(
                Edge(
                    sources[column],
                    targets[row],
                    self.effect[row, column].item(),
                    self.patterns[row, column].item(),
                    contribution,
                    contribution / whole if whole else 0.0,
                    flat[place].item(),
                )
            )
        return tuple(found)

    def _row(self, target: Target | str) -> int:
        """Of a target, or its id, in `targets`. Raises `InputError` where there is none."""
        for row, one in enumerate(self.targets):
            if target in (one, one.id):
                return row
        raise InputError(f"{shown(target)} is no target of this graph; give a node of it, or 'answer'.")

    def sources_of(self, target: Target | str, k: int) -> tuple[list[Edge], float]:
        """The edges to a target (or its id) from tokens and nodes, the k largest shares first, and the share of all not
        shown."""
        k, row = whole(k, "The number of edges"), self._row(target)
        edges = [edge for edge in self.shown_edges if edge.target is self.targets[row]]
        difference = self.difference[row].item()
        hidden = self.contribution[row, len(self.shown) :].sum().item() / difference if difference else 0.0
        return sorted(edges, key=lambda edge: -abs(edge.share))[:k], hidden

    @property
    def rest(self) -> Tensor:
        """(K + 1,) what contributions lack to each target's own difference: rounding."""
        return self.difference - self.contribution.sum(-1)

    def mask(self, nodes: Sequence[Node] | None = None) -> Tensor:
        """(L, T, W) a choice of nodes (default: all) as `icebear.concepts.attribution.controls.Nodes` takes it."""
        width = self.model.width("ffn") + self.model.heads * self.heads
        chosen = torch.zeros(self.model.layers, len(self.tokens), width, dtype=torch.bool)
        for node in self.nodes if nodes is None else several(nodes):
            if not isinstance(node, Node):
                raise InputError(f"{shown(node)} is not a node; take some of the graph's nodes.")
            chosen[node.neuron.layer, node.position, column(self.model, node.neuron)] = True
        return chosen

    # --- checks ---------------------------------------------------------------------------------------

    def ablation(self, seed: int = 0) -> Ablation:
        """What the nodes carry of the answer, and what is left without them, beside controls."""
        return checks.ablation(self, seed_of(seed))

    def faithfulness(self, edges: int | None = None, seed: int = 0) -> EdgeFaithfulness:
        """What comes about along the edges alone (`icebear.concepts.circuits.checks.faithfulness`)."""
        return checks.faithfulness(self, [edges], seed)[0]

    def interventions(self, half: bool = False) -> pandas.DataFrame:
        """Edges as predicted and as measured (`icebear.concepts.circuits.checks.interventions`)."""
        return checks.interventions(self, half)

    def correlations(self) -> dict[str, float]:
        """Of edges as predicted with those measured (`icebear.concepts.circuits.checks.correlations`)."""
        return checks.correlations(self)

    def overlap(self, other: Graph) -> tuple[float, float]:
        """The share of nodes in common with another circuit, and by chance
        (`icebear.concepts.circuits.checks.overlap`)."""
        if not isinstance(other, Graph):
            raise InputError(f"{shown(other)} is not a circuit; give another Graph.")
        return checks.overlap(self, other)

    # --- groups ---------------------------------------------------------------------------------------

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Nodes that belong together (`icebear.concepts.circuits.groups`), those of the largest score first."""
        return grouped(self) if self.other_groups is None else self.other_groups

    def regrouped(self, store: Store | None = None, apart: float = APART) -> Graph:
        """The same graph with other groups: by the sentences of a store too, or joined up to another distance."""
        return replace(self, other_groups=grouped(self, store, apart))

    def group(self, group: Group | str) -> Group:
        """A group, or that of a name. Raises `InputError` where there is none."""
        for one in self.groups if isinstance(group, str) else ():
            if one.name == group:
                return one
        if not isinstance(group, Group):
            names = ", ".join(repr(one.name) for one in self.groups[:5])
            raise InputError(f"{shown(group)} is no group of this graph; take one of its groups, such as {names}.")
        return group

    def without(self, group: Group | str) -> Without:
        """The answer when a group takes the other prompt's activations, all other neurons computed as ever."""
        return checks.without(self, self.group(group))

    def recipe(self, group: Group | str, off: bool = False) -> Recipe:
        """Edits that put a group to the other prompt's values, at its tokens; off: to zero. Raises `InputError` for a
        head that is not switched off, which has no one value."""
        edits, group = [], self.group(group)
        for node in group.nodes:
            if node.neuron.site == "head" and not off:
                raise InputError(f"{node.neuron} has many activations and no one value to take; switch it off instead.")
            stack = pair_of(self.relevances[0]).batch.span_of(self.model, node.neuron.layer)
            where = f"position:{node.position - stack.start}"
            edits.append(Edit(node.neuron, "scale" if off else "set", 0.0 if off else node.counterfactual, where=where))
        prompt = "".join(self.relevances[0].prompt.strings)
        return Recipe.for_model(self.model, f"without {group.name}", edits, found_by="circuit", prompt=prompt)

    # --- files ----------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        first = self.relevances[0]
        groups = {node.id: group.name for group in self.groups for node in group.nodes}
        return {
            "icebear_circuit": FORMAT,
            "prompt": list(first.prompt.strings),
            "counterfactual": [token.counterfactual for token in self.tokens],
            "pairs": len(self.relevances),
            "target": self.answer.text,
            "contrast": self.answer.contrast,
            "difference": self.difference[-1].item(),
            "nodes": [
                {**vars(node), "id": node.id, "neuron": str(node.neuron), "group": groups[node.id]}
                for node in self.nodes
            ],
            "groups": [
                {"name": group.name, "score": group.score, "nodes": [node.id for node in group.nodes]}
                for group in self.groups
            ],
            "edges": self.to_frame().to_dict("records"),
            **self.made_with,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), ensure_ascii=False, indent=1)

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        """All of it as a JSON file, for `load`. Raises `InputError`."""
        files.save(self, path, overwrite)

    @classmethod
    def load(cls, path: str | Path, model: Model) -> Graph:
        """What `save` wrote; its checks need the model that it was made with. Raises `InputError`."""
        return files.load(cls, path, model)

    def to_neuronpedia(self, slug: str = "icebear") -> str:
        """The file of circuit-tracer and Neuronpedia (`icebear.concepts.circuits.neuronpedia`)."""
        return json.dumps(neuronpedia.written(self, slug), ensure_ascii=False)

    def to_svg(self) -> str:
        """The picture: tokens left to right, layers upwards."""
        return drawing.on_paper(self)

    def to_png(self, scale: float = 2) -> bytes:
        return drawing.png(self, scale)

    def to_html(self) -> str:
        """A self-contained page whose picture answers to pointing."""
        return drawing.html(self)

    def _repr_html_(self) -> str:
        return drawing.fragment(self)

    def to_frame(self) -> pandas.DataFrame:
        """The edges as a pandas table, a row each. `to_arrow` has them as an Arrow table."""
        import pandas

        rows = [{**vars(edge), "source": edge.source.id, "target": edge.target.id} for edge in self.edges]
        return pandas.DataFrame(rows)

    def nodes_frame(self) -> pandas.DataFrame:
        """The nodes as a pandas table, a row each."""
        import pandas

        groups = {node.id: group.name for group in self.groups for node in group.nodes}
        rows = [
            {
                "node": node.id,
                "neuron": str(node.neuron),
                "position": node.position,
                "token": self.tokens[node.position].text,
                "score": node.score,
                "activation": node.activation,
                "counterfactual": node.counterfactual,
                "group": groups[node.id],
                "words": ", ".join(word.strip() for word in node.words),
            }
            for node in self.nodes
        ]
        return pandas.DataFrame(rows)
