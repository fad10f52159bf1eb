"""`Wiring`: the nodes of a circuit, the direct edges between them, and their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isnan
from typing import Any

import torch
from torch import Tensor

from icebear.concepts.circuits.circuit_records import (
    AnswerNode,
    CircuitToken,
    Edge,
    EdgeFaithfulness,
    EdgeSource,
    EdgeTarget,
    Group,
    Node,
    Remainder,
)
from icebear.concepts.circuits.measured_edges import hardly_differs
from icebear.concepts.circuits.nodes import answer_node, mask_of
from icebear.concepts.passes.run import TokenNode
from icebear.concepts.results.result import Relevance
from icebear.concepts.stages.stage_records import WholePart
from icebear.convert import Tabled
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.result_files import SavedResult
from icebear.values import check_int, several, shown


@dataclass(frozen=True, eq=False, repr=False)
class Wiring(SavedResult, Tabled):
    """The fields of `Graph`, and what follows from them: nodes, the direct edges between them, and their numbers.

    Rows of its matrices are targets, the nodes and then the answer (K + 1); columns are `sources`: the tokens (T), the
    nodes (K), and the remainder of each layer and token (L * T).
    """

    model: Model
    relevance: Relevance
    nodes: tuple[Node, ...]
    """By layer, then token."""
    effect: Tensor
    """Measured; without the columns of remainders."""
    random_effect: Tensor
    """(K + 1,) the 95th percentile of the absolute effects of random sources; NaN with fewer than ten of them."""
    estimate: Tensor
    contribution: Tensor
    values: Tensor
    """(2, K + 1) the value of each target in the prompt and in the counterfactual prompt."""
    edge_count: int
    heads: bool
    whole_parts: tuple[WholePart, ...] = ()
    """Attention or the FFN of all layers at some tokens, which is recomputed: its neurons are neither nodes nor
    sources."""
    edge_check: EdgeFaithfulness | None = None
    """What the edges recover, if their number was chosen by it."""
    made_with: dict[str, Any] = field(default_factory=dict)
    saved_groups: tuple[Group, ...] | None = None
    """The groups of a graph that was read from a file."""

    def __str__(self) -> str:
        return f"<Graph of {len(self.nodes)} nodes and {len(self.edges)} edges for {self.answer}, {self.meaning}>"

    @property
    def meaning(self) -> str:
        """What the prompt is compared with, in words."""
        relevance = self.relevance
        if relevance.image:
            return "one image compared with another"
        counterfactual = "".join(token.counterfactual for token in self.tokens)
        return f"{''.join(relevance.prompt.strings)!r} compared with {counterfactual!r}"

    @cached_property
    def tokens(self) -> tuple[CircuitToken, ...]:
        relevance = self.relevance
        assert relevance.counterfactual is not None
        counterfactual = relevance.prompt.strings if relevance.image else relevance.counterfactual.prompts[0]
        return tuple(map(CircuitToken, range(len(counterfactual)), relevance.prompt.strings, counterfactual))

    @cached_property
    def answer(self) -> AnswerNode:
        return answer_node(self.relevance)

    @property
    def token_nodes(self) -> list[TokenNode]:
        return [(node.neuron, node.position) for node in self.nodes]

    @cached_property
    def difference(self) -> Tensor:
        """(K + 1,) the value of each target in the prompt minus that in the counterfactual prompt."""
        return self.values[0] - self.values[1]

    @cached_property
    def hardly_differs(self) -> Tensor:
        """(K + 1,) whether a target's difference is too small to be divided by."""
        return hardly_differs(self.values)

    @cached_property
    def shown(self) -> tuple[CircuitToken | Node, ...]:
        """Tokens and nodes, in the order of `sources`."""
        return (*self.tokens, *self.nodes)

    @cached_property
    def sources(self) -> tuple[EdgeSource, ...]:
        tokens = range(len(self.tokens))
        layers = range((self.estimate.shape[1] - len(self.shown)) // len(tokens))
        return (*self.shown, *(Remainder(layer, token) for layer in layers for token in tokens))

    @cached_property
    def targets(self) -> tuple[EdgeTarget, ...]:
        return (*self.nodes, self.answer)

    @cached_property
    def influence(self) -> Tensor:
        """The influence (K + 1, S) of each edge on the answer along all paths; sums to 1.

        Absolute contributions, normalized over all sources of a target, remainders too (circuit-tracer, `graph.py`).
        Effects rank edges worse, because gradients vanish where attention or a step saturates (docs/truth.md).
        """
        sizes = self.contribution.abs().double()
        normalized = sizes / sizes.sum(-1, keepdim=True).clamp(min=1e-30)
        token_count, count = len(self.tokens), len(self.nodes)
        between = normalized[:, token_count : token_count + count]  # (K + 1, K)
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
        effect, contribution = self.effect[row, column].item(), self.contribution[row, column].item()
        random, difference = self.random_effect[row].item(), self.difference[row].item()
        shares = (None, None) if self.hardly_differs[row] else (effect / difference, contribution / difference)
        return Edge(
            self.shown[column],
            self.targets[row],
            effect,
            self.estimate[row, column].item(),
            None if isnan(random) else random,
            shares[0],
            contribution,
            shares[1],
            self.influence[row, column].item(),
        )

    def sources_of(self, target: EdgeTarget | str, k: int) -> tuple[list[Edge], float | None]:
        """Return the k edges to a target (or its id) with the largest effects, and the contribution of all remainders
        as a share of its difference, None where it hardly differs. Raises `InputError`."""
        k = check_int(k, "The number of edges")
        row = next((row for row, known in enumerate(self.targets) if target in (known, known.id)), None)
        if row is None:
            raise InputError(f"{shown(target)} is not a target of this graph; give one of its nodes, or 'answer'.")
        outside = self.contribution[row, len(self.shown) :].sum() / self.difference[row]
        order = self.effect[row].abs().argsort(descending=True, stable=True)[:k].tolist()
        edges = [self._edge(row, column) for column in order if self.effect[row, column]]
        return edges, None if self.hardly_differs[row] else outside.item()

    def mask(self, nodes: Sequence[Node] | None = None) -> Tensor:
        """Return nodes (default: all) as a choice (L, T, W) of `icebear.concepts.nodes.controls.nodes_of`."""
        width = self.model.ffn_width + self.model.heads * self.heads
        chosen = self.nodes if nodes is None else several(nodes)
        for node in chosen:
            if not isinstance(node, Node):
                raise InputError(f"{shown(node)} is not a node of this graph; choose nodes from graph.nodes.")
        shape = self.model.layers, len(self.tokens), width
        return mask_of(self.model, shape, [(node.neuron, node.position) for node in chosen])

    @property
    def groups(self) -> tuple[Group, ...]:
        """All nodes in groups, which `Graph` finds."""
        raise NotImplementedError
