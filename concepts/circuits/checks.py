"""Checks of a graph's edges by interventions: the whole graph run along its edges.

All checks are forward passes with fixed neurons: every neuron where edges stop keeps its value in one of the prompts,
or takes a given value. A node is read before it is fixed. Whole parts are recomputed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import groupby
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from icebear.concepts.circuits.circuit_records import AnswerNode, Edge, EdgeFaithfulness, Node, Token
from icebear.concepts.circuits.edges import inputs_of
from icebear.concepts.circuits.nodes import pair_of, probes
from icebear.concepts.circuits.stages_set import whole_tokens
from icebear.concepts.passes.inputs import input_hooks
from icebear.concepts.passes.prefix import after_common_beginning
from icebear.concepts.passes.run import Logits, first_layers, forward
from icebear.concepts.passes.sites import by_site_layer, hooks
from icebear.concepts.results.result import Relevance
from icebear.errors import InputError
from icebear.values import check_int, seed_of

if TYPE_CHECKING:
    from icebear.concepts.circuits.wiring import Wiring

TOKENS_PER_PASS = 256
"""Rows times tokens of a forward pass."""
RANDOM_DRAWS = 5
"""Sets of random edges of each control."""
EDGE_COUNTS = (1, 2, 4, 8, 16, 32, 64, 100)
"""The numbers of edges among which a circuit takes the least that recovers enough."""
ENOUGH = 0.8
"""This share of what all edges recover is enough."""
CHANCE = 0.1
"""Edges are shown if they recover more than random ones by more than this share of what all edges recover."""


@dataclass(frozen=True, eq=False)
class FixedPass:
    """A forward pass in which everything keeps its value in one prompt, with exceptions."""

    base: int
    """0 for the prompt, 1 for the counterfactual prompt."""
    tokens: Sequence[int] = ()
    """Tokens with the embedding that they have in the other prompt."""
    nodes: Mapping[int, Tensor] = field(default_factory=dict)
    """Number of a node -> the values (n,) that it takes."""

    @property
    def key(self) -> tuple[Any, ...]:
        """What two equal passes have in common."""
        values = sorted((number, tuple(x.tolist())) for number, x in self.nodes.items())
        return self.base, tuple(sorted(self.tokens)), tuple(values)


class FixedNeurons:
    """The neurons of a graph in both prompts of a pair."""

    def __init__(self, graph: Wiring, relevance: Relevance) -> None:
        if relevance.image:
            raise InputError("The check of edges exchanges tokens, and an image has no tokens; leave out the check.")
        self.model, token_nodes = graph.model, [(node.neuron, node.position) for node in graph.nodes]
        self.pair, start = after_common_beginning(
            self.model, pair_of(relevance), min(token for _, token in token_nodes)
        )
        self.start, self.recomputed = start, whole_tokens(graph.whole_parts, len(graph.tokens))
        self.nodes = [replace(probe, position=probe.position - start) for probe in probes(relevance, token_nodes)]
        both = relevance.neurons.activation, relevance.neurons.counterfactual
        self.values = [{site: x[:, start:] for site, x in values.items()} for values in both]
        """Site -> activations (L, T, N) after the common beginning, in the prompt and in the counterfactual prompt."""
        self.inputs = inputs_of(self.model, self.pair)
        """The input (2, T, D) of each stack."""
        self.numbers = by_site_layer(self.nodes)

    def value(self, number: int, base: int) -> Tensor:
        """Return the activations (n,) of a node in one of the prompts."""
        probe = self.nodes[number]
        return self.values[base][probe.site][probe.layer, probe.position, probe.columns]

    def run(self, rows: Sequence[FixedPass], layers: int | None = None) -> tuple[dict[int, Tensor], Tensor]:
        """Return the activations (R, n) of each node before it is fixed, and the numbers explained (R,).

        layers: run only the first layers, and the nodes in them; the numbers explained then have no meaning.
        """
        size = max(1, TOKENS_PER_PASS // self.pair.batch.spans[1].stop)
        few = layers is not None and self.model.task.stacks == 1
        keys = [row.key for row in rows]  # few sources of low nodes are connected, so many rows are alike
        different = dict(zip(keys, rows, strict=True))
        numbers = {key: number for number, key in enumerate(different)}
        of_row, rows = [numbers[key] for key in keys], list(different.values())
        with self.model.lock, first_layers(self.model, layers) if few and layers else nullcontext():
            parts = [self._run(rows[start : start + size]) for start in range(0, len(rows), size)]
        nodes = {number: torch.cat([seen[number] for seen, _ in parts])[of_row] for number in parts[0][0]}
        return nodes, torch.cat([answers for _, answers in parts])[of_row]

    def _run(self, rows: Sequence[FixedPass]) -> tuple[dict[int, Tensor], Tensor]:
        seen: dict[int, Tensor] = {}
        objective = self.pair.rows([row.base for row in rows])
        spans = objective.batch.spans

        def fix(site: str, layer: int, x: Tensor) -> Tensor:
            span = objective.batch.span_of(self.model.stack_of(layer))
            fixed = torch.stack([self.values[row.base][site][layer, span] for row in rows]).to(x)
            for number in self.numbers.get((site, layer), []):
                position, columns = self.nodes[number].position - span.start, self.nodes[number].columns
                seen[number] = x[:, position, columns].float().cpu()
                for index, row in enumerate(rows):
                    if number in row.nodes:
                        fixed[index, position, columns] = row.nodes[number].to(x)
            if site not in self.recomputed:
                return fixed
            return torch.where(self.recomputed[site][self.start :, None].to(x.device), x, fixed)

        def read(stack: int, x: Tensor) -> Tensor:
            inputs, start = torch.stack([self.inputs[stack][row.base] for row in rows]), spans[stack].start
            for index, row in enumerate(rows):
                at = [
                    token - self.start - start
                    for token in row.tokens
                    if start <= token - self.start < spans[stack].stop
                ]
                inputs[index, at] = self.inputs[stack][1 - row.base, at]
            return inputs.to(x)

        site_layers = [(site, layer) for site in self.values[0] for layer in self.model.layers_with(site)]
        with input_hooks(self.model, read), hooks(self.model, site_layers, fix):
            answers = forward(self.model, Logits(objective), [])
        return seen, answers.float().cpu()


def below(graph: Wiring, source: Token | Node, target: Node | AnswerNode) -> bool:
    """Return whether a source can have an effect on a target."""
    before = source.position <= target.position or not graph.model.task.is_causal
    return source.height < target.height and before


Sources = list[list[int]]
"""For each target the numbers of its sources, tokens first, then nodes."""


def faithfulness(graph: Wiring, counts: Sequence[int | None], seed: int = 0) -> list[EdgeFaithfulness]:
    """Return `Graph.faithfulness` for several numbers of edges."""
    generator = torch.Generator().manual_seed(seed_of(seed))
    counts = [count if count is None else check_int(count, "The number of edges", 0) for count in counts]
    possible, chosen = _possible(graph), [graph.edges[:count] for count in counts]
    choices, connected = [possible], _connected(graph)
    for edges in chosen:
        by_target = _by_target(graph, edges)
        choices += [by_target, *_random_edges(graph, connected, len(edges), generator)]
        choices += (_matched_edges(graph, by_target, possible, generator) for _ in range(RANDOM_DRAWS))
    all_edges, *measured = _shares(graph, choices)
    total = len(connected)
    rows = zip(chosen, zip(*[iter(measured)] * (1 + 2 * RANDOM_DRAWS), strict=True), strict=True)
    return [
        EdgeFaithfulness(len(edges), total, share, fmean(drawn[:RANDOM_DRAWS]), all_edges, fmean(drawn[RANDOM_DRAWS:]))
        for edges, (share, *drawn) in rows
    ]


def enough_edges(graph: Wiring) -> tuple[int, EdgeFaithfulness]:
    """Return how many edges are shown, and what they recover beside random ones: the least of `EDGE_COUNTS`, the most
    influential edges first, that recovers `ENOUGH` of what all edges recover, or the most; none where random ones
    recover as much, or all edges nothing."""
    counts = sorted({min(count, len(graph.edges)) for count in EDGE_COUNTS})
    edges = [_by_target(graph, graph.edges[:count]) for count in counts]
    everything, *shares = _shares(graph, [_possible(graph), *edges])
    enough = (count for count, share in zip(counts, shares, strict=True) if share >= ENOUGH * everything)
    count = next(enough, counts[-1])
    connected, generator = _connected(graph), torch.Generator().manual_seed(0)
    random = fmean(_shares(graph, _random_edges(graph, connected, count, generator)))
    share, total = shares[counts.index(count)], len(connected)
    check = EdgeFaithfulness(count, total, share, random, everything)
    is_above = everything > 0 and (count == total or share - random > CHANCE * everything)
    return count if is_above else 0, check


def _possible(graph: Wiring) -> Sources:
    """Return all edges between tokens and nodes."""
    return [
        [number for number, source in enumerate(graph.shown) if below(graph, source, target)]
        for target in graph.targets
    ]


def _connected(graph: Wiring) -> list[tuple[int, int]]:
    """Return the edges that have an influence on the answer, each a target and a source."""
    return [(row, n) for row, numbers in enumerate(_possible(graph)) for n in numbers if graph.influence[row, n]]


def _random_edges(
    graph: Wiring, connected: Sequence[tuple[int, int]], count: int, generator: torch.Generator
) -> list[Sources]:
    """Draw `RANDOM_DRAWS` times as many edges of the graph."""
    draws: list[Sources] = []
    for _ in range(RANDOM_DRAWS):
        chosen: Sources = [[] for _ in graph.targets]
        for index in torch.randperm(len(connected), generator=generator)[:count].tolist():
            row, number = connected[index]
            chosen[row].append(number)
        draws.append(chosen)
    return draws


def _by_target(graph: Wiring, edges: Sequence[Edge]) -> Sources:
    numbers = {source.id: number for number, source in enumerate(graph.shown)}
    sources: dict[str, list[int]] = {target.id: [] for target in graph.targets}
    for edge in edges:
        sources[edge.target.id].append(numbers[edge.source.id])
    return list(sources.values())


def _matched_edges(graph: Wiring, by_target: Sources, possible: Sources, generator: torch.Generator) -> Sources:
    """Draw as many edges into each target from each layer (tokens are one layer), see `EdgeFaithfulness`."""
    drawn, connected = [], (graph.contribution != 0).tolist()
    for row, (edges, candidates) in enumerate(zip(by_target, possible, strict=True)):
        chosen: list[int] = []
        able = [number for number in candidates if connected[row][number]]
        for _, group in groupby(able, key=lambda number: graph.shown[number].height):
            numbers = list(group)
            order = [numbers[index] for index in torch.randperm(len(numbers), generator=generator).tolist()]
            order.sort(key=lambda number: number in edges)
            chosen += order[: len(set(numbers) & set(edges))]
        drawn.append(chosen)
    return drawn


def _shares(graph: Wiring, choices: Sequence[Sources]) -> list[float]:
    """Return the share of the difference between both prompts that each of several choices of edges recovers."""
    relevance, count = graph.relevance, len(graph.tokens)
    fixed = FixedNeurons(graph, relevance)
    values: list[dict[int, Tensor]] = [{} for _ in choices]

    def rows(target: int) -> list[FixedPass]:
        return [
            FixedPass(
                1,
                [number for number in sources[target] if number < count],
                {number - count: known[number - count] for number in sources[target] if number >= count},
            )
            for sources, known in zip(choices, values, strict=True)
        ]

    for _, group in groupby(range(len(graph.nodes)), key=lambda number: graph.nodes[number].height):
        level = list(group)
        nodes, _ = fixed.run([row for number in level for row in rows(number)], graph.nodes[level[0]].neuron.layer + 1)
        for index, number in enumerate(level):
            for choice, known in enumerate(values):
                known[number] = nodes[number][index * len(choices) + choice]
    _, answers = fixed.run(rows(len(graph.nodes)))
    (counterfactual_number,), difference = relevance.counterfactual.numbers, relevance.conservation().target  # type: ignore[union-attr]
    return [(answer - counterfactual_number) / difference for answer in answers.tolist()]
