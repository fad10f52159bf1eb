"""Whether `stages` names the heads that matter at the answer's token, on models whose mechanism is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from math import comb
from statistics import fmean
from typing import Any

from benchmarks.truth.judge.judged_pairs import Pair, pairs_of
from benchmarks.truth.judge.judging import SITES, Candidates, candidates_of, truth_of
from benchmarks.truth.judge.truth_tables import means
from benchmarks.truth.programs.compiler import Compiled
from benchmarks.truth.programs.decoys import KINDS
from benchmarks.truth.programs.program import Program
from icebear.concepts.methods.difference_rules import DIFFERENCE
from icebear.concepts.stages.stages import stage_sites, stages_of
from icebear.evaluation.protocol import Lines

PAIRS = 10
"""Pairs of each model."""
METRICS = {
    "recall": "of the true heads at the answer's token, the share that stages name, higher is better",
    "precision": "of the heads that stages name, the share that is true, higher is better",
}
Head = tuple[int, int]
"""Layer and index of a head at the answer's token."""


def measured(program: Program, compiled: Compiled, seed: int) -> dict[str, Any]:
    """Return the means of `METRICS` over pairs, and a row for each pair; JSON-ready."""
    pairs = islice(pairs_of(program, seed), PAIRS) if stage_sites(compiled.model) else ()
    rows = [row for pair in pairs if (row := judged(compiled, pair))]
    return {"counts": bool(rows), "methods": means(rows) if rows else {}, "pairs": rows}


def judged(compiled: Compiled, pair: Pair) -> dict[str, Any] | None:
    """Return the numbers of a pair; None if no head at the answer's token is true, or if the tokens there differ."""
    model = compiled.model
    candidates = candidates_of(model, pair, SITES["heads"])
    if candidates is None or pair.prompt[pair.position] != pair.counterfactual[pair.position]:
        return None
    truth, heads = truth_of(candidates), heads_at_answer(candidates)
    groups = [
        {heads[number] for number in group if number in heads}
        for out, group in truth.exchangeable.items()
        if out in heads
    ]
    if not groups:
        return None
    explained = stages_of(model, pair.relevance(model, DIFFERENCE))
    named = {(node.neuron.layer, node.neuron.index) for node in explained.heads}
    true = {heads[number] for number in truth.nodes if number in heads}
    return {
        "reached": explained.reached,
        "named": len(named),
        "decoys": dict(decoys_of(compiled, {*heads.values()} - true, named)),
        "methods": {
            "stages": {
                "recall": fmean(bool(group & named) for group in groups),
                "precision": len(named & true) / len(named) if named else 0.0,
            },
            "as many random heads": at_random(groups, true, len(named), model.layers * model.heads),
        },
    }


def heads_at_answer(candidates: Candidates) -> dict[int, Head]:
    """Return the heads at the answer's token by their numbers as candidates."""
    cells = enumerate(candidates.cells)
    return {number: (layer, index) for number, (layer, token, index) in cells if token == candidates.position}


def at_random(groups: Sequence[set[Head]], true: set[Head], count: int, every: int) -> dict[str, float]:
    """Return the means of `METRICS` over all sets of `count` of all heads."""
    missed = [comb(every - len(group), count) / comb(every, count) for group in groups]
    return {"recall": 1 - fmean(missed), "precision": len(true) / every}


def decoys_of(compiled: Compiled, false: set[Head], named: set[Head]) -> Iterator[tuple[str, list[float]]]:
    """Yield for each kind how many decoys are among the false heads, how many are named, and how many of as many random
    heads would be."""
    model = compiled.model
    for kind in KINDS:
        decoys = {head for head in false if compiled.heads.get(head) == kind}
        if decoys:
            chance = len(decoys) * len(named) / (model.layers * model.heads)
            yield kind, [len(decoys), len(decoys & named), chance]


def by_kind(lines: Lines) -> list[dict[str, Any]]:
    """Return a row for each variant, and for each kind of decoys in it."""
    rows = []
    for variant in dict.fromkeys(line["variant"] for line in lines):
        pairs = [row for line in lines if line["variant"] == variant for row in line["pairs"]]
        facts = {"variant": variant, "pairs": len(pairs), "reached": sum(row["reached"] for row in pairs)}
        counts = {kind: [row["decoys"][kind] for row in pairs if kind in row["decoys"]] for kind in KINDS}
        sums = {kind: map(sum, zip(*each, strict=True)) for kind, each in counts.items() if each}
        columns = ("decoys that differ", "named", "named by chance")
        rows += [{**facts, "kind": kind, **dict(zip(columns, row, strict=True))} for kind, row in sums.items()]
        rows += [] if sums else [{**facts, "kind": "", **dict.fromkeys(columns)}]
    return rows
