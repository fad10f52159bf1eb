"""What a server does for all its visitors: loading the model, building an index, caching explanations."""

from __future__ import annotations

import atexit
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import streamlit as st
from streamlit import runtime

from icebear.actmax.shipped.shipped_index import prepared_index, shipped_index, shipped_path
from icebear.cache import cache_folder, cached, partial_folder
from icebear.db.sqlite import OPENED, VERSION
from icebear.db.store import complete_facts, documents_read
from icebear.errors import IcebearError, known_error
from icebear.models.loading.presets import PRESETS

if TYPE_CHECKING:
    from icebear.actmax.index.corpus import Corpus
    from icebear.concepts.results.result import Relevance
    from icebear.explanation.saved import SavedExplanation
    from icebear.models.model import Model
    from icebear.records import Sentence

SMALL_INDEX = 300
"""Summaries in the small index, which the app builds in the background."""
LARGE_INDEX = 3000
"""Summaries in the larger one, which the visitor starts; twice as many as are there, if those are more."""
SITES = ("ffn", "attn", "head")
"""What the app indexes: all that it ranks and links to."""
BATCH = 4
"""Sentences that an index reads at once: between two batches it makes way for a person."""
LETTERS = 140
"""As many letters take as long as a sentence without letters, in a batch of four (smollm2-135m)."""
LETTERS_AFTER = 143_000
"""As many letters take as long as all that follows the reading of the small index (smollm2-135m)."""
ROOM = 1 << 30
"""Bytes of cached explanations; the last one is kept in any case (one of 4,096 tokens has 2 GB)."""

PAUSED = "paused while a page is drawn"
STOPPED = "Stopped. Change the settings, or start again."

log = logging.getLogger("icebear.app")

importing = threading.Lock()
"""Held while torch or transformers is imported: two threads that import transformers at once find half of it."""
first_page = threading.Event()
"""Set when the browser has the first page, or the page waits for a job. The import of torch would slow it down."""
FETCHING = 1.5
"""Seconds in which a browser fetches the code of the pictures of a page that is drawn."""


def drawn() -> None:
    """Say that a page is drawn."""
    if not first_page.is_set():
        timer = threading.Timer(FETCHING, first_page.set)
        timer.daemon = True
        timer.start()


PAUSE = 0.05
"""Seconds between two looks at whether work that makes way may go on."""
CALM = 1.0
"""Seconds in which nobody waited before it goes on: a page, its work and the page with the result follow in less."""

page_threads: set[int] = set()
"""The threads that draw a page, which a person waits for."""


@contextmanager
def drawing() -> Iterator[None]:
    """Inside, this thread draws a page, and work that nobody waits for makes way at its next step."""
    page_threads.add(threading.get_ident())
    try:
        yield
    finally:
        page_threads.discard(threading.get_ident())


def running() -> list[Job]:
    """Return the jobs that have not ended."""
    return [thread for thread in threading.enumerate() if isinstance(thread, Job)]


def anyone_waits() -> bool:
    """Return whether a person waits, for a page or for a job."""
    return bool(page_threads) or any(job.has_waiting_visitors for job in running())


@atexit.register
def stop_all() -> None:
    """End all work before Python ends, which must not happen in the middle of an operation."""
    jobs = running()
    for job in jobs:
        job.stop()
    for job in jobs:
        job.join(2)


class Job(threading.Thread):
    """Work that ends with a result or an error; `doing` and `share` say how far it is."""

    def __init__(self, doing: str, work: Callable[[Job], Any], watch: Callable[[], float] | None = None):
        """watch: returns how far the work is, if it does not call `step` itself."""
        super().__init__(daemon=True)  # ends with the server, in the middle of anything: what it writes survives that
        self.what = self.doing = doing
        self._share, self._watch = 0.0, watch
        self.clock: tuple[float, float] | None = None
        """The time of the first step, later by all pauses, and its share; None: the next step is the first."""
        self.result: Any = None
        self.error: IcebearError | None = None
        self.stopped = False
        self.abandoned = False
        """Whether it was stopped because no page showed it any more; then it starts anew when one does."""
        self.left: set[str] = set()
        """The visitors who ended their wait, until they are told so."""
        self._waiting: set[str] = set()
        self._work = work
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
            self.error = known_error(error) or IcebearError(message)

    @property
    def share(self) -> float:
        """How far the work is, from 0 to 1."""
        return self._watch() if self._watch else self._share

    @property
    def has_waiting_visitors(self) -> bool:
        """Whether a visitor whose page is open waits for the result."""
        return any(map(_is_open, list(self._waiting)))

    def outcome(self) -> Any:
        """Wait for the result, and return it. Raises the error, if there is one."""
        self.join()
        if self.error:
            raise self.error
        return self.result

    def enter(self, visitor: str) -> None:
        """Count a visitor (the id of a session) who waits for the result."""
        self.left.discard(visitor)
        self._waiting.add(visitor)

    def leave(self, visitor: str) -> None:
        """End the wait of a visitor; the work ends if nobody else waits."""
        self._waiting.discard(visitor)
        self.left.add(visitor)
        if not self.has_waiting_visitors:
            self.stop()

    def abandon(self, visitor: str) -> None:
        """Count a visitor no more, whose page shows something else; the work ends if nobody else waits."""
        self._waiting.discard(visitor)
        if self.is_alive() and not self.stopped and not self.has_waiting_visitors:
            self.abandoned = True
            self.stop()

    def stop(self) -> None:
        """End the work at its next step, or its next operation on tensors."""
        self.stopped = True

    def step(self, done: float, total: float, doing: str | None = None) -> None:
        """Report progress, from the work; pause if only others are awaited. Raises `IcebearError` if it was stopped.

        doing: what is done; how long the rest takes is added, by the speed since the first step.
        """
        self._share, now, busy = done / total, time.monotonic(), -math.inf
        since, before = self.clock = self.clock if self.clock and self.clock[1] <= self._share else (now, self._share)
        if doing is not None:
            left = (now - since) * (1 - self._share) / (self._share - before) if self._share > before else None
            self.doing = doing if left is None else f"{doing}, about {duration(left)} left"
        doing = self.doing
        while not (self.stopped or self.has_waiting_visitors or self._has_a_model()):
            if anyone_waits():
                busy = time.monotonic()
            elif time.monotonic() - busy > CALM:
                break
            self.doing = PAUSED
            time.sleep(PAUSE)
        self.doing, self.clock = doing, (since + time.monotonic() - now, before)
        self.check()

    def _has_a_model(self) -> bool:
        """Return whether it has the lock of a model, for which the page may wait that it would make way for."""
        return any(load.result and load.result.lock.holder == self.ident for load in list(shared().loads.values()))

    def check(self) -> None:
        if self.stopped:
            raise IcebearError(STOPPED)

    def _stoppable(self) -> AbstractContextManager:
        """Check before each operation of torch in this thread, once torch is imported."""
        if "torch.overrides" not in sys.modules:
            return nullcontext()
        from icebear.concepts.passes.run import Checked

        return Checked(self.check)


def _is_open(visitor: str) -> bool:
    """Return whether the page of a visitor is open."""
    return not runtime.exists() or runtime.get_instance().is_active_session(visitor)


class Shared:
    """The indexes that a server builds, and the explanations that it caches (`shared`)."""

    def __init__(self, room: int = ROOM) -> None:
        self.builds: dict[Hashable, Job] = {}
        """Path (None: the small index), or state of an index -> the job that builds it, or its map, or has done so
        since the server began."""
        self.loads: dict[str, Job] = {}
        """The settings of a model -> the job that loads it, or has loaded it."""
        self.prepared: set[Path] = set()
        """The indexes that come with icebear and were whole once; since then the app may have written to them."""
        self.room = room
        self._relevances: dict[tuple, Relevance] = {}  # the longest unused first
        self.staged: WeakKeyDictionary[Relevance, SavedExplanation] = WeakKeyDictionary()
        """As long as the relevance is cached."""
        self._lock = threading.Lock()

    def build(self, model: Job, path: Path | None = None, documents: int = SMALL_INDEX) -> None:
        """Start to build the small index, or a larger one at `path`; the job's result is its path.

        Nothing happens while that is going on. After an error or a stop it resumes.
        """
        self.begin(
            path,
            f"Building {path.name}" if path else "Building the small index",
            partial(_build, model, path, documents),
        )

    def begin(self, key: Hashable, what: str, work: Callable[[Job], Any]) -> None:
        """Start work that goes on whatever page is shown, as `build` does."""
        with self._lock:
            before = self.builds.get(key)
            if not (before and before.is_alive()):
                self.builds[key] = Job(what, work)

    def relevance(self, key: tuple, make: Callable[[], Relevance]) -> Relevance:
        """Return the result of `make`, cached for all visitors; a result is never changed."""
        with self._lock:
            result = self._relevances.pop(key, None)
        if result is None:
            result = make()
        with self._lock:
            self._relevances[key] = result
            while len(self._relevances) > 1 and sum(r.neurons.nbytes for r in self._relevances.values()) > self.room:
                del self._relevances[next(iter(self._relevances))]
        return result


@st.cache_resource(show_spinner=False)
def shared() -> Shared:
    """Return the one of this server."""
    return Shared()


def loading(name: str, **options: Any) -> Job:
    """Start to load a model; it is the job's result."""

    def load(job: Job) -> Model:
        first_page.wait(5)
        with importing:
            from icebear.models.loading.loading import load_model
        return load_model(name, **options)

    preset = PRESETS.get(name)
    if preset and not cached(preset.folder):
        what = f"Fetching {name} ({preset.download // 1_000_000} MB) and converting it, once"
        return Job(what, load, partial(fetched, preset.folder, preset.download))
    return Job(f"Loading {name}, once for all visitors", load)


def fetched(folder: Path, size: int) -> float:
    """Return which share of a download of `size` bytes, and of its copy on the way into `folder`, is there."""
    size_there = 0
    for path in partial_folder(folder).rglob("*"):
        with suppress(OSError):  # it was moved meanwhile
            size_there += path.stat().st_size
    return min(1.0, size_there / size)


def cached_indexes(model: str) -> list[Path]:
    """Return the finished indexes of a model in the cache, the one with the most documents first: the small one that
    the app builds, and the one that comes with icebear."""
    names = (f"summaries-{escape(Path(model).name)}-*-v{version}.db" for version in reversed(OPENED))
    paths = [path for name in names for path in sorted(cache_folder().glob(name))]
    shipped = shipped_path(model)
    if shipped and (shipped.exists() if shipped in shared().prepared else prepared_index(model)):
        shared().prepared.add(shipped)
        paths.append(shipped)
    facts = {path: complete_facts(path) for path in paths}
    of_model = [path for path in paths if facts[path].get("model") == model]
    return sorted(of_model, key=lambda path: -(documents_read(facts[path]) or 0))


def _build(loading: Job, path: Path | None, documents: int, job: Job) -> Path:
    """Build an index of so many summaries at `path`, or the small one in the cache; or prepare the one that comes with
    icebear. Return its path."""
    job.doing = "waiting for the model"
    while loading.is_alive():
        job.step(0, 1)
        loading.join(0.2)
    if loading.error:
        raise loading.error
    with importing:
        from icebear.actmax.index.corpus import read_corpus
        from icebear.concepts.vocabulary.calibration import calibrate
    model: Model = loading.result
    job.doing = "calibrating the model, once"
    if model.has_family:
        calibrate(model)
    job.step(0, 1)
    if path is not None and path == shipped_path(model.name):
        job.doing = "preparing the sentences that come with icebear, once"
        shipped_index(model.name, lambda: model)
        return path
    job.doing = "fetching the summaries"
    corpus = read_corpus("wiki-summaries", limit=documents)
    name = f"summaries-{Path(model.name).name}-{model.dtype_name}-{model.fingerprint[:6]}-heads-v{VERSION}.db"
    path = path or cache_folder() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    _scan(job, model, corpus, path)
    return path


def _scan(job: Job, model: Model, corpus: Corpus, path: Path) -> None:
    """Scan a corpus into an index; the job says by sentence how far it is, and how long it still takes."""
    from icebear.actmax.index import build as index
    from icebear.actmax.index.meanings import embed_examples
    from icebear.db.store import open_store
    from icebear.models.loading.encoder import default_encoder

    sentences = list(corpus.sentences())
    reading = Reading(job, len(sentences), letters(sentences))
    with open_store(path, create=True) as store:
        shards = store.scan.shards() if path.exists() else {}
        done = [number * index.SHARD for number, size in shards.items() if size == index.SHARD]
        reading.batch([sentence for start in done for sentence in sentences[start : start + index.SHARD]])
        job.clock = None  # what was read before took no time

        def on_shard(done: int, total: int) -> None:
            if done == total:
                job.doing = "writing the results"

        index.build_index(
            model, corpus, store, sites=SITES, on_progress=on_shard, on_batch=reading.batch, batch_size=BATCH
        )
        job.doing = "encoding what the sentences are about"
        if encoder := default_encoder(logging.getLogger("icebear").warning):
            embed_examples(store, encoder, job.step)


@dataclass
class Reading:
    """How much of a corpus a job has read. Time goes by letters, because a scan reads short sentences first."""

    job: Job
    all_sentences: int
    all_letters: int
    sentences: int = 0
    letters: int = 0

    def batch(self, batch: Sequence[Sentence]) -> None:
        """Count the sentences of a batch, and say how long the others take."""
        self.sentences += len(batch)
        self.letters += letters(batch)
        self.job.step(
            self.letters,
            self.all_letters + LETTERS_AFTER,
            f"{self.sentences:,} of {self.all_sentences:,} sentences read",
        )


def letters(sentences: Sequence[Sentence]) -> int:
    """Return by how many letters the time goes in which sentences are read."""
    return sum(LETTERS + len(sentence.text) for sentence in sentences)


def duration(seconds: float) -> str:
    """Return a time in words."""
    return f"{max(10, round(seconds, -1)):.0f} seconds" if seconds < 90 else f"{seconds / 60:.0f} minutes"
