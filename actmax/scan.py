"""One shard of sentences through the model, into a `Table` (actmax/topk.py)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from actmax.topk import EMPTY, FIXED_POINT, HISTOGRAM_EDGES, SAMPLE, Table, top_k
from concepts.models import Batch, Model
from concepts.taps import visiting
from db.records import Sentence

BATCH = 32
By = Literal["activation"]


def neuron_count(model: Model, sites: Sequence[str]) -> int:
    """Neurons are numbered by site, then layer, then index."""
    return sum(model.layers * model.width(site) for site in sites)


def empty_table(neurons: int, k: int) -> Table:
    """The table of nothing: merging with it changes nothing."""
    return Table(
        values=torch.full((2, neurons, k), -torch.inf),
        sentences=torch.full((2, neurons, k), EMPTY),
        tokens=torch.zeros(2, neurons, k, dtype=torch.int16),
        extremes=torch.full((2, neurons), -torch.inf),
        total=torch.zeros(neurons, dtype=torch.int64),
        squares=torch.zeros(neurons, dtype=torch.int64),
        positive=torch.zeros(neurons, dtype=torch.int64),
        histogram=torch.zeros(neurons, len(HISTOGRAM_EDGES) + 1, dtype=torch.int32),
        token_count=0,
        sample_keys=torch.zeros(0, dtype=torch.int64),
        sample_sentences=torch.zeros(0, dtype=torch.int64),
        sample_tokens=torch.zeros(0, dtype=torch.int16),
        sample_values=torch.zeros(0, neurons),
    )


def scan_shard(
    model: Model,
    sentences: Sequence[Sentence],
    k: int,
    sites: Sequence[str] = ("ffn",),
    seed: int = 0,
    threshold: Tensor | None = None,
    batch_size: int = BATCH,
) -> Table:
    """The table of some sentences; each counts once a neuron, at its extreme token.

    The first token (a sink, or the tokenizer's own) and padding do not count; a sentence without further tokens is
    passed over. threshold: (2, N) values below which no example is wanted (those of a table it will be merged with).
    """
    encoded = [(sentence.id, model.encode([sentence.text]).ids[0].tolist()) for sentence in sentences]
    encoded = sorted((row for row in encoded if len(row[1]) > 1), key=lambda row: (len(row[1]), row[0]))
    neurons = neuron_count(model, sites)
    reader = _Reader(model, sites, len(encoded), neurons, threshold, seed)
    for start in range(0, len(encoded), batch_size):
        reader.read(encoded[start : start + batch_size])
    return reader.table(k)


class _Reader:
    """Collects what the hooks see of the batches of one shard."""

    def __init__(
        self, model: Model, sites: Sequence[str], count: int, neurons: int, threshold: Tensor | None, seed: int
    ):
        self.model, self.seed = model, seed
        self.places = [(site, layer) for site in sites for layer in range(model.layers)]
        starts, self.columns = 0, {}
        for site, layer in self.places:
            self.columns[site, layer] = slice(starts, starts + model.width(site))
            starts += model.width(site)
        self.threshold = torch.full((2, neurons), -torch.inf) if threshold is None else threshold
        self.ids = torch.zeros(count, dtype=torch.int64)
        self.values = torch.full((2, count, neurons), -torch.inf)  # by sentence; what cannot enter stays -inf
        self.tokens = torch.zeros(2, count, neurons, dtype=torch.int16)
        self.seeded = torch.zeros(count, neurons)
        self.seeded_tokens = torch.zeros(count, dtype=torch.int16)
        self.empty = empty_table(neurons, 1)
        self.sums = torch.zeros(2, neurons, dtype=torch.float64)
        self.token_count = self.done = 0

    def read(self, rows: Sequence[tuple[int, list[int]]]) -> None:
        batch = self.model.encode([ids for _, ids in rows])
        span = slice(self.done, self.done + len(rows))
        self.ids[span] = torch.tensor([identity for identity, _ in rows])
        self.seeded_tokens[span] = torch.tensor(
            [1 + _hash(self.seed, "token", identity) % (len(ids) - 1) for identity, ids in rows], dtype=torch.int16
        )
        self.token_count += sum(batch.lengths) - len(rows)

        def visit(site: str, layer: int, x: Tensor) -> None:
            self._collect(self.columns[site, layer], x, batch, span)

        with self.model.lock, torch.no_grad(), visiting(self.model, self.places, visit):
            self.model.net.base_model(**self.model.inputs(batch), use_cache=False)  # no logits
        self.done = span.stop

    def _collect(self, columns: slice, x: Tensor, batch: Batch, span: slice) -> None:
        """x (B, T, N) of one layer; rows are sorted by length, so only the last few tokens have padding."""
        x = x.float()
        shortest = batch.lengths[0]
        parts = [x[:, 1:shortest]]
        if shortest < x.shape[1]:
            tail = x[:, shortest:]
            parts.append(tail)
            padding = batch.mask[:, shortest:, None] == 0
        for polarity, sign in enumerate((1, -1)):
            best = parts[0].amax(1) if sign > 0 else -parts[0].amin(1)  # (B, N)
            if len(parts) > 1:
                rest = (sign * tail).masked_fill(padding, -torch.inf).amax(1)
                best = torch.maximum(best, rest)
            best = best.cpu()
            extremes = self.empty.extremes[polarity, columns]
            torch.maximum(extremes, best.amax(0), out=extremes)
            entering = (best >= self.threshold[polarity, columns]) & (best > 0)
            row, neuron = entering.nonzero(as_tuple=True)
            self.values[polarity, span, columns][row, neuron] = best[row, neuron]
            self.tokens[polarity, span, columns][row, neuron] = _place(x, batch, row, neuron, sign)
        for power in range(2):
            for part in (parts[0], *(rest.masked_fill(padding, 0) for rest in parts[1:])):
                self.sums[power, columns] += (part * part if power else part).sum((0, 1), dtype=torch.float64).cpu()
        positive = (parts[0] > 0).sum((0, 1))
        if len(parts) > 1:
            positive = positive + ((tail > 0) & ~padding).sum((0, 1))
        self.empty.positive[columns] += positive.cpu()
        self.seeded[span, columns] = x[range(len(x)), self.seeded_tokens[span].long()].cpu()

    def table(self, k: int) -> Table:
        """The shard's table; sums become fixed point here, so that merging tables is exact."""
        top = [
            top_k(
                self.values[polarity].T, self.ids.expand(self.values.shape[2], -1), self.tokens[polarity].T, k
            )
            for polarity in range(2)
        ]  # fmt: skip
        values, ids, tokens = (torch.stack(parts) for parts in zip(*top, strict=True))
        ids = ids.masked_fill(values == -torch.inf, EMPTY)
        tokens = tokens.masked_fill(values == -torch.inf, 0)
        keys = torch.tensor([_hash(self.seed, "sample", identity) for identity in self.ids.tolist()], dtype=torch.int64)
        chosen = keys.argsort()[:SAMPLE]
        bins = torch.bucketize(self.seeded, HISTOGRAM_EDGES, right=True)  # (S, N)
        histogram = torch.zeros(bins.shape[1], len(HISTOGRAM_EDGES) + 1, dtype=torch.int32)
        histogram.scatter_add_(1, bins.T, torch.ones_like(bins.T, dtype=torch.int32))
        fixed = (self.sums * FIXED_POINT).round().long()
        return Table(
            values, ids, tokens, self.empty.extremes, fixed[0], fixed[1], self.empty.positive, histogram,
            self.token_count, keys[chosen], self.ids[chosen], self.seeded_tokens[chosen], self.seeded[chosen],
        )  # fmt: skip


def _place(x: Tensor, batch: Batch, row: Tensor, neuron: Tensor, sign: int) -> Tensor:
    """The position of the largest sign * x[row, :, neuron], the first of equal ones; (M,) int16."""
    places = torch.empty(len(row), dtype=torch.int16)
    lengths = torch.tensor(batch.lengths)[row]
    for start in range(0, len(row), 1 << 20):
        part = slice(start, start + (1 << 20))
        courses = sign * x[row[part], :, neuron[part]].cpu()  # (M, T)
        position = torch.arange(x.shape[1])
        courses = courses.masked_fill((position >= lengths[part, None]) | (position == 0), -torch.inf)
        places[part] = courses.argmax(1).to(torch.int16)  # the first of equal ones
    return places


def _hash(seed: int, purpose: str, identity: int) -> int:
    """62 bits that depend on nothing but the arguments."""
    digest = hashlib.blake2b(f"{seed} {purpose} {identity}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def shards(sentences: Iterator[Sentence], size: int) -> Iterator[list[Sentence]]:
    """Consecutive lists of `size` sentences, the last one shorter."""
    import itertools

    while shard := list(itertools.islice(sentences, size)):
        yield shard
