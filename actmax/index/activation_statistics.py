"""Statistics of the activations of neurons. To add one, add a class and its line in `STATISTICS`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from icebear.records import HISTOGRAM_EDGES

FIXED_POINT = 2.0**16
"""Integer units per activation of 1 in sums; a sum of floating-point numbers would depend on the order."""

BIN_EDGES = torch.tensor(HISTOGRAM_EDGES, dtype=torch.float32)


@dataclass(frozen=True)
class LayerActivations:
    """The activations of a batch at one site of one layer."""

    values: Tensor
    """(B, T, N) float32."""
    counted: Tensor
    """(B * T,) float32: 1 at counted tokens, else 0; a product with it is the sum over counted tokens."""
    largest: Tensor
    """(2, B, N) the largest activation of each sentence, and the negated smallest."""
    drawn: Tensor
    """(B,) the position of a random token of each sentence."""

    @property
    def flat(self) -> Tensor:
        """(B * T, N)"""
        return self.values.flatten(0, 1)

    @cached_property
    def scratch(self) -> Tensor:
        """(B * T, N) a buffer."""
        return torch.empty_like(self.flat)


class Statistic:
    """A statistic of N neurons, whose state is a tensor (..., N): a sum, unless a class overrides `merge`."""

    all_shards = False
    """Whether every shard counts, or only the shards that `icebear.actmax.index.scan.has_statistics` selects."""

    def empty(self, neurons: int) -> Tensor:
        """Return the state before any activation."""
        raise NotImplementedError

    def add(self, state: Tensor, seen: LayerActivations) -> None:
        """Add a batch in place; state is the part of one layer."""
        raise NotImplementedError

    def exact(self, state: Tensor) -> Tensor:
        """Return the state in a form whose merge does not depend on the order."""
        return state

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the state of both shards; associative and commutative, bit for bit."""
        return a + b

    def columns(self, state: Tensor, tokens: int) -> dict[str, list[Any]]:
        """Return columns of the table of neurons. tokens: the number of counted tokens of each neuron."""
        raise NotImplementedError


class Moments(Statistic):
    """The mean and the standard deviation. State (2, N): sums of activations and of their squares."""

    def empty(self, neurons: int) -> Tensor:
        return torch.zeros(2, neurons, dtype=torch.float64)

    def add(self, state: Tensor, seen: LayerActivations) -> None:
        # Apple GPUs have no float64.
        state[0] += (seen.counted @ seen.flat).cpu().double()
        state[1] += (seen.counted @ torch.mul(seen.flat, seen.flat, out=seen.scratch)).cpu().double()

    def exact(self, state: Tensor) -> Tensor:
        return (state * FIXED_POINT).round().long()

    def columns(self, state: Tensor, tokens: int) -> dict[str, list[Any]]:
        mean, square = state.double() / FIXED_POINT / tokens
        return {"mean": mean.tolist(), "std": (square - mean**2).clamp(min=0).sqrt().tolist()}


class Extremes(Statistic):
    """The minimum and the maximum. State (2, N): the largest activation, and the negated smallest."""

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
    """The share of activations above zero. State (N,): their count."""

    def empty(self, neurons: int) -> Tensor:
        return torch.zeros(neurons, dtype=torch.int64)

    def add(self, state: Tensor, seen: LayerActivations) -> None:
        state += (seen.counted @ torch.gt(seen.flat, 0, out=seen.scratch)).long().cpu()

    def columns(self, state: Tensor, tokens: int) -> dict[str, list[Any]]:
        return {"positive": (state.double() / tokens).tolist()}


class Histogram(Statistic):
    """The histogram over `HISTOGRAM_EDGES` at one random token of each sentence. State (28, N): counts."""

    def empty(self, neurons: int) -> Tensor:
        return torch.zeros(len(BIN_EDGES) + 1, neurons, dtype=torch.int32)

    def add(self, state: Tensor, seen: LayerActivations) -> None:
        values = seen.values[torch.arange(len(seen.values)), seen.drawn].cpu()  # (B, N)
        bins = torch.bucketize(values, BIN_EDGES, right=True)
        state.scatter_add_(0, bins, torch.ones((), dtype=torch.int32).expand_as(bins))

    def columns(self, state: Tensor, tokens: int) -> dict[str, list[Any]]:
        return {"histogram": [json.dumps(row, separators=(",", ":")) for row in state.T.tolist()]}


STATISTICS: dict[str, Statistic] = {
    "moments": Moments(),
    "extremes": Extremes(),
    "positive": Positive(),
    "histogram": Histogram(),
}
"""Name -> statistic."""
