"""`build_index`: a resumable scan of a corpus into a store."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from icebear.actmax.index.activation_statistics import STATISTICS
from icebear.actmax.index.corpus import LONGEST_SENTENCE, Corpus
from icebear.actmax.index.head_norms import head_means
from icebear.actmax.index.neuron_vectors import ensure_vectors, gated
from icebear.actmax.index.scan import (
    INDEXED,
    OnBatch,
    Settings,
    has_statistics,
    head_count,
    index_size,
    indexed_sites,
    scan_shard,
    shards,
)
from icebear.actmax.index.top_activations import ScanSummary, empty_summary, merge
from icebear.actmax.measure_heads import ensure_heads
from icebear.actmax.reading import reading_of
from icebear.db.store import Store
from icebear.errors import InputError, NumericalError, need
from icebear.models.model import Model
from icebear.records import IMAGES, POLARITIES, Neuron, Sentence
from icebear.steps import OnProgress, counting, unwatched
from icebear.values import several, typed

SHARD = 256
"""The number of sentences of a shard. Batches are formed inside a shard, so an index depends on it."""
IMAGE_SHARD = 32
"""The same of images, each of which takes as long as several sentences."""

UNREADABLE = "unreadable"
"""The count of images that were skipped."""

COMMIT_SECONDS = 20.0
"""A kill loses at most this much work, and the current shard."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One of several parts of a scan, which are computed apart: its shards have the numbers `index` - 1 modulo `count`,
    counted from 0."""

    index: int
    count: int

    def has(self, shard: int) -> bool:
        return shard % self.count == self.index - 1

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


@typed
def build_index(
    model: Model,
    corpus: Corpus,
    store: Store,
    k: int = 32,
    sites: Sequence[str] = INDEXED,
    max_tokens: int = 256,
    seed: int = 0,
    on_progress: OnProgress = unwatched,
    on_batch: OnBatch | None = None,
    batch_size: int | None = None,
) -> Counter[str]:
    """Index the maximally activating sentences of every neuron, with statistics of its activations.

    An interrupted scan, or one with a smaller limit of the same corpus, is resumed. The finished tables do not depend
    on interruptions or earlier limits, bit for bit.

    Parameters
    ----------
    model : Model
    corpus : Corpus
        The sentences, see `read_corpus`, or images, see `read_images`: an image is a sentence, its patches are the
        tokens.
    store : Store
        The store that is filled; opened with create=True, it is made.
    k : int
        The number of examples of each neuron and polarity.
    sites : sequence of str
        The sites whose neurons are indexed, such as ``ffn`` and ``attn``, and ``head`` for attention heads. The
        activation of a head at a token is the norm of what it writes to the residual stream, less its mean on the
        calibration texts. An index of a model without attention heads has none.
    max_tokens : int
        Each sentence is truncated after this many tokens.
    seed : int
        The seed of the random tokens of histograms, and of the shards that sums are taken of.
    on_progress : callable
        Called with (done, total) sentences after each shard, those of earlier runs included; the total of a streamed
        corpus is 0.
    on_batch : callable, optional
        Called with the sentences of each batch that is read.
    batch_size : int, optional
        The number of sentences of a batch, by default 32, or 8 images; other threads wait less for small batches.

    Returns
    -------
    Counter
        The counts of the corpus, such as documents, sentences and skipped lines.

    Raises
    ------
    StoreError
        If the store was made with another model, corpus or setting, or with a larger limit.
    InputError
        If the model does not have a site or does not read the corpus, or the corpus has too few tokens.
    """
    need("index")  # at the start, not after the scan
    settings = Settings(k, indexed_sites(model, several(sites)), max_tokens, seed)
    facts = facts_of(model, corpus, settings)
    with store.exclusively():
        store.check(model.index_fingerprint, model.name)
        if not store.scan.finished_with(facts):
            full, short, counts = scan(model, corpus, store, settings, facts, on_progress, on_batch, batch_size)
            finish(model, store, settings, merge(full, short), counts, corpus.size(), corpus.sides)
        elif store.is_of_images:
            store.facts.set({"corpus": facts["corpus"]})  # where the images are now
        ensure_vectors(model, store)
        ensure_heads(model, store)
        return indexed_counts(store)


def facts_of(model: Model, corpus: Corpus, settings: Settings) -> dict[str, Any]:
    """Return the facts that identify a scan. Raises `InputError` for sites that the model does not have, and for a
    corpus that it does not read."""
    index_size(model, settings.sites)
    facts = {
        "model": model.name,
        "fingerprint": model.index_fingerprint,
        "dtype": model.dtype_name,
        **corpus.facts,
        "claimed_limit": corpus.limit,
        "shard": IMAGE_SHARD if corpus.facts.get("input") == IMAGES else SHARD,
        **{name: value for name, value in vars(settings).items() if name not in ("head_means", "sites")},
        "sites": list(settings.sites),
    }
    reading_of(model, facts)
    return facts


def finish(
    model: Model,
    store: Store,
    settings: Settings,
    summary: ScanSummary,
    counts: Counter[str],
    documents: int | None,
    sides: Collection[tuple[Neuron, str]] | None = None,
) -> None:
    """Write the results of a scan. sides: those that get examples; None for all."""
    facts = {
        "finished": True,
        "limit": store.facts.get("claimed_limit"),
        "documents": documents,
        "tokens": summary.token_count,
        "statistics_tokens": summary.statistics_tokens,
        "counts": {**counts, **{what: n for what, n in _passed_over(store, settings).items() if n}},
        "encoder": None,
        "gated": "ffn" in settings.sites and gated(model),
        "made_with": model.made_with,
    }
    columns, examples = _columns(summary, model, settings.sites), _examples(summary)
    if sides is not None:
        names = map(Neuron, columns["layer"], columns["site"], columns["idx"])
        numbers = {neuron: number for number, neuron in enumerate(names)}
        chosen = {(numbers.get(neuron), POLARITIES.index(polarity)) for neuron, polarity in sides}
        examples = (row for row in examples if row[:2] in chosen)
    store.scan.finish(columns, examples, facts)


def _passed_over(store: Store, settings: Settings) -> dict[str, int]:
    """Return how many sentences were not read, or not to their ends."""
    passed_over = store.scan.passed_over(settings.max_tokens)
    return {UNREADABLE: passed_over["without tokens"]} if store.is_of_images else passed_over


def check_has_results(summary: ScanSummary, counts: Counter[str], facts: dict[str, Any]) -> None:
    """Raise `InputError` where a scan has no results."""
    if not counts["sentences"]:
        raise InputError(_without_sentences(counts))
    if not summary.statistics_tokens and facts.get("input") == IMAGES:
        raise InputError(
            f"None of the first {facts['shard']} images of {facts['corpus']} can be read; give another folder."
        )
    if not summary.statistics_tokens:
        raise InputError(
            f"Each of the corpus's first {facts['shard']} sentences has only one token; give another corpus."
        )


def indexed_counts(store: Store) -> Counter[str]:
    """Return the counts of the corpus of a finished scan."""
    return Counter(store.facts.find("counts") or {"sentences": store.count("sentences")})


def scan(
    model: Model,
    corpus: Corpus,
    store: Store,
    settings: Settings,
    facts: dict[str, Any],
    on_progress: OnProgress = unwatched,
    on_batch: OnBatch | None = None,
    batch_size: int | None = None,
    part: Part | None = None,
) -> tuple[ScanSummary, ScanSummary, Counter[str]]:
    """Scan and commit the missing shards. Return the summary of all complete shards, that of the last one if it is
    shorter, and the counts of the corpus.

    A shorter last shard is not in the committed summary, because a larger limit would extend it.

    part: scan its shards only.
    """
    short = empty_summary(index_size(model, settings.sites), settings.k, head_count(model, settings.sites))
    packed = store.scan.progress()
    if "head" in settings.sites and (packed or settings.head_means is None):
        means = load(packed.pop("head_means"))["head_means"] if packed else head_means(model)
        settings = dataclasses.replace(settings, head_means=means)
    summary, reading, shard_size = unpack(packed) if packed else short, reading_of(model, facts), facts["shard"]
    done = (
        {number for number, size in store.scan.shards().items() if size == shard_size} if summary.token_count else set()
    )
    counts: Counter[str] = Counter()
    last = time.monotonic()
    knows_total = not corpus.streamed and on_progress is not unwatched  # a stream is not read twice, only to count it
    wanted = part.has if part else lambda number: True
    of_corpus = enumerate(shards(corpus.sentences(), shard_size)) if knows_total else ()
    advance = counting(on_progress, sum(len(shard) for number, shard in of_corpus if wanted(number)))
    advance(shard_size * len(done))
    waiting: dict[int, list[tuple[Sentence, bytes]]] = {}

    for number, shard in enumerate(shards(corpus.sentences(counts), shard_size)):
        if number in done or not wanted(number):
            continue
        sums = has_statistics(number, settings.seed)
        least = summary.values[:, :, -1]
        scanned, vectors = scan_shard(model, shard, settings, least, batch_size, sums, on_batch, reading)
        if vectors.isnan().any():
            raise NumericalError("The residual stream of a sentence is NaN; try other weights or --dtype float32.")
        if len(shard) == shard_size:
            summary = merge(summary, scanned)
        else:
            short = scanned
        waiting[number] = [
            (dataclasses.replace(sentence, tokens=reading.tokens(sentence)), vector.tobytes() if vector.any() else b"")
            for sentence, vector in zip(shard, vectors.numpy(), strict=True)
        ]
        advance(len(shard))
        if summary.token_count and time.monotonic() - last > COMMIT_SECONDS:
            store.scan.commit(waiting, pack(summary, settings.head_means), facts)
            waiting, last = {}, time.monotonic()
    if part is None:
        check_has_results(merge(summary, short), counts, facts)
    store.scan.commit(waiting, pack(summary, settings.head_means), facts)
    return summary, short, counts


def _without_sentences(counts: Counter[str]) -> str:
    """Return why a corpus has no sentences, and what to do."""
    if counts["too long"]:
        return (
            f"The corpus has no sentence of at most {LONGEST_SENTENCE} characters ({counts['too long']:,} are longer); "
            "write each sentence in a line of its own, or give the language of the text with --language."
        )
    empty = f" (its {counts['documents']:,} documents are empty)" if counts["documents"] else ""
    return f"The corpus has no text{empty}; check the file, or choose another column with --column."


def pack(summary: ScanSummary, head_means: Tensor | None = None) -> dict[str, bytes]:
    """Return each tensor by itself, because SQLite holds at most a gigabyte in one value."""
    if not summary.token_count:
        return {}
    parts = {**vars(summary), **summary.statistics}
    del parts["statistics"]
    parts["counted"] = parts.pop("statistics_tokens")  # its saved name
    if head_means is not None:
        parts["head_means"] = head_means
    return {name: save({name: torch.as_tensor(part)}) for name, part in parts.items()}


def unpack(packed: dict[str, bytes]) -> ScanSummary:
    tensors = {name: load(part)[name] for name, part in packed.items()}
    statistics = {name: tensors.pop(name) for name in STATISTICS}
    tensors["statistics_tokens"] = tensors.pop("counted")
    parts: dict[str, Any] = {name: part if part.dim() else int(part) for name, part in tensors.items()}
    return ScanSummary(**parts, statistics=statistics)


# --- the result tables ------------------------------------------------------------------------------------


def _columns(summary: ScanSummary, model: Model, sites: Sequence[str]) -> dict[str, Sequence[Any]]:
    """Return the columns of the table of neurons."""
    neurons = [(layer, site, i) for site in sites for layer in range(model.layers) for i in range(model.width(site))]
    layers, names, indices = zip(*neurons, strict=True)
    columns: dict[str, Sequence[Any]] = {"id": range(len(neurons)), "layer": layers, "site": names, "idx": indices}
    for name, statistic in STATISTICS.items():
        columns |= statistic.columns(summary.statistics[name], summary.statistics_tokens)
    return columns


def _examples(summary: ScanSummary) -> Iterator[tuple]:
    """Yield the rows of the table of examples."""
    parts = [part.transpose(0, 1).split(4096) for part in (summary.values, summary.sentences, summary.tokens)]
    start = 0
    for values, sentences, tokens in zip(*parts, strict=True):  # (n, 2, k) each
        neurons, polarities, ranks = entries = (values > 0).nonzero(as_tuple=True)
        signed = (1 - 2 * polarities) * values[entries]
        columns = (start + neurons, polarities, ranks, sentences[entries], tokens[entries], signed)
        yield from zip(*(column.tolist() for column in columns), strict=True)
        start += len(values)
