"""Streaming summaries of activations: pure tensors, merged in any order with the same result, to the bit.

A `Table` holds, for N neurons and both polarities, the k sentences with the most extreme activation, a seeded sample
of sentences, and counts and sums. Floating-point sums depend on their order, so sums are kept as integers (fixed
point), whose addition does not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FIXED_POINT = 2.0**16
"""Units per 1 of activation in `total` and `squares`."""

HISTOGRAM_EDGES = torch.tensor(
    [-(2.0**e) for e in range(7, -6, -1)] + [0.0] + [2.0**e for e in range(-5, 8)], dtype=torch.float32
)
"""Powers of two from 1/32 to 128 on both sides of zero: 28 bins, the outer ones open."""

SAMPLE = 128
"""Sentences in the seeded sample."""

EMPTY = torch.iinfo(torch.int64).max
"""The sentence id of an empty place, whose value is minus infinity."""


@dataclass(frozen=True)
class Table:
    """What was seen of N neurons. Polarity 0 is ``+`` (maxima), 1 is ``-`` (minima, stored negated)."""

    values: Tensor
    """(2, N, k) float32, largest first; minus infinity where there are fewer sentences."""
    sentences: Tensor
    """(2, N, k) int64 ids; equal values are in order of id."""
    tokens: Tensor
    """(2, N, k) int16: the position of the extreme token (the first of equal ones)."""
    extremes: Tensor
    """(2, N) float32: the largest activation, and the negated smallest."""
    total: Tensor
    """(N,) int64, fixed point: the sum over the tokens of `counted`."""
    squares: Tensor
    """(N,) int64, fixed point."""
    positive: Tensor
    """(N,) int64: those with activation > 0."""
    histogram: Tensor
    """(N, 28) int32 over one seeded token of each sentence of those shards."""
    token_count: int
    counted: int
    """Tokens of the shards that sums are taken of (`icebear.actmax.index.scan.sums_up`)."""
    sample_keys: Tensor
    """(M,) int64 seeded hashes of the sampled sentences, ascending: the M smallest of all."""
    sample_sentences: Tensor
    """(M,) int64"""
    sample_tokens: Tensor
    """(M,) int16: the seeded token of each."""
    sample_values: Tensor
    """(M, N) float32: the activations there."""

    @property
    def k(self) -> int:
        return self.values.shape[2]


def merge(a: Table, b: Table) -> Table:
    """The table of both parts of a corpus; associative and commutative, bit for bit."""
    values, sentences, tokens = top_k(
        torch.cat((a.values, b.values), -1),
        torch.cat((a.sentences, b.sentences), -1),
        torch.cat((a.tokens, b.tokens), -1),
        a.k,
    )
    keys = torch.cat((a.sample_keys, b.sample_keys))
    chosen = keys.argsort(stable=True)[:SAMPLE]
    return Table(
        values,
        sentences,
        tokens,
        torch.maximum(a.extremes, b.extremes),
        a.total + b.total,
        a.squares + b.squares,
        a.positive + b.positive,
        a.histogram + b.histogram,
        a.token_count + b.token_count,
        a.counted + b.counted,
        keys[chosen],
        *(
            torch.cat((x, y))[chosen]
            for x, y in (
                (a.sample_sentences, b.sample_sentences),
                (a.sample_tokens, b.sample_tokens),
                (a.sample_values, b.sample_values),
            )
        ),
    )


def top_k(values: Tensor, sentences: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest of the last dimension, largest first, equal values in order of sentence id.

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
    # topk promises nothing about equal values: sort the whole row where two of the first k + 1 are equal.
    tied = ((best.values[..., 1:] == best.values[..., :-1]) & (best.values[..., 1:] > -torch.inf)).any(-1)
    if tied.any():
        order[tied] = _by_value_then_id(values[tied], sentences[tied])[..., :k]
    return values.gather(-1, order), sentences.gather(-1, order), tokens.gather(-1, order)


def _by_value_then_id(values: Tensor, sentences: Tensor) -> Tensor:
    by_id = sentences.argsort(-1)
    by_value = values.gather(-1, by_id).argsort(dim=-1, descending=True, stable=True)
    return by_id.gather(-1, by_value)
