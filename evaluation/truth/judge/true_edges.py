"""How well edges of circuits agree with path patching, on models whose mechanism is known."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pandas

from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.circuits.circuit import graph_of as graph_of_nodes
from icebear.concepts.circuits.graph import Graph
from icebear.concepts.circuits.nodes import scored
from icebear.concepts.nodes.controls import largest
from icebear.concepts.statistics import auroc
from icebear.evaluation.truth.judge.judged_pairs import Pair, pairs_of
from icebear.evaluation.truth.judge.truth_tables import means
from icebear.evaluation.truth.programs.compiler import Compiled
from icebear.evaluation.truth.programs.program import Program

GRAPH_NODES = 20
"""Nodes of a graph."""
PAIRS = 3
"""Pairs of each model, a graph each."""
TRUE = 0.1
"""An edge is true if patching it changes its target by this share of what the target's largest edge does."""
METRICS = {
    "auroc": "probability that a true edge has a larger score than another edge, higher is better",
    "precision": "of as many first edges as there are true ones, the share that is true, higher is better",
    "recovered": "recovered along as many edges as there are true ones, the most influential first, higher is better",
}
READINGS = ("contribution", "effect", "random")
"""Edges by difference rules, by the gradient, and at random."""


def measured(program: Program, compiled: Compiled, seed: int) -> dict[str, Any]:
    """Return the means of `COLUMNS` over pairs by reading; JSON-ready."""
    rows = [judged(graph_of(compiled, pair), seed) for pair in islice(pairs_of(program, seed), PAIRS)]
    return {"methods": means(rows)}


def graph_of(compiled: Compiled, pair: Pair) -> Graph:
    """Return the circuit of the nodes with the largest absolute relevance: a program's nodes may have either sign."""
    options: dict[str, Any] = {"counterfactual": pair.counterfactual, "position": pair.position}
    relevance = attribute(compiled.model, pair.prompt, pair.target, pair.contrast, **options)
    scores = scored(compiled.model, relevance, heads=True)
    return graph_of_nodes(compiled.model, [relevance], scores, largest(scores, GRAPH_NODES), heads=True)


def judged(graph: Graph, seed: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return `COLUMNS` by reading. Random edges have the targets and layers of those by contribution."""
    edges = graph.interventions()
    edges["random"] = np.random.default_rng(seed).random(len(edges))
    is_true = true_edges(edges)
    result: dict[str, dict[str, float]] = {}
    for name in READINGS:
        scores = relative(edges, edges[name].abs()).to_numpy()
        best = np.argsort(-scores, kind="stable")[: is_true.sum()]
        result[name] = {"auroc": auroc(scores, is_true), "precision": float(is_true[best].mean())}
    graph = replace(graph, edge_count=int(is_true.sum()))
    by_contribution = graph.faithfulness(seed=seed)
    by_effect = replace(graph, contribution=graph.effect).faithfulness(seed=seed)
    result["effect"]["recovered"] = recovered(by_effect.sufficiency)
    result["random"]["recovered"] = recovered(by_contribution.random_sufficiency)
    result["contribution"]["recovered"] = recovered(by_contribution.sufficiency)
    return {"methods": result}


def recovered(sufficiency: float) -> float:
    """Return a sufficiency with overshoot counted against it."""
    return max(0.0, 1 - abs(1 - sufficiency))


def true_edges(edges: pandas.DataFrame) -> np.ndarray:
    """Return whether patching the source changes the target, in the prompt or in the counterfactual."""
    in_counterfactual = 2 * edges.two_sided - edges.one_sided
    sizes = pandas.concat((edges.one_sided.abs(), in_counterfactual.abs()), axis=1).max(axis=1)
    return (relative(edges, sizes) > TRUE).to_numpy()


def relative(edges: pandas.DataFrame, sizes: pandas.Series[float]) -> pandas.Series[float]:
    """Return sizes as shares of the largest one of the same target, because targets have different units."""
    return sizes / sizes.groupby(edges.target).transform("max").clip(lower=1e-6)
