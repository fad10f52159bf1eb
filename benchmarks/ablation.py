"""Sufficiency and necessity of the FFN neurons that a score ranks first, at nine sizes.

python -m benchmarks.ablation --tasks capitals --samples 4 --methods difference,gxi,matched --out ablation
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks import task_pairs
from benchmarks.baselines import ControlledEvaluation
from benchmarks.task_pairs import Pair, Pairs, Tasks, answers, relevance_of
from icebear.app.cli.verbs.evaluate import command
from icebear.concepts.methods.difference_rules import DIFFERENCE
from icebear.concepts.methods.method import Method
from icebear.concepts.nodes.controls import largest, nodes_of, random_nodes, recovered_shares
from icebear.concepts.passes.patching import PatchableNodes
from icebear.evaluation.protocol import DataFile, Lines, Part
from icebear.models.model import Model
from icebear.models.objective import objective_of

SIZES = (1, 3, 10, 30, 100, 300, 1000, 3000, 10000)
"""Numbers of nodes; all nodes, where there are fewer."""
METRICS = {
    "distance": "mean |1 - F| over the sizes (a log axis), these nodes alone, lower is better",
    "remaining": "mean |F| over the sizes, without these nodes, lower is better",
    "sufficiency_100": "median [quartiles] of F of 100 nodes alone: 1 is the whole answer",
    "remaining_100": "median of |F| without 100 nodes, lower is better",
    "sufficiency_1000": "median of F of 1,000 nodes alone",
    "remaining_1000": "median of |F| without 1,000 nodes, lower is better",
}
MATCHED = "matched"


class Compared:
    """A pair with the relevance of its FFN neurons by difference rules."""

    def __init__(self, model: Model, pair: Pair) -> None:
        self.model, self.pair = model, pair
        self.answer = answers(model, pair)  # target and contrast
        self.relevance = relevance_of(model, pair, self.answer, "ffn", DIFFERENCE)

    @property
    def exchangeable(self) -> PatchableNodes:
        return nodes_of(self.model, self.relevance)

    def scores(self, method: Method | str) -> Tensor:
        """Return (L, T, F) the scores of a method, or of a control of `CONTROLS`; nodes are ranked by their size.

        A method that needs a counterfactual, or names the place of its multipliers (@), compares the two prompts; any
        other method explains the prompt alone.
        """
        if isinstance(method, str):
            return CONTROLS[method](self)
        if method == DIFFERENCE:
            return self.relevance.ffn
        if method.needs_counterfactual:
            return relevance_of(self.model, self.pair, self.answer, "ffn", method).ffn
        return method.neuron_scores(self.model, objective_of(self.model, [self.pair.prompt], *self.answer), "ffn")


CONTROLS: dict[str, Callable[[Compared], Tensor]] = {
    "change": lambda compared: compared.exchangeable.change(),
    MATCHED: lambda compared: compared.relevance.ffn,
}
"""The size of the activation difference; and random nodes, as many at the same layers and tokens as difference rules
take."""
METHODS = (
    *("difference", "difference-constant", "attnlrp", "attnlrp@prompt", "attnlrp@midpoint"),
    *("cp-lrp", "cp-lrp@prompt", "cp-lrp@midpoint", "gxi", "gxi@prompt", "gxi@midpoint", "ig@path"),
    *CONTROLS,
)


def ablate(model: Model, pair: Pair, methods: Mapping[str, Method | str]) -> dict[str, Any]:
    """Return each score's `METRICS` on a pair, with its curves over `SIZES`; JSON-ready."""
    compared = Compared(model, pair)
    nodes = compared.exchangeable
    ends = nodes.ends
    generator = torch.Generator().manual_seed(0)
    results = {}
    for name, method in methods.items():
        scores = compared.scores(method)
        choices = [largest(scores, size) for size in SIZES]
        if name == MATCHED:
            choices = [random_nodes(choice, "ffn", generator) for choice in choices]
        sufficiency, remaining = recovered_shares(nodes, choices)
        row = {"distance": fmean(abs(1 - x) for x in sufficiency), "remaining": fmean(map(abs, remaining))}
        for size in (100, 1000):
            index = SIZES.index(size)
            row |= {f"sufficiency_{size}": sufficiency[index], f"remaining_{size}": abs(remaining[index])}
        results[name] = {**row, "curve_sufficiency": sufficiency, "curve_remaining": remaining}
    return {**vars(pair), "difference": ends[0] - ends[1], "methods": results}


def ratios(lines: Lines) -> str:
    """Return a note on the ratio of means: F of 100 and 1,000 nodes over all pairs together."""
    weights = [line["difference"] for line in lines]
    parts = []
    for name in lines[0]["methods"]:
        rows = [line["methods"][name] for line in lines]
        means = [fmean((row[f"sufficiency_{size}"] for row in rows), weights) for size in (100, 1000)]
        parts.append(f"{name} {means[0]:.2f} and {means[1]:.2f}")
    return f"ratio of means, F of 100 and 1,000 nodes alone: {', '.join(parts)}"


@dataclass(frozen=True)
class AblationCurves(ControlledEvaluation):
    """Measure the sufficiency and necessity of the nodes (FFN neurons at a token) that a method ranks first.

    Sizes are 1 to 10,000 nodes. For sufficiency, all other nodes take their counterfactual values; for necessity, the
    nodes themselves do. Methods are difference, cp-lrp@midpoint, gxi and others (docs/evaluate.md). The control
    "matched" takes random nodes: as many at each layer and token as the method difference takes. Instead of the tasks,
    --data takes JSON lines with clean_prefix, patch_prefix, clean_answer and patch_answer. Each task has a folder in
    --out.

    Example:
      python -m benchmarks.ablation --tasks capitals --samples 4 --methods difference,gxi,matched --out ablation
    """

    name: ClassVar = "ablation"
    usual: ClassVar = METHODS
    controls: ClassVar = tuple(CONTROLS)
    tasks: Tasks = "all"
    data: DataFile = None
    samples: Pairs = 20

    def parts(self, model: Model) -> Iterator[Part]:
        tasks = {"data": task_pairs.read_pairs(self.data)} if self.data else task_pairs.pairs_of(self.tasks)
        methods = self.chosen()
        for task, usable, tried in task_pairs.usable_by_task(model, tasks, self.samples, self.seed):
            note = f"{task}: the model is right on {len(usable)} of {tried} pairs"
            yield Part(
                METRICS,
                usable,
                partial(ablate, model, methods=methods),
                name=task,
                methods={name: name for name in methods},
                settings={"steps": list(SIZES), "axes": ["number of nodes", "share of the difference"]},
                notes=lambda lines: [note, ratios(lines)],  # noqa: B023
            )


if __name__ == "__main__":
    command(AblationCurves)()
