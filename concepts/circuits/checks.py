"""Checks of a graph's edges by interventions: the whole graph run along its edges.

All checks are forward passes with fixed neurons (`fixed_neurons`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from statistics import fmean
from typing import TYPE_CHECKING

import torch

from icebear.concepts.circuits.circuit_records import Edge, EdgeFaithfulness, below
from icebear.concepts.circuits.fixed_neurons import FixedNeurons, FixedPass
from icebear.values import check_int, seed_of

if TYPE_CHECKING:
    from icebear.concepts.circuits.wiring import Wiring

RANDOM_EDGE_SETS = 5
"""Sets of random edges of each control."""
EDGE_COUNTS = (1, 2, 4, 8, 16, 32, 64, 100)
"""The numbers of edges among which a circuit takes the least that recovers enough."""
ENOUGH = 0.8
"""This share of what all edges recover is enough."""
CHANCE = 0.1
"""Edges are shown if they recover more than random ones by more than this share of what all edges recover."""


SourceNumbers = list[list[int]]
"""For each target the numbers of its sources, tokens first, then nodes."""


def faithfulness(graph: Wiring, counts: Sequence[int | None], seed: int = 0) -> list[EdgeFaithfulness]:
    """Return `Graph.faithfulness` for several numbers of edges."""
    generator = torch.Generator().manual_seed(seed_of(seed))
    counts = [count if count is None else check_int(count, "The number of edges", 0) for count in counts]
    possible, chosen = _possible(graph), [graph.edges[:count] for count in counts]
    choices, connected = [possible], _connected(graph)
    for edges in chosen:
        by_target = sources_by_target(graph, edges)
        choices += [by_target, *_random_edges(graph, connected, len(edges), generator)]
        choices += (_matched_edges(graph, by_target, possible, generator) for _ in range(RANDOM_EDGE_SETS))
    all_edges, *shares = recovered(graph, fixed_neurons(graph), choices)
    results, size = [], 1 + 2 * RANDOM_EDGE_SETS  # the edges, random ones, and random ones into the same targets
    for number, edges in enumerate(chosen):
        share, *drawn = shares[number * size : (number + 1) * size]
        random, matched = fmean(drawn[:RANDOM_EDGE_SETS]), fmean(drawn[RANDOM_EDGE_SETS:])
        results.append(EdgeFaithfulness(len(edges), len(connected), share, random, all_edges, matched))
    return results


def enough_edges(graph: Wiring) -> tuple[int, EdgeFaithfulness]:
    """Return how many edges are shown, and what they recover beside random ones: the least of `EDGE_COUNTS`, the most
    influential edges first, that recovers `ENOUGH` of what all edges recover, or the most; none where random ones
    recover as much, or all edges nothing."""
    counts = sorted({min(count, len(graph.edges)) for count in EDGE_COUNTS})
    edges = [sources_by_target(graph, graph.edges[:count]) for count in counts]
    fixed = fixed_neurons(graph)
    everything, *shares = recovered(graph, fixed, [_possible(graph), *edges])
    enough = (count for count, share in zip(counts, shares, strict=True) if share >= ENOUGH * everything)
    count = next(enough, counts[-1])
    connected, generator = _connected(graph), torch.Generator().manual_seed(0)
    random = fmean(recovered(graph, fixed, _random_edges(graph, connected, count, generator)))
    share, total = shares[counts.index(count)], len(connected)
    check = EdgeFaithfulness(count, total, share, random, everything)
    is_above = everything > 0 and (count == total or share - random > CHANCE * everything)
    return count if is_above else 0, check


def _possible(graph: Wiring) -> SourceNumbers:
    """Return all edges between tokens and nodes."""
    return [
        [number for number, source in enumerate(graph.shown) if below(source, target, graph.model.task.is_causal)]
        for target in graph.targets
    ]


def _connected(graph: Wiring) -> list[tuple[int, int]]:
    """Return the edges that have an influence on the answer, each a target and a source."""
    return [(row, n) for row, numbers in enumerate(_possible(graph)) for n in numbers if graph.influence[row, n]]


def _random_edges(
    graph: Wiring, connected: Sequence[tuple[int, int]], count: int, generator: torch.Generator
) -> list[SourceNumbers]:
    """Draw `RANDOM_EDGE_SETS` times as many edges of the graph."""
    draws: list[SourceNumbers] = []
    for _ in range(RANDOM_EDGE_SETS):
        chosen: SourceNumbers = [[] for _ in graph.targets]
        for index in torch.randperm(len(connected), generator=generator)[:count].tolist():
            row, number = connected[index]
            chosen[row].append(number)
        draws.append(chosen)
    return draws


def sources_by_target(graph: Wiring, edges: Sequence[Edge]) -> SourceNumbers:
    numbers = {source.id: number for number, source in enumerate(graph.shown)}
    sources: dict[str, list[int]] = {target.id: [] for target in graph.targets}
    for edge in edges:
        sources[edge.target.id].append(numbers[edge.source.id])
    return list(sources.values())


def _matched_edges(
    graph: Wiring, by_target: SourceNumbers, possible: SourceNumbers, generator: torch.Generator
) -> SourceNumbers:
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


def fixed_neurons(graph: Wiring) -> FixedNeurons:
    return FixedNeurons(graph.model, graph.relevance, graph.token_nodes, graph.whole_parts)


def recovered(graph: Wiring, fixed: FixedNeurons, choices: Sequence[SourceNumbers]) -> list[float]:
    """Return the share of the difference between both prompts that each of several choices of edges recovers."""
    relevance, count, ends = graph.relevance, len(graph.tokens), []
    for by_target in choices:
        passes: list[FixedPass] = []  # that each node, then the answer, is computed in
        for sources in by_target:
            tokens, nodes = [n for n in sources if n < count], [n - count for n in sources if n >= count]
            passes.append(FixedPass(1, tokens, {number: passes[number] for number in nodes}))
        ends.append(passes[-1])
    _, answers = fixed.run(ends)
    (number_c,), difference = relevance.counterfactual.numbers, relevance.conservation().target  # type: ignore[union-attr]
    return [(answer - number_c) / difference for answer in answers.tolist()]
