"""What the server does beside its visitors, on threads of its own: loading the model, building a first store."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icebear.errors import IcebearError, out_of_memory

if TYPE_CHECKING:
    from icebear.concepts.models.model import Model

LARGER = 3000
"""Summaries in a store that somebody asked for; ten times as many as in the demo's."""
SMALL_MODEL = 1_000_000_000
"""Parameters up to which a store is built without being asked for."""

log = logging.getLogger("icebear.app")

importing = threading.Lock()
"""Held by whoever imports what is heavy: two threads that import transformers at once find half of it."""


class Job(threading.Thread):
    """Work with a result or an error at its end, and words on where it is."""

    def __init__(self, doing: str, work: Callable[[Job], Any]):
        super().__init__(daemon=True)  # ends with the server, in the middle of anything: what it writes survives that
        self.doing, self.share = doing, 0.0
        self.result: Any = None
        self.error: IcebearError | None = None
        self.stopped = False
        """Whether a visitor wants no result; the work looks at it where it can end."""
        self._work = work
        self.start()

    def run(self) -> None:
        what, begun = self.doing, time.monotonic()
        log.info("%s ...", what)
        try:
            self.result = self._work(self)
            log.info("%s: done in %.0f s.", what, time.monotonic() - begun)
        except Exception as error:
            log.warning("%s: failed.", what, exc_info=error)
            said = f"{what} failed ({type(error).__name__}: {error}); the log of icebear app has the rest."
            self.error = error if isinstance(error, IcebearError) else out_of_memory(error) or IcebearError(said)


def loading(name: str, **options: Any) -> Job:
    """Begins to load a model; the job's result."""
    from icebear.cache import cached
    from icebear.concepts.models.presets import PRESETS

    def load(job: Job) -> Model:
        with importing:
            from icebear.concepts.models.loading import load_model
        return load_model(name, **options)

    preset = PRESETS.get(name)
    if preset and not cached(preset.folder):
        return Job(f"Fetching {name} ({preset.download // 1_000_000} MB) and converting it, once", load)
    return Job(f"Loading {name}, once for all visitors", load)


def building(model: Job, path: Path | None, asked: bool) -> Job:
    """Begins to build the demo's store, or a larger one at `path`; the job's result is its path."""
    what = f"Building a store of {LARGER:,} summaries" if path else "Building the demo's store"
    return Job(what, lambda job: _build(job, model, path, asked))


def _build(job: Job, loading: Job, path: Path | None, asked: bool) -> Path:
    job.doing = "waiting for the model"
    loading.join()
    if loading.error:
        raise loading.error
    with importing:
        from icebear.actmax.index import build as index
        from icebear.app.cli.verbs.demo import SUMMARIES, store_of
        from icebear.concepts.calibration import calibrate
        from icebear.concepts.corpus import read_corpus
        from icebear.db.store import open_store
    model: Model = loading.result
    size = sum(parameter.numel() for parameter in model.net.parameters())
    if size > SMALL_MODEL and not asked:
        raise IcebearError(f"With {size / 1e9:.1f} billion parameters that takes a while, so it waits for you.")
    job.doing = "measuring the model, once"
    if model.has_family:
        calibrate(model)
    summaries = LARGER if path else SUMMARIES
    path = path or store_of(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    job.doing = "fetching the summaries"
    corpus = read_corpus("wiki-summaries", limit=summaries)
    total = sum(1 for _ in corpus.sentences())
    with open_store(path, create=True) as store:
        before = sum(size for size in store.scan.shards().values() if size == index.SHARD)

        def show(progress: index.Progress) -> None:
            done = before + progress.sentences
            job.share = min(done / total, 1.0)
            job.doing = f"{done:,} of {total:,} sentences read" if done < total else "writing what was found"

        show(index.Progress(0, 0, 0.0))
        index.build_index(model, corpus, store, on_progress=show)
    return path
