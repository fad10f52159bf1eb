"""What a server keeps for all its visitors: the indexes that it builds, cached explanations, and loading the model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import streamlit as st

from icebear.actmax.shipped.shipped_index import prepared_index, shipped_path
from icebear.app.web.shared.background_job import Job, first_page, importing
from icebear.app.web.shared.index_builds import SMALL_INDEX, build
from icebear.cache import cache_folder, cached, partial_folder
from icebear.db.sqlite import OPENED
from icebear.db.store import complete_facts, documents_read
from icebear.models.loading.presets import PRESETS

if TYPE_CHECKING:
    from icebear.concepts.results.result import Relevance
    from icebear.explanation.saved import SavedExplanation
    from icebear.models.model import Model

ROOM = 1 << 30
"""Bytes of cached explanations; the last one is kept in any case (one of 4,096 tokens has 2 GB)."""


class ServerState:
    """The indexes that a server builds, and the explanations that it caches, for all visitors (`server_state`)."""

    def __init__(self, room: int = ROOM) -> None:
        self.builds: dict[Hashable, Job] = {}
        """Key -> the job that builds it, or has built it since the server began. Keys: the path of an index, None for
        the small one, ("map", path) for a map."""
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
            partial(build, model, path, documents),
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
def server_state() -> ServerState:
    """Return the indexes and explanations that all visitors of this server share."""
    return ServerState()


def start_loading(name: str, **options: Any) -> Job:
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
    if shipped and (shipped.exists() if shipped in server_state().prepared else prepared_index(model)):
        server_state().prepared.add(shipped)
        paths.append(shipped)
    facts = {path: complete_facts(path) for path in paths}
    of_model = [path for path in paths if facts[path].get("model") == model]
    return sorted(of_model, key=lambda path: -(documents_read(facts[path]) or 0))
