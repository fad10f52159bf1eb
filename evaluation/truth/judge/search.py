"""The true nodes of a pair of prompts, by intervention: single nodes, a smallest sufficient set, the best order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations, islice
from math import comb, prod

import torch
from torch import Tensor

from icebear.concepts.passes.patching import Nodes

ROWS = 1024
"""Sets of nodes that go through the model at once."""
MOST_SETS, FEW_SETS = 30_000, 3_000
"""All sets of a size are tried if there are at most so many; few, where this cannot prove that a set is smallest."""
TOLERANCE = 0.1
"""A set is sufficient if it recovers the difference up to this share."""
SAME = 1e-3
"""Nodes whose change is below this share of the largest change of their site count as equal in both prompts."""


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

    def __init__(self, nodes: Nodes, position: int) -> None:
        """position: the token whose output is explained."""
        self.nodes, self.position = nodes, position
        widths = nodes.change().split(nodes.widths, -1)
        differs = torch.cat([x > SAME * x.max() for x in widths], -1)
        self.places = differs.flatten().nonzero()[:, 0]
        """(n,) their places in a flat mask of all nodes."""
        layer, token, _ = differs.nonzero().T
        reach = (layer < nodes.shape[0] - 1) | (token == position)
        self.reaching = reach.nonzero()[:, 0].tolist()
        """The candidates that are connected to the answer at all: in the last layer, only those at its token."""

    def __len__(self) -> int:
        return len(self.places)

    def recovered(self, sets: Tensor) -> Tensor:
        """Return F (S,) of sets (S, n): the share of the difference between the prompts with these nodes alone."""
        whole, none = self.ends
        return (self._numbers(sets) - none) / (whole - none)

    @cached_property
    def ends(self) -> tuple[float, float]:
        """The logit difference with all candidates, and with none."""
        sets = torch.stack((torch.ones(len(self), dtype=torch.bool), torch.zeros(len(self), dtype=torch.bool)))
        whole, none = self._numbers(sets).tolist()
        return whole, none

    def _numbers(self, sets: Tensor) -> Tensor:
        """Return the logit difference (S,) with each set (S, n); one batch is faster than `Nodes.numbers`."""
        model, one = self.nodes.model, self.nodes.objective
        (target,), contrast, numbers = one.targets[0] or (0,), one.contrasts[0], []
        for some in sets.split(ROWS):
            masks = torch.zeros(len(some), prod(self.nodes.shape), dtype=torch.bool)
            masks[:, self.places] = some
            ids = one.batch.ids.expand(len(some), -1)
            with torch.no_grad(), self.nodes.patched(masks.view(-1, *self.nodes.shape), self.nodes.counterfactual):
                logits = model.net(ids, logits_to_keep=torch.tensor([self.position])).logits[:, 0]
            other = 0.0 if contrast is None else logits[:, contrast]
            numbers.append(logits[:, target] - other)
        return torch.cat(numbers)

    def of(self, numbers: Sequence[Sequence[int]]) -> Tensor:
        """Return sets (S, n) of candidates by their numbers."""
        sets = torch.zeros(len(numbers), len(self), dtype=torch.bool)
        for row, some in enumerate(numbers):
            sets[row, list(some)] = True
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
    single = torch.eye(len(candidates), dtype=torch.bool)
    return Truth(
        smallest,
        proved,
        exchangeable(candidates, smallest),
        (*smallest, *rest),
        candidates.recovered(single),
        1 - candidates.recovered(~single),
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
    proved = max(counts) <= MOST_SETS
    for size in range(1, len(smallest)):
        if not proved and counts[size] > FEW_SETS:
            return smallest, False
        for some in _batches(combinations(candidates.reaching, size)):
            errors = (1 - candidates.recovered(candidates.of(some))).abs()
            if errors.min() <= TOLERANCE:
                return some[int(errors.argmin())], True
    return smallest, proved


def _batches(sets: Iterator[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    while batch := list(islice(sets, ROWS)):
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
