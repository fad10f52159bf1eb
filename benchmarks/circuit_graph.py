"""Check circuits: edges by interventions, graphs run by their own edges, and groups against random groups.

python -m benchmarks.circuit_graph --tasks phrase --samples 2 --nodes 20 --out circuits
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from statistics import fmean, median
from typing import Annotated, Any, ClassVar

import pandas
import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks import task_pairs
from benchmarks.task_pairs import Pair, Pairs, Tasks, answers
from icebear.app.cli.verbs.evaluate import command
from icebear.concepts.circuits import checks
from icebear.concepts.circuits.circuit import circuit
from icebear.concepts.circuits.circuit_records import Node
from icebear.concepts.circuits.graph import Graph
from icebear.concepts.nodes.controls import nodes_of, recovered_shares
from icebear.errors import InputError
from icebear.evaluation.protocol import Evaluation, Lines, Part, Seed, Setting, Table
from icebear.models.model import Model

EDGE_COUNTS = (30, 100, 300, 1000)
"""Numbers of edges that a graph is run by."""
READINGS = {"effect": ("effect", "one_sided"), "contribution": ("contribution", "two_sided")}
"""The columns of `interventions` with a prediction, and with the measurement that judges it."""
PARTS: dict[str, dict[str, str]] = {
    "edges": {
        "pearson": "median [quartiles] of the correlation with direct interventions, of edges from neurons",
        "spearman": "median of the same by ranks",
        "by_target": "median of the median over targets of the correlation of its edges",
        "tokens": "median of the correlation of edges from tokens",
    },
    "graph": {
        "sufficiency": "median [quartiles] of the share of the difference that comes about along these edges alone",
        "random_sufficiency": "median of the same along as many random edges of the graph",
        "matched_sufficiency": "median of the same along as many edges into the same targets from the same layers",
        "all_edges": "median of the same along all edges between the graph's nodes and tokens",
        "edges": "median of the number of edges",
    },
    "default": {
        "sufficiency": "median [quartiles] of the share along the edges that a circuit of heads and neurons shows",
        "random_sufficiency": "median of the same along as many random edges of the graph",
        "all_edges": "median of the share that its nodes recover, with its whole parts",
        "edges": "median of the number of edges",
        "nodes": "median of the number of nodes",
    },
    "groups": {
        "alike": "median of the mean cosine between members of their measured effects",
        "apart": "median of the mean cosine between groups of the same, lower is better",
        "answer": "median of the mean |change of F| by switching a group off",
    },
}
FEWEST = 10
"""The least number of nodes of a circuit that is judged."""


@dataclass(frozen=True)
class Circuits(Evaluation):
    """Check circuits by interventions: edges, whole graphs and groups.

    A circuit is computed for each pair of prompts of a task, and checked by forward passes: one of heads and neurons,
    as `icebear circuit` finds it, and one of --nodes FFN neurons, whose edges and groups are checked too.
    """

    name: ClassVar = "circuits"
    samples: Pairs = 20
    seed: Seed = 0
    tasks: Tasks = "all"
    nodes: Annotated[int, Setting()] = 60

    def __post_init__(self) -> None:
        super().__post_init__()
        task_pairs.pairs_of(self.tasks)
        if self.nodes < FEWEST:
            raise InputError(f"{self.nodes} nodes are too few to correlate their edges; give at least {FEWEST}.")

    def parts(self, model: Model) -> Iterator[Part]:
        for task, usable, _ in task_pairs.usable_by_task(
            model, task_pairs.pairs_of(self.tasks), self.samples, self.seed
        ):
            yield Part(
                {},
                usable,
                partial(check_circuit, model, nodes=self.nodes),
                name=task,
                tables=_tables,
                listings=_listings,
            )


def _tables(lines: Lines) -> dict[str, Table]:
    return {
        part: Table(columns, [{**line, "methods": line[part]} for line in lines]) for part, columns in PARTS.items()
    }


def _listings(lines: Lines) -> dict[str, list[dict[str, Any]]]:
    return {"correlation of the edges of all pairs together": [{name: pooled(lines, name) for name in READINGS}]}


def check_circuit(model: Model, pair: Pair, nodes: int = 60) -> dict[str, Any]:
    """Return all `PARTS` of a pair's circuit, and `moments` for correlations over all pairs; JSON-ready."""
    target, contrast = answers(model, pair)
    graph = circuit(
        model,
        pair.prompt,
        target,
        contrast,
        counterfactual=pair.counterfactual,
        nodes=nodes,
        heads=False,
        edges=EDGE_COUNTS[-1],
    )
    default = circuit(model, pair.prompt, target, contrast, counterfactual=pair.counterfactual)
    shown = {"nodes": len(default.nodes), **vars(default.edge_check)}
    measured = interventions(graph)
    rows = zip((f"{count} edges" for count in EDGE_COUNTS), checks.faithfulness(graph, EDGE_COUNTS), strict=True)
    return {
        **vars(pair),
        "edges": {name: _edges(measured, *columns) for name, columns in READINGS.items()},
        "graph": {name: {column: getattr(row, column) for column in PARTS["graph"]} for name, row in rows},
        "default": {"heads and neurons": {column: shown[column] for column in PARTS["default"]}},
        "groups": _groups(graph, measured),
        "moments": {name: _moments(between(measured), *columns) for name, columns in READINGS.items()},
    }


def interventions(graph: Graph) -> pandas.DataFrame:
    """Measure each possible edge from a token or node to a node or the answer.

    ``effect`` and ``contribution`` are predictions. ``one_sided`` is the change of the target when the source alone
    takes its counterfactual value while all other neurons are fixed; ``two_sided`` is the mean of that and of the same
    from the counterfactual prompt to the prompt.
    """
    fixed, count = checks.FixedNeurons(graph, graph.relevance), len(graph.tokens)
    changes = []
    for base in (0, 1):
        rows = [checks.FixedPass(base), *(checks.FixedPass(base, [token]) for token in range(count))]
        for number in range(len(graph.nodes)):
            rows.append(checks.FixedPass(base, nodes={number: fixed.value(number, 1 - base)}))
        activations, answers = fixed.run(rows)
        values = [activations[number] @ probe.direction for number, probe in enumerate(fixed.nodes)]
        numbers = torch.stack([*values, answers], 1)  # (1 + sources, K + 1)
        changes.append((numbers[0] - numbers[1:]) * (1 - 2 * base))
    one_sided, two_sided = changes[0], (changes[0] + changes[1]) / 2
    edges = [
        {
            "source": source.id,
            "target": target.id,
            "effect": graph.effect[number, row].item(),
            "contribution": graph.contribution[number, row].item(),
            "one_sided": one_sided[row, number].item(),
            "two_sided": two_sided[row, number].item(),
        }
        for row, source in enumerate(graph.shown)
        for number, target in enumerate(graph.targets)
        if checks.below(graph, source, target)
    ]
    return pandas.DataFrame(edges)


def between(edges: pandas.DataFrame) -> pandas.DataFrame:
    """Return the rows of `interventions` whose source is a neuron."""
    return edges[~edges.source.str.startswith("token")]


def _edges(edges: pandas.DataFrame, of: str, truth: str) -> dict[str, float]:
    neurons, tokens = between(edges), edges[edges.source.str.startswith("token")]
    by_target = [group[of].corr(group[truth]) for _, group in neurons.groupby("target") if len(group) > 4]
    return {
        **correlations(neurons[of], neurons[truth]),
        "by_target": median(value for value in by_target if value == value),
        "tokens": tokens[of].corr(tokens[truth]),
    }


def _moments(edges: pandas.DataFrame, of: str, truth: str) -> list[float]:
    """Return the count, the sums, and the sums of squares and products."""
    x, y = edges[of], edges[truth]
    return [len(edges), *map(float, (x.sum(), y.sum(), (x * x).sum(), (y * y).sum(), (x * y).sum()))]


def pooled(lines: Sequence[dict[str, Any]], name: str) -> float:
    """Return Pearson's correlation over the edges of all pairs."""
    n, x, y, xx, yy, xy = (sum(column) for column in zip(*(line["moments"][name] for line in lines), strict=True))
    return (n * xy - x * y) / ((n * xx - x * x) * (n * yy - y * y)) ** 0.5


def _groups(graph: Graph, edges: pandas.DataFrame) -> dict[str, dict[str, float]]:
    """Measure the graph's groups of two and more nodes, and random groups of the same nodes and sizes."""
    effects = edges.pivot(index="source", columns="target", values="one_sided").fillna(0)
    grouped = [group.nodes for group in graph.groups if len(group.nodes) > 1]
    order = [node for nodes in grouped for node in nodes]
    random.Random(0).shuffle(order)
    shuffled = iter(order)
    drawn = [tuple(islice(shuffled, len(nodes))) for nodes in grouped]
    return {"groups": _alike(graph, grouped, effects), "drawn": _alike(graph, drawn, effects)}


def _alike(graph: Graph, groups: Sequence[Sequence[Node]], effects: pandas.DataFrame) -> dict[str, float]:
    if not groups:
        return dict.fromkeys(PARTS["groups"], 0.0)
    members = [torch.tensor(effects.loc[[node.id for node in nodes]].to_numpy(copy=True)) for nodes in groups]
    _, left = recovered_shares(nodes_of(graph.model, graph.relevance), [graph.mask(nodes) for nodes in groups])
    return {
        "alike": fmean(map(_cosine, members)),
        "apart": _cosine(torch.stack([rows.sum(0) for rows in members])) if len(members) > 1 else 0.0,
        "answer": fmean(abs(1 - share) for share in left),
    }


def _cosine(rows: Tensor) -> float:
    """Return the mean cosine over all pairs of different rows."""
    unit = normalize(rows, dim=-1)
    count = len(rows)
    return ((unit @ unit.T).sum().item() - unit.pow(2).sum().item()) / (count * (count - 1))


def correlations(scores: pandas.Series[float], effects: pandas.Series[float]) -> dict[str, float]:
    """Return the correlations of values and of ranks."""
    return {"pearson": scores.corr(effects), "spearman": scores.rank().corr(effects.rank())}


if __name__ == "__main__":
    command(Circuits)()
