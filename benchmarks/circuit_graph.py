"""Check circuits: edges by interventions, graphs run by their own edges, and groups against random groups.

python -m benchmarks.circuit_graph --tasks phrase --samples 2 --nodes 20 --out circuits
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
from icebear.concepts.circuits.circuit_records import Node, below
from icebear.concepts.circuits.fixed_neurons import FixedNeurons, FixedPass
from icebear.concepts.circuits.graph import Graph
from icebear.concepts.circuits.nodes import activation_difference
from icebear.concepts.nodes.controls import nodes_of, recovered_shares
from icebear.errors import InputError
from icebear.evaluation.protocol import Evaluation, Lines, Part, Seed, Setting, Table
from icebear.models.model import Model

EDGE_COUNTS = (30, 100, 300, 1000)
"""Numbers of edges that a graph is run by."""
READINGS = {"estimate": ("estimate", "one_sided"), "contribution": ("contribution", "two_sided")}
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
    "choice": {
        "recovered": "median [quartiles] of the share that the edges recover which are chosen so",
        "overlap": "median of the share of them that measured effects choose too",
    },
    "groups": {
        "alike": "median of the mean cosine between members of their measured effects",
        "apart": "median of the mean cosine between groups of the same, lower is better",
        "answer": "median of the mean |change of F| by switching a group off",
    },
}
CHOSEN = (8, 16, 32)
"""Numbers of edges that are chosen by contributions, estimates and measured effects."""
DIFFERS = {"below a half": 0.5, "a half to one": 1.0, "above one": float("inf")}
"""How much the FFN neurons of a layer and token differ, relative to their size in the prompt."""
FEWEST = 10
"""The least number of nodes of a circuit that is judged."""
SOURCES = 15
"""Heads and neurons between which all edges are measured."""


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
    return {
        "correlation of the edges of all pairs together": [{name: pooled(lines, name) for name in READINGS}],
        "estimates beside measured effects, of the edges from 15 nodes": _estimates(lines),
    }


def _estimates(lines: Lines) -> list[dict[str, Any]]:
    """Return how well estimates tell the effects, by the layer of the source and by how much its token differs."""
    edges = pandas.DataFrame([row for line in lines for row in line["sources"]])
    rows = []
    for (layers, differs), group in edges.groupby(["layers", "differs"]):
        large = group[group.above_random]
        wrong = (large.estimate * large.effect < 0).mean()
        correlation = group.estimate.corr(group.effect)
        rows.append(
            {"layers": layers, "differs": differs, "edges": len(group), "pearson": correlation, "wrong sign": wrong}
        )
    return rows


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
    few = circuit(model, pair.prompt, target, contrast, counterfactual=pair.counterfactual, nodes=SOURCES)
    measured = interventions(graph)
    rows = zip((f"{count} edges" for count in EDGE_COUNTS), checks.faithfulness(graph, EDGE_COUNTS), strict=True)
    return {
        **vars(pair),
        "edges": {name: _edges(measured, *columns) for name, columns in READINGS.items()},
        "graph": {name: {column: getattr(row, column) for column in PARTS["graph"]} for name, row in rows},
        "default": {"heads and neurons": {column: shown[column] for column in PARTS["default"]}},
        "choice": {**_choices(few, f"{SOURCES} heads and neurons"), **_choices(graph, f"{nodes} FFN neurons")},
        "sources": _sources(few),
        "groups": _groups(graph, measured),
        "moments": {name: _moments(between(measured), *columns) for name, columns in READINGS.items()},
    }


def _choices(graph: Graph, name: str) -> dict[str, dict[str, float]]:
    """Choose edges by the influence that follows from contributions, as circuits do, from measured effects, and from
    estimates, and run the model along each choice alone."""
    remainders = graph.contribution[:, len(graph.shown) :]
    measured = replace(graph, contribution=torch.cat((graph.effect, remainders), 1))
    orders = {
        "contributions": graph,
        "measured effects": measured,
        "estimates": replace(graph, contribution=graph.estimate),
    }
    chosen = {
        (order, count): replace(ordered, edge_count=count).edges
        for order, ordered in orders.items()
        for count in CHOSEN
    }
    shares = checks.recovered(
        graph, checks.fixed_neurons(graph), [checks.sources_by_target(graph, edges) for edges in chosen.values()]
    )
    ends = {key: {(edge.source.id, edge.target.id) for edge in edges} for key, edges in chosen.items()}
    return {
        f"{name}, {count} edges by {order}": {
            "recovered": share,
            "overlap": len(ends[order, count] & ends["measured effects", count]) / max(len(ends[order, count]), 1),
        }
        for (order, count), share in zip(chosen, shares, strict=True)
    }


def _sources(graph: Graph) -> list[dict[str, Any]]:
    """Return the edges from nodes, with the third of the layers of the source, and how much its token differs there."""
    here, there = graph.relevance.activation("ffn"), activation_difference(graph.relevance, "ffn")
    differs = there.norm(dim=-1) / here.norm(dim=-1).clamp(min=1e-12)  # (L, T)
    rows = []
    for column, source in enumerate(graph.nodes, len(graph.tokens)):
        size = differs[source.neuron.layer, source.position].item()
        for row, target in enumerate(graph.targets):
            if below(source, target, graph.model.task.is_causal):
                limit, effect = graph.random_effect[row].item(), graph.effect[row, column].item()
                rows.append(
                    {
                        "layers": ("first", "middle", "last")[3 * source.neuron.layer // graph.model.layers],
                        "differs": next(name for name, most in DIFFERS.items() if size <= most),
                        "estimate": graph.estimate[row, column].item(),
                        "effect": effect,
                        "above_random": abs(effect) > limit,
                    }
                )
    return rows


def interventions(graph: Graph) -> pandas.DataFrame:
    """Measure each possible edge from a token or node to a node or the answer.

    ``estimate`` and ``contribution`` are predictions. ``one_sided`` is the change of the target when the source alone
    takes its counterfactual value while all other neurons are fixed; ``two_sided`` is the mean of that and of the same
    from the counterfactual prompt to the prompt.
    """
    fixed = FixedNeurons(graph.model, graph.relevance, graph.token_nodes, graph.whole_parts)
    changes = []
    for base in (0, 1):
        rows = [FixedPass(base), *(FixedPass(base, [token]) for token in range(len(graph.tokens)))]
        for number in range(len(graph.nodes)):
            rows.append(FixedPass(base, nodes={number: fixed.value(number, 1 - base)}))
        numbers = fixed.measured(rows, len(graph.nodes)).T  # (1 + sources, K + 1)
        changes.append((numbers[0] - numbers[1:]) * (1 - 2 * base))
    one_sided, two_sided = changes[0], (changes[0] + changes[1]) / 2
    edges = [
        {
            "source": source.id,
            "target": target.id,
            "estimate": graph.estimate[number, row].item(),
            "contribution": graph.contribution[number, row].item(),
            "one_sided": one_sided[row, number].item(),
            "two_sided": two_sided[row, number].item(),
        }
        for row, source in enumerate(graph.shown)
        for number, target in enumerate(graph.targets)
        if below(source, target, graph.model.task.is_causal)
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
