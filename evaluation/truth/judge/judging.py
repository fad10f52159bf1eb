"""How well scores rank the true nodes of a pair of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from icebear.concepts.methods.lrp import DIFFERENCE
from icebear.concepts.methods.method import Method
from icebear.concepts.methods.rounds import in_rounds
from icebear.concepts.nodes.controls import nodes_of
from icebear.concepts.results.result import Relevance
from icebear.concepts.statistics import area
from icebear.evaluation.truth.judge.pairs import Pair
from icebear.evaluation.truth.judge.search import Candidates, Truth
from icebear.evaluation.truth.programs.compiler import Compiled
from icebear.evaluation.truth.programs.decoys import KINDS
from icebear.models.model import Model

SITES = {"neurons": ("ffn",), "neurons and heads": ("ffn", "head"), "heads": ("head",)}
"""The last one is judged in models of attention only."""
COLUMNS = {
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
        first, second = set(order[: self.k]), set(order[: 2 * self.k])
        places = self.truth.exchangeable.values()
        return {
            "at_k": curve[sizes.index(self.k)],
            "at_2k": curve[sizes.index(min(2 * self.k, len(self.candidates)))],
            "area": area(curve, sizes) / area(best, sizes) if len(sizes) > 1 else curve[0] / best[0],
            "precision": len(first & self.truth.nodes) / self.k,
            "recall": fmean(bool(second.intersection(some)) for some in places),
            "zero": fmean((scores.abs() <= ZERO * scores.abs().max())[list(self.truth.smallest)].tolist()),
        }

    def first_decoys(self, scores: Tensor, generator: torch.Generator) -> dict[str, float]:
        """Return the rank of the first decoy of each kind that differs in this pair, over k."""
        rank = {number: place + 1 for place, number in enumerate(ranked(scores, generator))}
        groups = {kind: [max(rank[n] for n in group) for group in some] for kind, some in self.decoys.items()}
        return {kind: min(ranks) / self.k for kind, ranks in groups.items() if ranks}


def ranked(scores: Tensor, generator: torch.Generator) -> list[int]:
    """Return candidates by the size of their scores, ties at random."""
    size = scores.double().abs()
    rounded = (size / size.max().clamp(min=1e-30) / ZERO).round()
    mixed = torch.randperm(len(size), generator=generator)
    return mixed[rounded[mixed].argsort(descending=True, stable=True)].tolist()


def decoys_of(candidates: Candidates, made: Compiled) -> dict[str, list[tuple[int, ...]]]:
    """Return the candidates that are decoys by construction, see `Judge.decoys`."""
    _, tokens, width = candidates.nodes.shape
    neurons = candidates.nodes.widths[0]
    numbers = {place: number for number, place in enumerate(candidates.places.tolist())}
    groups: dict[str, list[tuple[int, ...]]] = {kind: [] for kind in KINDS}
    for place, number in numbers.items():
        layer, index = place // (tokens * width), place % width
        kind = made.units.get((layer, index)) if index < neurons else made.heads.get((layer, index - neurons))
        if kind == "redundant":
            original = numbers.get(place - index + made.copies[layer, index][1])
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
            values = in_rounds(nodes)
        elif name == "change":
            values = nodes.change()
        else:
            values = torch.rand(nodes.shape, generator=generator)
        result[name] = values.flatten()[candidates.places].float()
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
    whole, none = candidates.ends
    difference = relevance.conservation().target
    return candidates if (whole - none) * difference > difference**2 / 2 else None
