"""`build_index`: a resumable scan of a corpus into a store."""

from __future__ import annotations

import dataclasses
import io
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from icebear.actmax.index.activation_statistics import STATISTICS
from icebear.actmax.index.classes import ensure_classes
from icebear.actmax.index.engines import Engine, local
from icebear.actmax.index.neuron_vectors import ensure_vectors, gated
from icebear.actmax.index.scan import Settings, neuron_count, shards
from icebear.actmax.index.summary import ScanSummary, empty_summary, merge
from icebear.concepts.corpus import Corpus
from icebear.concepts.models.model import Model
from icebear.concepts.models.provenance import provenance
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
    engine: Engine = local,
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
    neuron_count(model, settings.sites)  # raises for what the model does not have, before anything is written
    with store.exclusively():
        return _build(model, corpus, store, settings, engine, on_progress)


def _build(
    model: Model,
    corpus: Corpus,
    store: Store,
    settings: Settings,
    engine: Engine,
    on_progress: Callable[[Progress], None],
) -> Counter[str]:
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
    if not store.scan.finished_with(facts):
        table, counts = _scan(model, corpus, store, settings, facts, engine, on_progress)
        facts = {
            "finished": True,
            "limit": corpus.limit,
            "tokens": table.token_count,
            "statistics_tokens": table.counted,
            "counts": {**counts, **{what: n for what, n in store.scan.passed_over(settings.max_tokens).items() if n}},
            "gated": "ffn" in settings.sites and gated(model),
            "made_with": provenance(model),
        }
        store.scan.finish(_statistics(table, model, settings.sites), _examples(table), facts)
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
    short = empty_summary(neuron_count(model, settings.sites), settings.k)
    table = _unpack(store.scan.progress()) or short
    done = {number for number, size in store.scan.shards().items() if size == SHARD} if table.token_count else set()
    counts: Counter[str] = Counter()
    start = last = time.monotonic()
    sentences = tokens = 0
    waiting: dict[int, list[tuple[Sentence, bytes]]] = {}

    def threshold() -> torch.Tensor:
        return table.values[:, :, -1]

    left = (row for row in enumerate(shards(corpus.sentences(counts), SHARD)) if row[0] not in done)
    for number, shard, found, vectors in engine(model, settings, left, threshold):
        if len(shard) == SHARD:
            table = merge(table, found)
        else:
            short = found
        waiting[number] = [
            (_as_read(model, sentence, settings), vector.tobytes() if vector.any() else b"")
            for sentence, vector in zip(shard, vectors.numpy(), strict=True)
        ]
        sentences, tokens = sentences + len(shard), tokens + found.token_count
        on_progress(Progress(sentences, tokens, time.monotonic() - start))
        if table.token_count and time.monotonic() - last > COMMIT_SECONDS:
            store.scan.commit(waiting, _pack(table), facts)
            waiting, last = {}, time.monotonic()
    whole = merge(table, short)
    if not whole.counted:
        raise InputError(f"The corpus's first {SHARD} sentences have no two tokens each; give another one.")
    store.scan.commit(waiting, _pack(table), facts)
    return whole, counts


def _as_read(model: Model, sentence: Sentence, settings: Settings) -> Sentence:
    return dataclasses.replace(sentence, tokens=model.pieces(model.token_ids(sentence.text, settings.max_tokens)))


# --- the running summary, packed --------------------------------------------------------------------------


def _pack(table: ScanSummary) -> dict[str, bytes]:
    if not table.token_count:
        return {}
    parts = {**vars(table), **table.statistics}
    del parts["statistics"]
    packed = {}
    for name, value in parts.items():
        buffer = io.BytesIO()
        np.save(buffer, value.numpy() if isinstance(value, torch.Tensor) else np.array(value), allow_pickle=False)
        packed[name] = buffer.getvalue()
    return packed


def _unpack(packed: dict[str, bytes]) -> ScanSummary | None:
    if not packed:
        return None
    arrays = {name: np.load(io.BytesIO(value), allow_pickle=False) for name, value in packed.items()}
    parts: dict[str, Any] = {
        name: int(array) if array.ndim == 0 else torch.from_numpy(array) for name, array in arrays.items()
    }
    statistics = {name: parts.pop(name) for name in STATISTICS}
    return ScanSummary(**parts, statistics=statistics)


# --- the result tables' rows ------------------------------------------------------------------------------


def _statistics(table: ScanSummary, model: Model, sites: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row of the store's table of neurons for each of them."""
    columns: dict[str, list[Any]] = {}
    for name, statistic in STATISTICS.items():
        columns |= statistic.columns(table.statistics[name], table.counted)
    names = ((layer, site, i) for site in sites for layer in range(model.layers) for i in range(model.width(site)))
    for number, ((layer, site, index), *values) in enumerate(zip(names, *columns.values(), strict=True)):
        place = {"id": number, "layer": layer, "site": site, "idx": index}
        yield place | dict(zip(columns, values, strict=True))


def _examples(table: ScanSummary) -> Iterator[tuple]:
    for neuron in range(table.neurons):
        for polarity in range(2):
            sign = 1 - 2 * polarity
            rows = zip(
                table.sentences[polarity, neuron].tolist(),
                table.tokens[polarity, neuron].tolist(),
                table.values[polarity, neuron].tolist(),
                strict=True,
            )
            for rank, (sentence, token, value) in enumerate(rows):
                if value > 0:
                    yield neuron, polarity, rank, sentence, token, sign * value
