"""Streaming summaries of activations, whose merge does not depend on the order, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from icebear.actmax.index.activation_statistics import STATISTICS

EMPTY = torch.iinfo(torch.int64).max
"""The sentence id of an empty entry, whose value is minus infinity."""


@dataclass(frozen=True)
class ScanSummary:
    """A summary of N neurons over some shards. Polarity 0 is ``+`` (maxima), 1 is ``-`` (minima, stored negated)."""

    values: Tensor
    """(2, N, k) float32, largest first; minus infinity for empty entries."""
    sentences: Tensor
    """(2, N, k) int64 ids; ties are in order of id."""
    tokens: Tensor
    """(2, N, k) int16: the position of the top token, the first of ties."""
    statistics: dict[str, Tensor]
    """Name -> the state (..., N) of each of `STATISTICS`."""
    token_count: int
    counted: int
    """The number of tokens in shards that sums include (`icebear.actmax.index.scan.sums_up`)."""


def empty_summary(neurons: int, k: int) -> ScanSummary:
    """Return the summary of no sentences."""
    return ScanSummary(
        values=torch.full((2, neurons, k), -torch.inf),
        sentences=torch.full((2, neurons, k), EMPTY),
        tokens=torch.zeros(2, neurons, k, dtype=torch.int16),
        statistics={name: one.exact(one.empty(neurons)) for name, one in STATISTICS.items()},
        token_count=0,
        counted=0,
    )


def merge(a: ScanSummary, b: ScanSummary) -> ScanSummary:
    """Return the summary of both parts of a corpus; associative and commutative, bit for bit."""
    pairs = ((a.values, b.values), (a.sentences, b.sentences), (a.tokens, b.tokens))
    values, sentences, tokens = (torch.cat(pair, -1) for pair in pairs)
    return ScanSummary(
        *top_k(values, sentences, tokens, a.values.shape[2]),
        statistics={name: one.merge(a.statistics[name], b.statistics[name]) for name, one in STATISTICS.items()},
        token_count=a.token_count + b.token_count,
        counted=a.counted + b.counted,
    )


def top_k(values: Tensor, sentences: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the k largest of the last dimension, largest first; ties are in order of sentence id.

    values (..., M) float32, sentences (..., M) int64, tokens (..., M) int16; returns (..., k) of each.
    """
    count = values.shape[-1]
    if count < k:
        grow = (*values.shape[:-1], k - count)
        values = torch.cat((values, values.new_full(grow, -torch.inf)), -1)
        sentences = torch.cat((sentences, sentences.new_full(grow, EMPTY)), -1)
        tokens = torch.cat((tokens, tokens.new_zeros(grow)), -1)
    best = values.topk(min(k + 1, values.shape[-1]), dim=-1)
    order = best.indices[..., :k]
    # topk does not define the order of ties: sort the whole row where two of the first k + 1 are equal.
    tied = ((best.values[..., 1:] == best.values[..., :-1]) & (best.values[..., 1:] > -torch.inf)).any(-1)
    if tied.any():
        order[tied] = _by_value_then_id(values[tied], sentences[tied])[..., :k]
    return values.gather(-1, order), sentences.gather(-1, order), tokens.gather(-1, order)


def _by_value_then_id(values: Tensor, sentences: Tensor) -> Tensor:
    by_id = sentences.argsort(-1)
    by_value = values.gather(-1, by_id).argsort(dim=-1, descending=True, stable=True)
    return by_id.gather(-1, by_value)
