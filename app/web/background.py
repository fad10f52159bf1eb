"""What a server does for all its visitors: loading the model, building an index, caching explanations."""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import streamlit as st

from icebear.cache import cached
from icebear.concepts.models.presets import PRESETS
from icebear.errors import IcebearError, out_of_memory

if TYPE_CHECKING:
    from icebear.actmax.explanation import Grouped
    from icebear.concepts.attribution.result import Relevance
    from icebear.concepts.models.model import Model

LARGER = 3000
"""Summaries in the larger index; ten times as many as in the small one."""
SMALL_MODEL = 1_000_000_000
"""Up to this number of parameters, a model's small index is built without a request."""
ROOM = 1 << 30
"""Bytes of cached explanations; the last one is kept in any case (one of 4,096 tokens has 2 GB)."""

log = logging.getLogger("icebear.app")

importing = threading.Lock()
"""Held while torch or transformers is imported: two threads that import transformers at once find half of it."""


running: WeakSet[Job] = WeakSet()


@atexit.register
def stop_all() -> None:
    """End all work before Python ends, which must not happen in the middle of an operation."""
    jobs = list(running)
    for job in jobs:
        job.stop()
    for job in jobs:
        job.join(2)


class Job(threading.Thread):
    """Work that ends with a result or an error; `doing` and `share` say how far it is."""

    def __init__(self, doing: str, work: Callable[[Job], Any]):
        super().__init__(daemon=True)  # ends with the server, in the middle of anything: what it writes survives that
        self.doing, self.share = doing, 0.0
        self.result: Any = None
        self.error: IcebearError | None = None
        self._stopped_by_visitor = False
        self._work = work
        running.add(self)
        self.start()

    def run(self) -> None:
        what, begun = self.doing, time.monotonic()
        log.info("%s ...", what)
        try:
            with self._stoppable():
                self.result = self._work(self)
            log.info("%s: done in %.0f s.", what, time.monotonic() - begun)
        except IcebearError as error:
            log.info("%s: %s", what, error)
            self.error = error
        except Exception as error:
            log.warning("%s: failed.", what, exc_info=error)
            message = f"{what} failed ({type(error).__name__}: {error}); the log of icebear app has the details."
            self.error = out_of_memory(error) or IcebearError(message)

    def stop(self) -> None:
        """End the work at its next step, or its next operation on tensors."""
        self._stopped_by_visitor = True

    def step(self, done: int, total: int) -> None:
        """Report progress, from the work. Raises `IcebearError` if a visitor stopped it."""
        self.share = done / total
        self.check()

    def check(self) -> None:
        if self._stopped_by_visitor:
            raise IcebearError("Stopped. Change the settings, or start again.")

    def _stoppable(self) -> AbstractContextManager:
        """Check before each operation of torch in this thread, once torch is imported."""
        if "torch.overrides" not in sys.modules:
            return nullcontext()
        from torch.overrides import TorchFunctionMode

        class Checked(TorchFunctionMode):
            def __torch_function__(mode, func, types, args=(), kwargs=None):  # type: ignore
                self.check()
                return func(*args, **(kwargs or {}))

        return Checked()


class Shared:
    """The indexes that a server builds, and the explanations that it caches (`shared`)."""

    def __init__(self, room: int = ROOM) -> None:
        self.builds: dict[Path | None, Job] = {}
        """Path (None: the small index) -> the job that builds it, or has built it, since the server began."""
        self.loads: dict[str, Job] = {}
        """The settings of a model -> the job that loads it, or has loaded it."""
        self.room = room
        self._relevances: dict[tuple, Relevance] = {}  # the longest unused first
        self.groups: WeakKeyDictionary[Relevance, dict[str, Grouped]] = WeakKeyDictionary()
        """By site, as long as the relevance is cached."""
        self._lock = threading.Lock()

    def build(self, model: Job, path: Path | None = None, on_request: bool = True) -> None:
        """Start to build the small index, or a larger one at `path`; the job's result is its path.

        Nothing happens while that is going on, or when it is done. on_request: by a visitor, which a large model needs.
        """
        with self._lock:
            before = self.builds.get(path)
            if before is None or before.error:
                self.builds[path] = Job(
                    f"Building an index of {LARGER:,} summaries" if path else "Building the small index",
                    lambda job: _build(job, model, path, on_request),
                )

    def relevance(self, key: tuple, make: Callable[[], Relevance]) -> Relevance:
        """Return the result of `make`, cached for all visitors; a result is never changed."""
        with self._lock:
            result = self._relevances.pop(key, None)
        if result is None:
            result = make()
        with self._lock:
            self._relevances[key] = result
            while (
                len(self._relevances) > 1 and sum(one.neurons.nbytes for one in self._relevances.values()) > self.room
            ):
                del self._relevances[next(iter(self._relevances))]
        return result


@st.cache_resource(show_spinner=False)
def shared() -> Shared:
    """Return the one of this server."""
    return Shared()


def loading(name: str, **options: Any) -> Job:
    """Start to load a model; it is the job's result."""

    def load(job: Job) -> Model:
        with importing:
            from icebear.concepts.models.loading import load_model
        return load_model(name, **options)

    preset = PRESETS.get(name)
    if preset and not cached(preset.folder):
        return Job(f"Fetching {name} ({preset.download // 1_000_000} MB) and converting it, once", load)
    return Job(f"Loading {name}, once for all visitors", load)


def _build(job: Job, loading: Job, path: Path | None, on_request: bool) -> Path:
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
    if size > SMALL_MODEL and not on_request:
        raise IcebearError(f"The model has {size / 1e9:.1f} billion parameters, so this takes a while.")
    job.doing = "calibrating the model, once"
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
            job.doing = f"{done:,} of {total:,} sentences read" if done < total else "writing the results"

        show(index.Progress(0, 0, 0.0))
        index.build_index(model, corpus, store, on_progress=show)
    return path
