"""Whether the nodes that a score ranks first carry the answer: kept alone, and left out, at nine sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Annotated, Any, ClassVar

import pandas
import torch
from torch import Tensor

from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.attribution.controls import Nodes, largest, matched, recorded, shares
from icebear.concepts.attribution.result import Relevance
from icebear.concepts.evaluation import pairs
from icebear.concepts.evaluation.pairs import Pair, answers
from icebear.concepts.evaluation.protocol import DataFile, FfnOrHead, Lines, MethodEvaluation, Option, Part, Tasks
from icebear.concepts.methods.lrp import DIFFERENCE
from icebear.concepts.methods.method import Method
from icebear.concepts.models.model import Model
from icebear.concepts.models.objective import objective_of
from icebear.concepts.passes.neurons import Values
from icebear.concepts.passes.run import forward
from icebear.concepts.passes.targets import Logits
from icebear.errors import InputError

SIZES = (1, 3, 10, 30, 100, 300, 1000, 3000, 10000)
"""Nodes kept or left out; all, where there are not so many."""

COLUMNS = {
    "distance": "mean |1 - F| over the sizes (a log axis), the nodes kept, lower is better",
    "left": "mean |F| over the sizes, the nodes left out, lower is better",
    "kept_100": "median [quartiles] of F of 100 nodes: 1 is the whole answer",
    "left_100": "median of |F| without 100 nodes, lower is better",
    "kept_1000": "median of F of 1,000 nodes",
    "left_1000": "median of |F| without 1,000 nodes, lower is better",
}
PATCHED = {
    "pearson": "median [quartiles] over pairs of the correlation with what patching the node alone takes away",
    "spearman": "median of the same by ranks",
}
DRAWN = 200
"""Of the union of the scores' as many largest nodes, and of all others, for `PATCHED`."""


@dataclass(frozen=True)
class Compared:
    """A pair with what is known of it before any score: a relevance by difference rules."""

    model: Model
    pair: Pair
    target: int
    contrast: int
    site: str
    """ffn or head"""
    relevance: Relevance

    @classmethod
    def of(cls, model: Model, pair: Pair, site: str = "ffn") -> Compared:
        target, contrast = answers(model, pair)
        at = (recorded(site),)
        relevance = attribute(
            model, pair.prompt, target, contrast, counterfactual=pair.other, method="difference", sites=at
        )
        return cls(model, pair, target, contrast, site, relevance)

    @property
    def exchangeable(self) -> Nodes:
        return Nodes.of(self.model, self.relevance, self.site)

    def nodes(self, relevance: Relevance) -> Tensor:
        """(L, T, N) of the site, (L, T, H) of heads."""
        return relevance.heads() if self.site == "head" else relevance.of(self.site)


Control = Callable[[Compared], Tensor]
"""(L, T, N) by whose size nodes are ranked."""


def _in_rounds(compared: Compared) -> Tensor:
    """Chosen size by size: by the gradient where those chosen so far are in place, all others as in the other one."""
    nodes = compared.exchangeable
    chosen = torch.zeros(nodes.shape, dtype=torch.bool)
    rank = torch.zeros(nodes.shape)
    for size in SIZES:
        gains = nodes.gains(chosen).masked_fill(chosen, 0)
        new = largest(gains, size - int(chosen.sum()))
        rank += new * (len(SIZES) - SIZES.index(size) + gains.abs() / gains.abs().max().clamp(min=1e-30) / 2)
        chosen |= new
    return rank


MATCHED = "matched"
CONTROLS: dict[str, Control] = {
    "rounds": _in_rounds,
    "change": lambda compared: compared.exchangeable.change(),
    MATCHED: lambda compared: compared.nodes(compared.relevance),
}
"""The gradient where those chosen so far are in place; the size of the change; and as many nodes as difference rules
take, at the same layers and tokens, drawn at random."""
METHODS = (
    *("difference", "difference-constant", "attnlrp", "attnlrp@prompt", "attnlrp@midpoint"),
    *("cp-lrp", "cp-lrp@prompt", "cp-lrp@midpoint", "gxi", "gxi@prompt", "gxi@midpoint", "ig@path"),
    *CONTROLS,
)
"""Compared with the counterfactual where a method needs it, or names the place of its multipliers (@); else of the
prompt alone."""


def score(compared: Compared, method: Method | str) -> Tensor:
    """(L, T, N) by whose size nodes are ranked, of a method or of a control of `CONTROLS`."""
    if isinstance(method, str):
        return CONTROLS[method](compared)
    if method == DIFFERENCE:
        return compared.nodes(compared.relevance)
    model, pair, answer = compared.model, compared.pair, (compared.target, compared.contrast)
    (site,) = compared.relevance.sites
    if method.needs_counterfactual:
        return compared.nodes(
            attribute(model, pair.prompt, *answer, counterfactual=pair.other, method=method, sites=(site,))
        )
    relevance = method.neuron_scores(model, objective_of(model, [pair.prompt], *answer), site)
    return relevance.unflatten(-1, (model.heads, -1)).sum(-1) if compared.site == "head" else relevance


def sample(
    model: Model, pair: Pair, methods: Mapping[str, Method | str], site: str = "ffn", means: Mapping[int, Tensor] = {}
) -> dict[str, Any]:
    """Each score's `COLUMNS` on a pair, with its curves over `SIZES`; JSON-ready. means: what nodes that are not kept
    take instead of the other prompt's activations, by the number of tokens (`task_means`)."""
    compared = Compared.of(model, pair, site)
    nodes = compared.exchangeable
    if nodes.shape[1] in means:
        nodes = replace(nodes, there={site: means[nodes.shape[1]]})
    ends = nodes.ends()
    generator = torch.Generator().manual_seed(0)
    results = {}
    for name, method in methods.items():
        values = score(compared, method)
        choices = [largest(values, size) for size in SIZES]
        if name == MATCHED:
            choices = [matched(choice, generator) for choice in choices]
        results[name] = numbers(*shares(nodes, choices, ends))
    return {"prompt": pair.prompt, "other": pair.other, "exchanged": ends[0] - ends[1], "methods": results}


def numbers(kept: list[float], left: list[float]) -> dict[str, Any]:
    """Of F by size, of the nodes kept and of all others."""
    at = {size: (kept[number], abs(left[number])) for number, size in enumerate(SIZES)}
    return {
        "distance": fmean(abs(1 - x) for x in kept),
        "left": fmean(abs(x) for x in left),
        **{f"{name}_{size}": at[size][which] for size in (100, 1000) for which, name in enumerate(("kept", "left"))},
        "curve_kept": kept,
        "curve_left": left,
    }


def ratios(lines: Sequence[Mapping[str, Any]]) -> str:
    """Beside the medians of F the ratio of means: what 100 and 1,000 nodes carry of all pairs together."""
    weights = [line["exchanged"] for line in lines]
    parts = []
    for name in lines[0]["methods"]:
        kept = [
            fmean((line["methods"][name][column] for line in lines), weights) for column in ("kept_100", "kept_1000")
        ]
        parts.append(f"{name} {kept[0]:.2f} and {kept[1]:.2f}")
    return f"ratio of means, 100 and 1,000 nodes kept: {', '.join(parts)}"


def task_means(model: Model, pairs: Sequence[Pair], site: str = "ffn") -> dict[int, Tensor]:
    """By the number of tokens, the mean activations (L, T, N) of the site over the prompts of so many of all pairs."""
    name = recorded(site)
    by_length: dict[int, list[Tensor]] = {}
    for prompt in [text for pair in pairs for text in (pair.prompt, pair.other)]:
        one = objective_of(model, [prompt])
        values = Values(model, one.batch, (name,))
        forward(model, Logits(one), [values])
        by_length.setdefault(one.batch.lengths[0], []).append(values.values(0, values.activation[name]))
    return {length: torch.stack(some).mean(0) for length, some in by_length.items()}


def patched(model: Model, pair: Pair, methods: Mapping[str, Method | str], site: str = "ffn") -> dict[str, Any]:
    """Each score's `PATCHED` on a pair: on one set of nodes, the correlation with what is lost when a node alone takes
    the other prompt's activation. JSON-ready."""
    compared = Compared.of(model, pair, site)
    scores = {name: score(compared, method).float() for name, method in methods.items() if name != MATCHED}
    nodes = compared.exchangeable
    drawn = _drawn(list(scores.values()), torch.Generator().manual_seed(0))
    choices = []
    for place in drawn:
        all_but_one = torch.ones(nodes.shape, dtype=torch.bool)
        all_but_one.view(-1)[place] = False
        choices.append(all_but_one)
    whole, *without = nodes.numbers([torch.ones(nodes.shape, dtype=torch.bool), *choices])
    effects = pandas.Series([whole - number for number in without])
    correlations = {}
    for name, values in scores.items():
        of = pandas.Series(values.flatten()[drawn].numpy())
        correlations[name] = {"pearson": of.corr(effects), "spearman": of.rank().corr(effects.rank())}
    return {"prompt": pair.prompt, "other": pair.other, "methods": correlations}


def _drawn(scores: Sequence[Tensor], generator: torch.Generator) -> Tensor:
    """Places of `DRAWN` nodes of the union of each score's `DRAWN` largest, and of as many others."""
    union = torch.stack([largest(values, DRAWN) for values in scores]).any(0).flatten()
    draws = torch.rand(2, len(union), generator=generator)
    return torch.cat([(draws[row] * some).topk(DRAWN).indices for row, some in enumerate((union, ~union))])


@dataclass(frozen=True)
class AblationCurves(MethodEvaluation):
    """Sufficiency and necessity of the nodes (neurons at a token) that a method ranks first, at nine sizes.

    All other nodes take their values in the counterfactual prompt. Methods are difference, cp-lrp@midpoint, gxi,
    matched and others (docs/evaluate.md). --data takes JSON lines with clean_prefix, patch_prefix, clean_answer and
    patch_answer instead of the tasks. Each task has a folder in --out.

    Example:
      icebear evaluate ablation --tasks capitals --samples 4 --methods difference,gxi,matched --out ablation
    """

    name: ClassVar = "ablation"
    usual: ClassVar = METHODS
    controls: ClassVar = tuple(CONTROLS)
    steps: ClassVar = SIZES
    tasks: Tasks = "all"
    data: DataFile = None
    site: FfnOrHead = "ffn"
    mean: Annotated[
        bool, Option("All others take the mean of the task's prompts, not the counterfactual prompt's values.")
    ] = False
    patching: Annotated[bool, Option("Instead: how scores correlate with activation patching of single nodes.")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mean and self.patching:
            raise InputError("--patching is against the counterfactual prompt's values; leave out --mean.")

    def parts(self, model: Model) -> Iterator[Part]:
        tasks = {"data": pairs.read(self.data)} if self.data else pairs.named(self.tasks)
        methods = self.chosen()
        for task, usable, tried in pairs.usable_by_task(model, tasks, self.samples, self.seed):
            means = task_means(model, usable, self.site) if self.mean else {}
            one = patched if self.patching else partial(sample, means=means)
            note = f"{task}: the model is right on {len(usable)} of {tried} pairs"
            yield Part(
                PATCHED if self.patching else COLUMNS,
                usable,
                partial(one, model, methods=methods, site=self.site),
                name=task,
                methods={name: name for name in methods if name != MATCHED or not self.patching},
                notes=partial(self._notes, note),
            )

    def _notes(self, note: str, lines: Lines) -> list[str]:
        return [note] if self.patching else [note, ratios(lines)]
