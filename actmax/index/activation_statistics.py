"""The statistics of a neuron's activations, one class each: a new one is a class and its line in `STATISTICS`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

FIXED_POINT = 2.0**16
"""Units per 1 of activation in sums, which are integers: the sum of floating-point numbers depends on their order."""

HISTOGRAM_EDGES = torch.tensor(
    [-(2.0**e) for e in range(7, -6, -1)] + [0.0] + [2.0**e for e in range(-5, 8)], dtype=torch.float32
)
"""Powers of two from 1/32 to 128 on both sides of zero: 28 bins, the outer ones open."""


@dataclass(frozen=True)
class LayerActivations:
    """The activations of a batch at one site of one layer."""

    values: Tensor
    """(B, T, N) float32."""
    counted: Tensor
    """(B * T,) float32: 1 at tokens that count, else 0; a product with it is the sum over these."""
    largest: Tensor
    """(2, B, N): the largest activation of each sentence, and the negated smallest."""
    drawn: Tensor
    """(B,) a seeded token of each sentence."""

    @property
    def flat(self) -> Tensor:
        """(B * T, N)"""
        return self.values.flatten(0, 1)

    @cached_property
    def scratch(self) -> Tensor:
        """(B * T, N) to compute in."""
        return torch.empty_like(self.flat)


class Statistic:
    """Something that is known of each of N neurons, as a tensor (..., N): a sum, unless a class says otherwise."""

    all_shards = False
    """Whether it is taken of every shard, or only of those that `icebear.actmax.index.scan.sums_up` names."""

    def empty(self, neurons: int) -> Tensor:
        """Of no activations."""
        raise NotImplementedError

    def add(self, state: Tensor, seen: LayerActivations) -> None:
        """Take in a batch; state is the part of one layer, to be changed in place."""
        raise NotImplementedError

    def exact(self, state: Tensor) -> Tensor:
        """The same in a form whose merge does not depend on the order."""
        return state

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        """Of two shards together; associative and commutative, bit for bit."""
        return a + b

    def columns(self, state: Tensor, tokens: int) -> dict[str, list[Any]]:
        """Columns of the store's table of neurons. tokens: how many were taken in, of each neuron."""
        raise NotImplementedError


class Moments(Statistic):
    """(2, N) the sums of activations and of their squares."""

    def empty(self, neurons: int) -> Tensor:
        return torch.zeros(2, neurons, dtype=torch.float64)

    def add(self, state: Tensor, seen: LayerActivations) -> None:
        # Apple's GPUs have no float64.
        state[0] += (seen.counted @ seen.flat).cpu().double()
        state[1] += (seen.counted @ torch.mul(seen.flat, seen.flat, out=seen.scratch)).cpu().double()

    def exact(self, state: Tensor) -> Tensor:
        return (state * FIXED_POINT).round().long()

    def columns(self, state: Tensor, tokens: int) -> dict[str, list[Any]]:
        mean, square = state.double() / FIXED_POINT / tokens
        return {"mean": mean.tolist(), "std": (square - mean**2).clamp(min=0).sqrt().tolist()}


class Extremes(Statistic):
    """(2, N) the largest activation, and the negated smallest."""

    all_shards = True

    def empty(self, neurons: int) -> Tensor:
        return torch.full((2, neurons), -torch.inf)

    def add(self, state: Tensor, seen: LayerActivations) -> None:
        state.copy_(torch.maximum(state, seen.largest.amax(1)))

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.maximum(a, b)

    def columns(self, state: Tensor, tokens: int) -> dict[str, list[Any]]:
        return {"min": (-state[1]).tolist(), "max": state[0].tolist()}


class Positive(Statistic):
    """(N,) how many activations are above zero."""

    def empty(self, neurons: int) -> Tensor:
        return torch.zeros(neurons, dtype=torch.int64)

    def add(self, state: Tensor, seen: LayerActivations) -> None:
        state += (seen.counted @ torch.gt(seen.flat, 0, out=seen.scratch)).long().cpu()

    def columns(self, state: Tensor, tokens: int) -> dict[str, list[Any]]:
        return {"positive": (state.double() / tokens).tolist()}


class Histogram(Statistic):
    """(28, N) how many activations are in each bin of `HISTOGRAM_EDGES`, at one seeded token of each sentence."""

    def empty(self, neurons: int) -> Tensor:
        return torch.zeros(len(HISTOGRAM_EDGES) + 1, neurons, dtype=torch.int32)

    def add(self, state: Tensor, seen: LayerActivations) -> None:
        values = seen.values[torch.arange(len(seen.values)), seen.drawn].cpu()  # (B, N)
        bins = torch.bucketize(values, HISTOGRAM_EDGES, right=True)
        state.scatter_add_(0, bins, torch.ones((), dtype=torch.int32).expand_as(bins))

    def columns(self, state: Tensor, tokens: int) -> dict[str, list[Any]]:
        return {"histogram": [json.dumps(row, separators=(",", ":")) for row in state.T.tolist()]}


STATISTICS: dict[str, Statistic] = {
    "moments": Moments(),
    "extremes": Extremes(),
    "positive": Positive(),
    "histogram": Histogram(),
}
"""Name -> how it is taken, merged and stored."""
