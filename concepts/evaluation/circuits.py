"""Whether circuits are true: edges against interventions, graphs run by their own edges, groups against random ones,
and a task's circuit on pairs that it has not seen."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Annotated, Any, ClassVar

import pandas
import torch
from torch import Tensor
from torch.nn.functional import normalize

from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.attribution.controls import Nodes, largest, matched, shares
from icebear.concepts.attribution.result import Relevance
from icebear.concepts.circuits import checks
from icebear.concepts.circuits.checks import READINGS, between
from icebear.concepts.circuits.circuit import circuit
from icebear.concepts.circuits.graph import Graph
from icebear.concepts.circuits.records import Group
from icebear.concepts.evaluation import pairs
from icebear.concepts.evaluation.pairs import Pair, answers
from icebear.concepts.evaluation.protocol import Evaluation, Lines, Option, Part, Samples, Seed, Table, Tasks
from icebear.concepts.models.model import Model
from icebear.errors import InputError

EDGES: tuple[int | None, ...] = (30, 100, 300, None)
"""Of a graph run by its own edges; None for all that are kept."""
PARTS: dict[str, dict[str, str]] = {
    "edges": {
        "pearson": "median [quartiles] of the correlation with direct interventions, of edges from neurons",
        "spearman": "median of the same by ranks",
        "by_target": "median of the median over targets of the correlation of its edges",
        "half": "median of the correlation with interventions of half the size",
        "tokens": "median of the correlation of edges from tokens",
    },
    "graph": {
        "share": "median [quartiles] of the share of the difference that comes about along these edges alone",
        "matched": "median of the same along as many edges into the same targets from the same layers",
        "nodes": "median of the same along all edges between the graph's nodes and tokens",
        "edges": "median of the number of edges",
    },
    "groups": {
        "alike": "median of the mean cosine between members, of what they were measured to move",
        "apart": "median of the mean cosine between groups, of the same, lower is better",
        "answer": "median of the mean |change of F| by switching a group off",
    },
}
TASK = {
    "kept": "median [quartiles] of F of so many nodes alone, on pairs that the task's circuit is not made of",
    "left": "median of |F| without them, lower is better",
}
"""Of a task's circuit, beside each pair's own nodes and matched ones."""
FEWEST = 10
"""Nodes of a circuit that is judged."""
LEARN = 10
"""Pairs that a task's circuit is made of."""
NODES = (100, 1000)
"""Of a task's circuit."""


@dataclass(frozen=True)
class Circuits(Evaluation):
    """Check circuits by interventions: edges, graphs run by their own edges, groups, tasks.

    Each task's pairs have a circuit each, checked by forward passes; and one of them all, checked on other pairs.

    Example:
      icebear evaluate circuits --tasks phrase --samples 2 --nodes 20 --out circuits
    """

    name: ClassVar = "circuits"
    needs: ClassVar = ("evaluate", "circuits")
    samples: Samples = 20
    seed: Seed = 0
    tasks: Tasks = "all"
    nodes: Annotated[int, Option()] = 60

    def __post_init__(self) -> None:
        pairs.named(self.tasks)
        if self.nodes < FEWEST:
            raise InputError(f"{self.nodes} nodes are too few to correlate their edges; give at least {FEWEST}.")

    def parts(self, model: Model) -> Iterator[Part]:
        choices: dict[str, dict[int, Tensor]] = {}
        count = max(self.samples, 3 * LEARN)
        for task, usable, _ in pairs.usable_by_task(model, pairs.named(self.tasks), count, self.seed):
            held_out, choices[task] = of_task(model, usable)
            overlap = overlaps(task, choices)
            yield Part(
                {},
                usable[: self.samples],
                partial(sample, model, nodes=self.nodes),
                name=task,
                tables=partial(_tables, held_out),
                listings=partial(_listings, overlap),
                notes=partial(_notes, len(held_out)),
            )


def _tables(held_out: Lines, lines: Lines) -> dict[str, Table]:
    tables = {
        part: Table(columns, [{**line, "methods": line[part]} for line in lines]) for part, columns in PARTS.items()
    }
    return tables | ({"task": Table(TASK, held_out)} if held_out else {})


def _listings(overlap: list[dict[str, Any]], lines: Lines) -> dict[str, list[dict[str, Any]]]:
    together = {name: pooled(lines, name) for name in READINGS}
    return {"correlation of the edges of all pairs together": [together], "nodes shared with other tasks": overlap}


def _notes(held_out: int, lines: Lines) -> list[str]:
    return [f"a circuit of the task is made of {LEARN} pairs and checked on {held_out} others"] if held_out else []


def sample(model: Model, pair: Pair, nodes: int = 60) -> dict[str, Any]:
    """All `PARTS` of a pair's circuit; JSON-ready. `moments` are for correlations over all pairs."""
    target, contrast = answers(model, pair)
    graph = circuit(model, pair.prompt, target, contrast, counterfactual=pair.other, nodes=nodes)
    whole, half = graph.interventions(), graph.interventions(half=True)
    return {
        "prompt": pair.prompt,
        "other": pair.other,
        "edges": _edges(whole, half),
        "graph": _graph(graph),
        "groups": _groups(graph, whole),
        "moments": {name: _moments(between(whole), *columns) for name, columns in READINGS.items()},
    }


def _edges(whole: pandas.DataFrame, half: pandas.DataFrame) -> dict[str, dict[str, float]]:
    neurons, tokens = between(whole), whole[whole.source.str.startswith("token")]

    def numbers(of: str, truth: str) -> dict[str, float]:
        by_target = [some[of].corr(some[truth]) for _, some in neurons.groupby("target") if len(some) > 4]
        return {
            "pearson": neurons[of].corr(neurons[truth]),
            "spearman": neurons[of].rank().corr(neurons[truth].rank()),
            "by_target": median(value for value in by_target if value == value),
            "half": half[of].corr(half[truth]),
            "tokens": tokens[of].corr(tokens[truth]),
        }

    return {name: numbers(*columns) for name, columns in READINGS.items()}


def _moments(edges: pandas.DataFrame, of: str, truth: str) -> list[float]:
    """Count, sums, and sums of squares and products."""
    x, y = edges[of], edges[truth]
    return [len(edges), *map(float, (x.sum(), y.sum(), (x * x).sum(), (y * y).sum(), (x * y).sum()))]


def pooled(lines: Sequence[dict[str, Any]], name: str) -> float:
    """Pearson's correlation over the edges of all pairs."""
    n, x, y, xx, yy, xy = (sum(column) for column in zip(*(line["moments"][name] for line in lines), strict=True))
    return (n * xy - x * y) / ((n * xx - x * x) * (n * yy - y * y)) ** 0.5


def _graph(graph: Graph) -> dict[str, dict[str, float]]:
    rows = checks.faithfulness(graph, EDGES)
    names = [f"{count} edges" if count else "all edges kept" for count in EDGES]
    return {
        name: {"share": row.share, "matched": row.matched, "nodes": row.nodes, "edges": row.edges}
        for name, row in zip(names, rows, strict=True)
    }


def _groups(graph: Graph, whole: pandas.DataFrame) -> dict[str, dict[str, float]]:
    """Of this graph's groups of two nodes and more, and of random groups of the same nodes and sizes."""
    moved = whole.pivot(index="source", columns="target", values="one_sided").fillna(0)
    profiles = {name: torch.tensor(row.to_numpy(copy=True)) for name, row in moved.iterrows()}
    own = [group for group in graph.groups if len(group.nodes) > 1]
    order = [node for group in own for node in group.nodes]
    random.Random(0).shuffle(order)
    drawn, start = [], 0
    for group in own:
        drawn.append(Group("drawn", tuple(order[start : start + len(group.nodes)])))
        start += len(group.nodes)
    return {"groups": _alike(graph, own, profiles), "drawn": _alike(graph, drawn, profiles)}


def _alike(graph: Graph, groups: Sequence[Group], profiles: dict[Any, Tensor]) -> dict[str, float]:
    if not groups:
        return {"alike": 0.0, "apart": 0.0, "answer": 0.0}
    members = [torch.stack([profiles[node.id] for node in group.nodes]) for group in groups]
    inside = [_cosine(rows) for rows in members]
    nodes = Nodes.of(graph.model, graph.relevances[0])
    _, left = shares(nodes, [graph.mask(group.nodes) for group in groups])
    return {
        "alike": fmean(inside),
        "apart": _cosine(torch.stack([rows.sum(0) for rows in members])) if len(members) > 1 else 0.0,
        "answer": fmean(abs(1 - share) for share in left),
    }


def _cosine(rows: Tensor) -> float:
    """Of all pairs of different rows, the mean."""
    unit = normalize(rows, dim=-1)
    count = len(rows)
    return ((unit @ unit.T).sum().item() - unit.pow(2).sum().item()) / (count * (count - 1))


# --- a task's circuit ----------------------------------------------------------------------------------


def of_task(model: Model, pairs: Sequence[Pair]) -> tuple[list[dict[str, Any]], dict[int, Tensor]]:
    """A task's circuit on pairs that it has not seen, beside each pair's own nodes and matched ones: a line with
    `TASK`'s numbers for each pair (none where too few are of one length); and its choices of nodes, by their number."""
    by_shape: dict[tuple[int, ...], list[Relevance]] = {}
    for pair in pairs:
        target, contrast = answers(model, pair)
        one = attribute(model, pair.prompt, target, contrast, counterfactual=pair.other, sites=("ffn",))
        by_shape.setdefault(tuple(one.ffn.shape), []).append(one)
    most = max(by_shape.values(), key=len)
    if len(most) < 2 * LEARN:
        return [], {}
    scores = torch.stack([relevance.ffn for relevance in most[:LEARN]]).mean(0)
    choices = {count: largest(scores, count) for count in NODES}
    generator = torch.Generator().manual_seed(0)
    names = [f"{kind}, {count}" for count in NODES for kind in ("task", "own", "matched")]
    lines = []
    for relevance in most[LEARN:]:
        chosen = [
            choice
            for count, task in choices.items()
            for choice in (task, largest(relevance.ffn, count), matched(task, generator))
        ]
        carried = zip(*shares(Nodes.of(model, relevance), chosen), strict=True)
        numbers = {name: {"kept": kept, "left": abs(left)} for name, (kept, left) in zip(names, carried, strict=True)}
        lines.append({"methods": numbers})
    return lines, choices


def overlaps(task: str, choices: Mapping[str, dict[int, Tensor]]) -> list[dict[str, Any]]:
    """How alike a task's circuit and those of other tasks of the same length are, and by chance; JSON-ready."""
    rows, mine = [], choices[task].get(NODES[0])
    for other, by_count in choices.items():
        theirs = by_count.get(NODES[0])
        if other != task and mine is not None and theirs is not None and mine.shape == theirs.shape:
            share, chance = checks.shared(theirs, mine)
            rows.append({"tasks": [other, task], "nodes": NODES[0], "shared": share, "by_chance": chance})
    return rows
