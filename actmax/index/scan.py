"""Scan a shard of sentences into a `ScanSummary`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from icebear.actmax.index.activation_statistics import STATISTICS, LayerActivations
from icebear.actmax.index.head_norms import HeadNorms, head_means
from icebear.actmax.index.top_activations import ScanSummary, strongest
from icebear.actmax.reading import Reading, ReadTogether, TextReading
from icebear.concepts.passes.sites import hooks, neuron_site
from icebear.errors import InputError
from icebear.models.batch import Batch
from icebear.models.model import Model
from icebear.models.text.images import own_names
from icebear.models.text.prompts import PromptLike
from icebear.records import SITES_AND_HEADS, Sentence
from icebear.values import check_int, one_of, seed_of, stable_hash

OnBatch = Callable[[Sequence[Sentence]], None]

INDEXED = ("ffn", "head")
"""What an index has unless other sites are named."""


@dataclass(frozen=True)
class Settings:
    """The settings of an index, besides model and corpus, see `icebear.build_index`."""

    k: int = 32
    sites: tuple[str, ...] = INDEXED
    max_tokens: int = 256
    seed: int = 0
    head_means: Tensor | None = field(default=None, compare=False, repr=False)
    """`icebear.actmax.index.head_norms.head_means`, measured before the scan; all parts of a scan share them."""

    def __post_init__(self) -> None:
        check_int(self.k, "The number of examples of a neuron")
        check_int(self.max_tokens, "The maximum number of tokens of a sentence", 2)
        seed_of(self.seed)
        for site in self.sites:
            one_of(site, "site", SITES_AND_HEADS)
        if not self.sites:
            raise InputError(f"An index needs sites; name some of {', '.join(SITES_AND_HEADS)}.")


def index_size(model: Model, sites: Sequence[str]) -> int:
    """Return the number of neurons (and heads) of some sites. Their ids go by site, then layer, then index."""
    return sum(model.layers * model.width(site) for site in sites)


def head_count(model: Model, sites: Sequence[str]) -> int:
    """Return the number of heads of an index with these sites; their ids are the last ones."""
    return index_size(model, [site for site in sites if site == "head"])


def indexed_sites(model: Model, sites: Sequence[str]) -> tuple[str, ...]:
    """Return the sites of an index without repetition, heads last: so the ids of neurons do not depend on them. Heads
    are left out where the model has no attention heads."""
    neurons = [site for site in dict.fromkeys(sites) if site != "head"]
    has_heads = "head" in sites and "attn" in model.sites
    return (*neurons, *(["head"] if has_heads else []))


def scan_shard(
    model: Model,
    sentences: Sequence[Sentence],
    settings: Settings,
    threshold: Tensor | None = None,
    batch_size: int | None = None,
    sums: bool = True,
    on_batch: OnBatch | None = None,
    reading: Reading | None = None,
) -> tuple[ScanSummary, Tensor]:
    """Return the summary of some sentences, and their vectors (S, D).

    A sentence counts once for each neuron, at its top token. The first token (a sink or a special token), special
    tokens at the end and padding do not count; a sentence without other tokens is skipped. Of an image all patches
    count. Vectors are the final residual stream after its norm, averaged over the counted tokens, in float16.

    threshold: values (2, N) that an example must reach, from the summary that this one is merged with.
    sums: whether means, standard deviations and histograms include these sentences, see `has_statistics`.
    on_batch: called with the sentences of each batch that is read.
    reading: how they are read; default as texts.
    """
    reading = reading or TextReading(model, settings.max_tokens)
    reader = _Reader(model, settings, reading, len(sentences), threshold, sums)
    width = getattr(model.config, "word_embed_proj_dim", model.config.hidden_size)  # OPT-350m's last map narrows it
    vectors = torch.zeros(len(sentences), width, dtype=torch.float16)
    for together in reading.batches(sentences, batch_size or reading.per_pass):
        part = [sentences[number] for number in together.numbers]
        vectors[together.numbers] = reader.read([sentence.id for sentence in part], together)
        if on_batch:
            on_batch(part)
    return reader.summary(settings.k), vectors


class _Reader:
    """Collects the activations of the batches of one shard."""

    def __init__(
        self, model: Model, settings: Settings, reading: Reading, count: int, threshold: Tensor | None, sums: bool
    ):
        """count: the most sentences that are read."""
        self.model, self.settings, self.begins, self.summing = model, settings, reading.begins, sums
        hooked = dict.fromkeys(map(neuron_site, settings.sites))
        self.site_layers = [(site, layer) for site in hooked for layer in model.layers_with(site)]
        if "head" in settings.sites:
            self.heads = HeadNorms.of(model, head_means(model) if settings.head_means is None else settings.head_means)
        width, self.columns = 0, {}
        for site, layer in ((site, layer) for site in settings.sites for layer in range(model.layers)):
            self.columns[site, layer] = slice(width, width + model.width(site))
            width += model.width(site)
        self.threshold = torch.full((2, width), -torch.inf) if threshold is None else threshold
        self.ids = torch.zeros(count, dtype=torch.int64)
        self.values = torch.full((2, count, width), -torch.inf)  # by sentence; what cannot enter stays -inf
        self.tokens = torch.zeros(2, count, width, dtype=torch.int16)
        self.statistics = {name: statistic.empty(width) for name, statistic in STATISTICS.items()}
        length = reading.max_tokens
        self.token_ids = None if length is None else torch.zeros(count, length, dtype=torch.int32)
        self.token_count = self.done = 0

    def read(self, identities: Sequence[int], together: ReadTogether) -> Tensor:
        """Read a batch of sentences with these ids. Return their vectors (B, D)."""
        batch, begins = together.counted, self.begins
        span = slice(self.done, self.done + len(identities))
        self.ids[span] = torch.tensor(identities)
        if self.token_ids is not None:
            self.token_ids[span, : batch.ids.shape[1]] = batch.ids.int().cpu()
        hashes = torch.tensor([_hash(self.settings.seed, "token", identity) for identity in identities])
        drawn = begins + hashes % (torch.tensor(batch.lengths) - begins)
        counted = batch.mask.float()
        counted[:, :begins] = 0
        self.token_count += sum(batch.lengths) - begins * len(identities)
        self.done = span.stop

        def visit(site: str, layer: int, x: Tensor) -> None:
            if site in self.settings.sites:
                collect(site, layer, x.float())
            if site == "attn" and "head" in self.settings.sites:
                collect("head", layer, self.heads(layer, x))

        def collect(site: str, layer: int, values: Tensor) -> None:
            columns = self.columns[site, layer]
            best = _largest(values, batch, begins)
            seen = LayerActivations(values, counted.flatten(), best, drawn)
            for name, statistic in STATISTICS.items():
                if self.summing or statistic.all_shards:
                    statistic.add(self.statistics[name][..., columns], seen)
            self._enter(columns, values, span, best)

        with self.model.lock, hooks(self.model, self.site_layers, visit), torch.no_grad():
            stream = self.model.final_stream(together.batch)
        return _mean_stream(stream, batch, begins)

    def _enter(self, columns: slice, x: Tensor, span: slice, best: Tensor) -> None:
        """Record the sentences that reach the threshold. best (2, B, N): the extremes of x (B, T, N)."""
        for polarity, sign in enumerate((1, -1)):
            entering = (best[polarity] >= self.threshold[polarity, columns]) & (best[polarity] > 0)
            row, neuron = entering.nonzero(as_tuple=True)
            entry = best[polarity][row, neuron]
            self.values[polarity, span, columns][row, neuron] = entry
            self.tokens[polarity, span, columns][row, neuron] = _position(x, row, neuron, sign * entry, self.begins)

    def summary(self, k: int) -> ScanSummary:
        """Return the summary of the shard, with sums in fixed point so that merging is exact."""
        read = slice(self.done)
        values, tokens = self.values[:, read].mT, self.tokens[:, read].mT  # (2, N, sentences)
        ids, written_at = self.ids[read], tokens[0, values.shape[1] - head_count(self.model, self.settings.sites) :]
        if self.token_ids is None:
            written_at = ids.expand(written_at.shape)
        else:
            written_at = self.token_ids[read].gather(1, written_at.T.long()).T
        return ScanSummary(
            *strongest(values, ids.expand_as(values), tokens, written_at, k),
            statistics={name: statistic.exact(self.statistics[name]) for name, statistic in STATISTICS.items()},
            token_count=self.token_count,
            statistics_tokens=self.token_count if self.summing else 0,
        )


@torch.no_grad()
def image_vector(model: Model, image: PromptLike) -> np.ndarray:
    """Return the vector (D,) of an image, as `scan_shard` makes it."""
    batch = model.encode([image])
    with model.lock:
        return _mean_stream(model.final_stream(batch), batch, len(own_names(model)))[0].numpy()


def _mean_stream(stream: Tensor, batch: Batch, begins: int) -> Tensor:
    """Return the residual stream (B, T, D) averaged over the counted tokens (B, D), in float16."""
    weights = batch.mask[:, begins:, None].float()
    return ((stream.float()[:, begins:] * weights).sum(1) / weights.sum(1)).half().cpu()


def _largest(x: Tensor, batch: Batch, start: int) -> Tensor:
    """Return the largest x and -x over the counted tokens (2, B, N), from `start` on. The batch is sorted by length."""
    best = torch.full((2, len(x), x.shape[2]), -torch.inf, device=x.device)
    for row, length in enumerate(batch.lengths):  # slices, because a mask would cost a copy
        if length > start:
            part, into = x[row:, start:length], best[:, row:]
            torch.maximum(into, torch.stack((part.amax(1), -part.amin(1))), out=into)
            start = length
    return best.cpu()


def _position(x: Tensor, row: Tensor, neuron: Tensor, extreme: Tensor, begins: int) -> Tensor:
    """Return the first counted position where x[row, :, neuron] is its extreme (M,), as int16."""
    positions = torch.empty(len(row), dtype=torch.int16)
    for start in range(0, len(row), 1 << 20):
        part = slice(start, start + (1 << 20))
        equal = x[row[part], :, neuron[part]].cpu() == extreme[part, None]  # (M, T)
        equal[:, :begins] = False  # padding may be equal, too, but comes later
        positions[part] = equal.byte().argmax(1).to(torch.int16)  # the first of ties
    return positions


def _hash(seed: int, purpose: str, identity: int) -> int:
    return stable_hash(f"{seed} {purpose} {identity}") >> 2


def has_statistics(number: int, seed: int) -> bool:
    """Return whether means, standard deviations, histograms and shares above zero include a shard.

    They include the first shard and one of every ten after it: that is precise enough, and all shards would double the
    time of a scan.
    """
    return number == 0 or (number - 1) % 10 == _hash(seed, "sums", (number - 1) // 10) % 10


def shards(sentences: Iterator[Sentence], size: int) -> Iterator[list[Sentence]]:
    """Yield consecutive lists of `size` sentences; the last one may be shorter."""
    while shard := list(itertools.islice(sentences, size)):
        yield shard
