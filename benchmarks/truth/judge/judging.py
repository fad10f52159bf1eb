"""How well scores rank the true nodes of a pair of prompts, which are found by intervention: single nodes, a smallest
sufficient set, the best order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations, islice
from math import comb, prod
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from benchmarks.truth.judge.judged_pairs import Pair
from benchmarks.truth.judge.rounds import Rounds, in_rounds
from benchmarks.truth.programs.compiler import Compiled
from benchmarks.truth.programs.decoys import KINDS
from icebear.concepts.methods.difference_rules import DIFFERENCE
from icebear.concepts.methods.method import Method
from icebear.concepts.nodes.controls import nodes_of
from icebear.concepts.passes.patching import PatchableNodes
from icebear.concepts.results.result import Relevance
from icebear.concepts.statistics import area
from icebear.models.model import Model

PASS_SETS = 1024
"""Sets of nodes that go through the model at once."""
PROOF_SETS = 30_000
"""All sets of a size are tried if there are at most this many, which proves that a set is smallest."""
SEARCHED_SETS = 3_000
"""The same, where a size with more sets makes a proof impossible."""
TOLERANCE = 0.1
"""A set is sufficient if it recovers the difference up to this share."""
SAME = 1e-3
"""Nodes whose change is below this share of the largest change of their site count as equal in both prompts."""
SITES = {"neurons": ("ffn",), "neurons and heads": ("ffn", "head"), "heads": ("head",)}
"""The last one is judged in models of attention only."""
METRICS = {
    "at_k": "recovered with the first k nodes, recomputed; k: size of a smallest sufficient set, higher is better",
    "at_2k": "recovered with the first 2k nodes, higher is better",
    "area": "area under recovered by number of nodes, as a share of that of the best order, higher is better",
    "precision": "of the first k nodes, the share that belongs to a smallest sufficient set, higher is better",
    "recall": "of a smallest sufficient set, the share that is in the first 2k nodes, higher is better",
    "zero": "of a smallest sufficient set, the share with a score of zero, lower is better",
}
ZERO = 1e-6
"""Scores below this share of the largest one are zero, and scores that differ by less are equal; ties are broken at
random."""
ROUNDS = "difference-rounds"
CONTROLS = (ROUNDS, "change", "random")
"""Difference rules in rounds; the size of the activation difference; and uniform random numbers."""
HARD = 3
"""A pair is hard if more nodes differ than this many times the size of a smallest set."""


@dataclass(frozen=True)
class Truth:
    """What interventions show of a pair. Nodes are numbers of candidates (`Candidates`)."""

    smallest: tuple[int, ...]
    """A smallest sufficient set."""
    proved: bool
    """Whether all smaller sets were tried; if not, the size is an upper bound."""
    exchangeable: dict[int, tuple[int, ...]]
    """A node of the smallest set -> the nodes that can stand in its place, itself included."""
    order: tuple[int, ...]
    """All candidates, the best first."""
    alone: Tensor
    """(n,) the share that each node recovers alone."""
    missing: Tensor
    """(n,) the share that is lost without it."""

    @property
    def nodes(self) -> set[int]:
        """The true nodes: those of the smallest set, and those that can stand in their place."""
        return set(chain(*self.exchangeable.values()))


class Candidates:
    """The nodes that differ between the prompts of a pair; all others are equal in both."""

    def __init__(self, nodes: PatchableNodes, position: int) -> None:
        """position: the token whose output is explained."""
        self.nodes, self.position = nodes, position
        widths = nodes.change().split(nodes.widths, -1)
        differs = torch.cat([x > SAME * x.max() for x in widths], -1)
        self.entries = differs.flatten().nonzero()[:, 0]
        """(n,) their places in a flat mask of all nodes."""
        layer, token, index = differs.nonzero().T
        self.cells = list(zip(layer.tolist(), token.tolist(), index.tolist(), strict=True))
        """The layer, token and column of each candidate."""
        reach = (layer < nodes.shape[0] - 1) | (token == position)
        self.reaching = reach.nonzero()[:, 0].tolist()
        """The candidates that are connected to the answer at all: in the last layer, only those at its token."""

    def __len__(self) -> int:
        return len(self.entries)

    def recovered(self, sets: Tensor) -> Tensor:
        """Return F (S,) of sets (S, n): the share of the difference between the prompts with these nodes alone."""
        with_all, with_none = self.ends
        return (self._numbers(sets) - with_none) / (with_all - with_none)

    @cached_property
    def ends(self) -> tuple[float, float]:
        """The logit difference with all candidates, and with none."""
        sets = torch.stack((torch.ones(len(self), dtype=torch.bool), torch.zeros(len(self), dtype=torch.bool)))
        with_all, with_none = self._numbers(sets).tolist()
        return with_all, with_none

    def _numbers(self, sets: Tensor) -> Tensor:
        """Return the logit difference (S,) with each set (S, n); one batch is faster than `PatchableNodes.numbers`."""
        model, objective = self.nodes.model, self.nodes.objective
        (target,), contrast, numbers = objective.targets[0] or (0,), objective.contrasts[0], []
        for part in sets.split(PASS_SETS):
            masks = torch.zeros(len(part), prod(self.nodes.shape), dtype=torch.bool)
            masks[:, self.entries] = part
            ids = objective.batch.ids.expand(len(part), -1)
            with torch.no_grad(), self.nodes.patched(masks.view(-1, *self.nodes.shape)):
                logits = model.net(ids, logits_to_keep=torch.tensor([self.position])).logits[:, 0]
            other = 0.0 if contrast is None else logits[:, contrast]
            numbers.append(logits[:, target] - other)
        return torch.cat(numbers)

    def of(self, numbers: Sequence[Sequence[int]]) -> Tensor:
        """Return sets (S, n) of candidates by their numbers."""
        sets = torch.zeros(len(numbers), len(self), dtype=torch.bool)
        for row, members in enumerate(numbers):
            sets[row, list(members)] = True
        return sets

    def prefixes(self, order: Sequence[int]) -> Tensor:
        """Return the sets (n, n) of the first 1, 2, ... nodes of an order."""
        rank = torch.empty(len(self), dtype=torch.long)
        rank[list(order)] = torch.arange(len(self))
        return rank[None] <= torch.arange(len(self))[:, None]


def truth_of(candidates: Candidates) -> Truth:
    """Search for a smallest sufficient set, and measure single nodes."""
    order = eliminated(candidates)
    curve = (1 - candidates.recovered(candidates.prefixes(order))).abs()
    size = 1 + int((curve <= TOLERANCE).nonzero()[0, 0])
    smallest, proved = smaller(candidates, order[:size])
    rest = [number for number in order if number not in set(smallest)]
    singles = torch.eye(len(candidates), dtype=torch.bool)
    return Truth(
        smallest,
        proved,
        exchangeable(candidates, smallest),
        (*smallest, *rest),
        candidates.recovered(singles),
        1 - candidates.recovered(~singles),
    )


def eliminated(candidates: Candidates) -> list[int]:
    """Return all candidates in an order, the best first, by backward elimination.

    The node whose removal changes least is removed; or as many as can be removed together without a change.
    """
    left, removed = list(candidates.reaching), [n for n in range(len(candidates)) if n not in set(candidates.reaching)]
    while len(left) > 1:
        changes = (1 - candidates.recovered(candidates.of([[n for n in left if n != out] for out in left]))).abs()
        order = [left[row] for row in changes.argsort(stable=True).tolist()]
        together = candidates.recovered(candidates.of([order[count:] for count in range(1, len(order))]))
        lost = ((1 - together).abs() > max(TOLERANCE / 10, changes.min().item())).nonzero()[:, 0].tolist()
        count = max(1, lost[0] if lost else len(order) - 1)
        removed += order[:count]
        left = [n for n in left if n not in set(order[:count])]
    return [*left, *removed[::-1]]


def smaller(candidates: Candidates, sufficient: Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """Try all smaller sets, where there are few enough of a size. Returns a smallest set, and whether it is proved."""
    smallest, counts = tuple(sufficient), [comb(len(candidates.reaching), size) for size in range(len(sufficient))]
    proved = max(counts) <= PROOF_SETS
    for size in range(1, len(smallest)):
        if not proved and counts[size] > SEARCHED_SETS:
            return smallest, False
        for batch in _batches(combinations(candidates.reaching, size)):
            errors = (1 - candidates.recovered(candidates.of(batch))).abs()
            if errors.min() <= TOLERANCE:
                return batch[int(errors.argmin())], True
    return smallest, proved


def _batches(sets: Iterator[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    while batch := list(islice(sets, PASS_SETS)):
        yield batch


def exchangeable(candidates: Candidates, smallest: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return which nodes can stand in the place of each node of a set."""
    others = [n for n in candidates.reaching if n not in set(smallest)]
    result: dict[int, tuple[int, ...]] = {}
    for out in smallest:
        sets = [[other if n == out else n for n in smallest] for other in others]
        errors = (1 - candidates.recovered(candidates.of(sets))).abs() if sets else torch.zeros(0)
        result[out] = (
            out,
            *(other for other, error in zip(others, errors.tolist(), strict=True) if error <= TOLERANCE),
        )
    return result


@dataclass(frozen=True)
class Judge:
    """The candidates of a pair, the truth about them, and which are decoys."""

    candidates: Candidates
    truth: Truth
    decoys: Mapping[str, Sequence[tuple[int, ...]]]
    """Kind -> candidates that are decoys once all of a group are chosen; groups of redundant nodes have two."""

    @property
    def k(self) -> int:
        return len(self.truth.smallest)

    @property
    def is_hard(self) -> bool:
        return len(self.candidates) > HARD * self.k

    def sizes(self) -> list[int]:
        """Return all sizes up to 3k, and about twenty up to all nodes."""
        count = len(self.candidates)
        larger = np.geomspace(min(3 * self.k, count), count, 20).round().astype(int).tolist()
        return sorted({*range(1, min(3 * self.k, count) + 1), *larger})

    def curve(self, order: Sequence[int]) -> list[float]:
        """Return 1 - |1 - F|, or 0 if that is negative, of the first nodes of an order, by `sizes`."""
        rows = [size - 1 for size in self.sizes()]
        shares = self.candidates.recovered(self.candidates.prefixes(order)[rows])
        return (1 - (1 - shares).abs()).clamp(min=0).tolist()

    def numbers(self, scores: Tensor, generator: torch.Generator) -> dict[str, float]:
        """Return `COLUMNS` of scores (n,)."""
        order, sizes = ranked(scores, generator), self.sizes()
        curve, best = self.curve(order), self.curve(self.truth.order)
        top, top_2k = set(order[: self.k]), set(order[: 2 * self.k])
        alternatives = self.truth.exchangeable.values()
        return {
            "at_k": curve[sizes.index(self.k)],
            "at_2k": curve[sizes.index(min(2 * self.k, len(self.candidates)))],
            "area": area(curve, sizes) / area(best, sizes) if len(sizes) > 1 else curve[0] / best[0],
            "precision": len(top & self.truth.nodes) / self.k,
            "recall": fmean(bool(top_2k.intersection(group)) for group in alternatives),
            "zero": fmean((scores.abs() <= ZERO * scores.abs().max())[list(self.truth.smallest)].tolist()),
        }

    def first_decoys(self, scores: Tensor, generator: torch.Generator) -> dict[str, float]:
        """Return the rank of the first decoy of each kind that differs in this pair, over k."""
        rank = {number: position + 1 for position, number in enumerate(ranked(scores, generator))}
        ranks = {kind: [max(rank[n] for n in group) for group in groups] for kind, groups in self.decoys.items()}
        return {kind: min(values) / self.k for kind, values in ranks.items() if values}


def ranked(scores: Tensor, generator: torch.Generator) -> list[int]:
    """Return candidates by the size of their scores, ties at random."""
    size = scores.double().abs()
    rounded = (size / size.max().clamp(min=1e-30) / ZERO).round()
    mixed = torch.randperm(len(size), generator=generator)
    return mixed[rounded[mixed].argsort(descending=True, stable=True)].tolist()


def decoys_of(candidates: Candidates, compiled: Compiled) -> dict[str, list[tuple[int, ...]]]:
    """Return the candidates that are decoys by construction, see `Judge.decoys`."""
    neurons = candidates.nodes.widths[0]
    numbers = {cell: number for number, cell in enumerate(candidates.cells)}
    groups: dict[str, list[tuple[int, ...]]] = {kind: [] for kind in KINDS}
    for (layer, token, index), number in numbers.items():
        kind = compiled.units.get((layer, index)) if index < neurons else compiled.heads.get((layer, index - neurons))
        if kind == "redundant":
            original = numbers.get((layer, token, compiled.copies[layer, index][1]))
            groups[kind] += [] if original is None else [(number, original)]
        elif kind in KINDS:
            groups[kind].append((number,))
    return groups


def relevances(model: Model, pair: Pair, methods: Mapping[str, Method | str]) -> dict[str, Relevance]:
    """Return the relevance by each method that is no control. One without a point (@) explains the prompt alone."""
    return {
        name: pair.relevance(model, method, method.needs_counterfactual)
        for name, method in methods.items()
        if isinstance(method, Method)
    }


def scores_of(
    candidates: Candidates,
    methods: Mapping[str, Method | str],
    by_method: Mapping[str, Relevance],
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Return the scores (n,) of candidates by each method or control."""
    nodes, result = candidates.nodes, {}
    for name in methods:
        if name in by_method:
            relevance = by_method[name]
            parts = [relevance.heads() if site == "head" else relevance.of(site) for site in nodes.sites]
            values = torch.cat(parts, -1)  # (L, T, W)
        elif name == ROUNDS:
            values = nodes.side_by_side(in_rounds(nodes, Rounds().rounds), lambda x: x.sum(-1))
        elif name == "change":
            values = nodes.change()
        else:
            values = torch.rand(nodes.shape, generator=generator)
        result[name] = values.flatten()[candidates.entries].float()
    return result


def sites_of(model: Model) -> list[str]:
    """Return the names of the `SITES` that are judged."""
    return [name for name, sites in SITES.items() if ("ffn" in sites) == ("ffn" in model.sites)]


def candidates_of(model: Model, pair: Pair, sites: Sequence[str]) -> Candidates | None:
    """Return the nodes of a pair that differ; None if most of the difference does not depend on these sites."""
    relevance = pair.relevance(model, DIFFERENCE)
    candidates = Candidates(nodes_of(model, relevance, *sites), pair.position)
    if not len(candidates):
        return None
    with_all, with_none = candidates.ends
    difference = relevance.conservation().target
    return candidates if (with_all - with_none) * difference > difference**2 / 2 else None
