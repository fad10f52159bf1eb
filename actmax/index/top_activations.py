"""The sentences that activate each neuron most, and its statistics, of part of a corpus; the merge does not
depend on the order, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

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
    written_at: Tensor
    """(H, k) integers: the ids of the top tokens of the heads, which are the last H neurons; each id once. Of images,
    whose patches have no ids, the ids of the images (int64)."""
    statistics: dict[str, Tensor]
    """Name -> the state (..., N) of each of `STATISTICS`."""
    token_count: int
    statistics_tokens: int
    """The number of tokens in shards that sums include (`icebear.actmax.index.scan.has_statistics`)."""


def empty_summary(neurons: int, k: int, heads: int = 0) -> ScanSummary:
    """Return the summary of no sentences. heads: how many of the neurons, at the end, are heads."""
    return ScanSummary(
        values=torch.full((2, neurons, k), -torch.inf),
        sentences=torch.full((2, neurons, k), EMPTY),
        tokens=torch.zeros(2, neurons, k, dtype=torch.int16),
        written_at=torch.zeros(heads, k, dtype=torch.int32),
        statistics={name: statistic.exact(statistic.empty(neurons)) for name, statistic in STATISTICS.items()},
        token_count=0,
        statistics_tokens=0,
    )


def merge(a: ScanSummary, b: ScanSummary) -> ScanSummary:
    """Return the summary of both parts of a corpus; associative and commutative, bit for bit."""
    pairs = ((a.values, b.values), (a.sentences, b.sentences), (a.tokens, b.tokens), (a.written_at, b.written_at))
    values, sentences, tokens, written_at = (torch.cat(pair, -1) for pair in pairs)
    return ScanSummary(
        *strongest(values, sentences, tokens, written_at, a.values.shape[2]),
        statistics={name: kind.merge(a.statistics[name], b.statistics[name]) for name, kind in STATISTICS.items()},
        token_count=a.token_count + b.token_count,
        statistics_tokens=a.statistics_tokens + b.statistics_tokens,
    )


def strongest(
    values: Tensor, sentences: Tensor, tokens: Tensor, written_at: Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the k strongest examples of each neuron: values, sentences and tokens (2, N, k), written_at (H, k).

    Of the examples of a head that write at the same token only the strongest stays; else "co-" fills the whole list of
    a head whose other work is number agreement. values, sentences, tokens: (2, N, M); written_at: (H, M). `values` is
    changed.
    """
    count, heads = values.shape[-1], slice(values.shape[1] - len(written_at), None)
    if count < k:
        values = pad(values, (0, k - count), value=-torch.inf)
        sentences = pad(sentences, (0, k - count), value=EMPTY)
        tokens, written_at = pad(tokens, (0, k - count)), pad(written_at, (0, k - count))
    values[0, heads] = of_each(values[0, heads], sentences[0, heads], written_at)
    order = top_k(values, sentences, k)
    values, sentences, tokens = (part.gather(-1, order) for part in (values, sentences, tokens))
    empty = values == -torch.inf
    sentences, tokens = sentences.masked_fill(empty, EMPTY), tokens.masked_fill(empty, 0)
    written_at = written_at.gather(-1, order[0, heads]).masked_fill(empty[0, heads], 0)
    return values, sentences, tokens, written_at


def of_each(values: Tensor, sentences: Tensor, keys: Tensor) -> Tensor:
    """Return the values (H, M) with minus infinity at all but the largest of each key; ties are in order of sentence
    id."""
    order = sentences.argsort(-1)
    order = order.gather(-1, values.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
    order = order.gather(-1, keys.gather(-1, order).argsort(dim=-1, stable=True))  # by key, value, sentence id
    keys = keys.gather(-1, order)
    repeated = pad(keys[..., 1:] == keys[..., :-1], (1, 0))
    return values.scatter(-1, order, values.gather(-1, order).masked_fill(repeated, -torch.inf))


def top_k(values: Tensor, sentences: Tensor, k: int) -> Tensor:
    """Return where the k largest of the last dimension are (..., k), largest first; ties are in order of sentence id.

    values (..., M) float32, sentences (..., M) int64; M is at least k.
    """
    best = values.topk(min(k + 1, values.shape[-1]), dim=-1)
    order = best.indices[..., :k]
    # topk does not define the order of ties: sort the whole row where two of the first k + 1 are equal.
    tied = ((best.values[..., 1:] == best.values[..., :-1]) & (best.values[..., 1:] > -torch.inf)).any(-1)
    if tied.any():
        by_id = sentences[tied].argsort(-1)
        by_value = values[tied].gather(-1, by_id).argsort(dim=-1, descending=True, stable=True)
        order[tied] = by_id.gather(-1, by_value)[..., :k]
    return order
