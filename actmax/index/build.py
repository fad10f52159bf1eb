"""`build_index`: a resumable scan of a corpus into a store."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load, save

from icebear.actmax.index.activation_statistics import STATISTICS
from icebear.actmax.index.classes import ensure_classes
from icebear.actmax.index.engines import Engine, in_process
from icebear.actmax.index.neuron_vectors import ensure_vectors, gated
from icebear.actmax.index.scan import Settings, index_size, shards
from icebear.actmax.index.summary import ScanSummary, empty_summary, merge
from icebear.concepts.corpus import Corpus
from icebear.concepts.models.model import Model
from icebear.db.store import Store
from icebear.errors import InputError
from icebear.extras import need
from icebear.records import Sentence
from icebear.values import several

SHARD = 256
"""Sentences in a shard. Batches are formed inside one, so this is part of what an index is made of."""

COMMIT_SECONDS = 20.0
"""A kill loses at most this much work, and the shard it falls in."""


@dataclass(frozen=True)
class Progress:
    """Where a scan stands."""

    sentences: int
    tokens: int
    seconds: float
    """Of this run; with `tokens` the speed."""


def build_index(
    model: Model,
    corpus: Corpus,
    store: Store,
    k: int = 32,
    sites: Sequence[str] = ("ffn",),
    by: str = "activation",
    max_tokens: int = 256,
    seed: int = 0,
    engine: Engine = in_process,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Counter[str]:
    """Scan `corpus` into `store`: for each neuron the k most extreme sentences of both signs, and statistics.

    Interrupted, or finished with a smaller limit of the same corpus, it goes on where it was; the finished tables are
    the same to the bit, whatever the interruptions, the limits before, the order of shards and the engine. Returns the
    corpus's counts. Raises `StoreError` when the store was made otherwise, or with a larger limit.
    by, max_tokens, seed: see `icebear.actmax.index.scan.Settings`. engine: see `icebear.actmax.index.engines`.
    """
    need("index")  # not when all is scanned
    settings = Settings(k, tuple(dict.fromkeys(several(sites))), by, max_tokens, seed)
    index_size(model, settings.sites)  # raises for what the model does not have, before anything is written
    facts = {
        "model": model.name,
        "fingerprint": model.fingerprint,
        "dtype": model.dtype_name,
        **corpus.facts,
        "claimed_limit": corpus.limit,
        "shard": SHARD,
        **dataclasses.asdict(settings),
        "sites": list(settings.sites),
    }
    with store.exclusively():
        store.check(model.fingerprint, model.name)
        if not store.scan.finished_with(facts):
            table, counts = _scan(model, corpus, store, settings, facts, engine, on_progress)
            passed_over = store.scan.passed_over(settings.max_tokens)
            facts = {
                "finished": True,
                "limit": corpus.limit,
                "tokens": table.token_count,
                "statistics_tokens": table.counted,
                "counts": {**counts, **{what: n for what, n in passed_over.items() if n}},
                "gated": "ffn" in settings.sites and gated(model),
                "made_with": model.made_with,
            }
            store.scan.finish(_columns(table, model, settings.sites), _examples(table), facts)
        ensure_vectors(model, store)
        ensure_classes(store)
        return Counter(store.facts.all().get("counts") or {"sentences": store.count("sentences")})


def _scan(
    model: Model,
    corpus: Corpus,
    store: Store,
    settings: Settings,
    facts: dict[str, Any],
    engine: Engine,
    on_progress: Callable[[Progress], None],
) -> tuple[ScanSummary, Counter[str]]:
    """Commits what is missing of the shards; returns the table of all of them, and the corpus's counts.

    The last shard, if it is shorter, is not in the summary that is committed: with a larger limit it is another one.
    """
    short = empty_summary(index_size(model, settings.sites), settings.k)
    packed = store.scan.progress()
    table = _unpack(packed) if packed else short
    done = {number for number, size in store.scan.shards().items() if size == SHARD} if table.token_count else set()
    counts: Counter[str] = Counter()
    start = last = time.monotonic()
    sentences = tokens = 0
    waiting: dict[int, list[tuple[Sentence, bytes]]] = {}

    def threshold() -> torch.Tensor:
        return table.values[:, :, -1]

    left = (row for row in enumerate(shards(corpus.sentences(counts), SHARD)) if row[0] not in done)
    for number, shard, scanned, vectors in engine(model, settings, left, threshold):
        if len(shard) == SHARD:
            table = merge(table, scanned)
        else:
            short = scanned
        waiting[number] = [
            (dataclasses.replace(sentence, tokens=model.pieces(ids)), vector.tobytes() if vector.any() else b"")
            for sentence, vector in zip(shard, vectors.numpy(), strict=True)
            for ids in [model.token_ids(sentence.text, settings.max_tokens)]
        ]
        sentences, tokens = sentences + len(shard), tokens + scanned.token_count
        on_progress(Progress(sentences, tokens, time.monotonic() - start))
        if table.token_count and time.monotonic() - last > COMMIT_SECONDS:
            store.scan.commit(waiting, _pack(table), facts)
            waiting, last = {}, time.monotonic()
    whole = merge(table, short)
    if not whole.counted:
        raise InputError(f"The corpus's first {SHARD} sentences have no two tokens each; give another one.")
    store.scan.commit(waiting, _pack(table), facts)
    return whole, counts


def _pack(table: ScanSummary) -> dict[str, bytes]:
    """Each part by itself: SQLite holds at most a gigabyte in one place."""
    if not table.token_count:
        return {}
    parts = {**vars(table), **table.statistics}
    del parts["statistics"]
    return {name: save({name: torch.as_tensor(part)}) for name, part in parts.items()}


def _unpack(packed: dict[str, bytes]) -> ScanSummary:
    tensors = {name: load(part)[name] for name, part in packed.items()}
    statistics = {name: tensors.pop(name) for name in STATISTICS}
    parts: dict[str, Any] = {name: part if part.dim() else int(part) for name, part in tensors.items()}
    return ScanSummary(**parts, statistics=statistics)


# --- the result tables ------------------------------------------------------------------------------------


def _columns(table: ScanSummary, model: Model, sites: Sequence[str]) -> dict[str, Sequence[Any]]:
    """The columns of the store's table of neurons."""
    places = [(layer, site, i) for site in sites for layer in range(model.layers) for i in range(model.width(site))]
    layers, names, indices = zip(*places, strict=True)
    columns: dict[str, Sequence[Any]] = {"id": range(len(places)), "layer": layers, "site": names, "idx": indices}
    for name, statistic in STATISTICS.items():
        columns |= statistic.columns(table.statistics[name], table.counted)
    return columns


def _examples(table: ScanSummary) -> Iterator[tuple]:
    """The rows of the store's table of examples."""
    parts = [part.transpose(0, 1).split(4096) for part in (table.values, table.sentences, table.tokens)]
    first = 0
    for values, sentences, tokens in zip(*parts, strict=True):  # (n, 2, k) each
        neurons, polarities, ranks = place = (values > 0).nonzero(as_tuple=True)
        signed = (1 - 2 * polarities) * values[place]
        columns = (first + neurons, polarities, ranks, sentences[place], tokens[place], signed)
        yield from zip(*(column.tolist() for column in columns), strict=True)
        first += len(values)
