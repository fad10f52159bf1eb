"""What all visitors of a server share beside the model: stores that are built, and explanations that are kept."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import streamlit as st

from icebear.app.web import background
from icebear.app.web.background import Job

if TYPE_CHECKING:
    from icebear.concepts.attribution.result import Relevance

ROOM = 1 << 30
"""Bytes of explanations that are kept, but always the last one; one of 4,096 tokens has 2 GB."""


class Shared:
    """One for each server (`shared`)."""

    def __init__(self, room: int = ROOM) -> None:
        self.builds: dict[Path | None, Job] = {}
        """Path (None: the demo's store) -> the job that builds it, or did, since the server began."""
        self.room = room
        self._relevances: dict[tuple, Relevance] = {}  # the longest unused first
        self._lock = threading.Lock()

    def build(self, model: Job, path: Path | None = None, asked: bool = True) -> None:
        """Begins the demo's store, or a larger one at `path`; the job's result is its path.

        Nothing happens while that is going on, or when it is done. asked: by somebody; for a large model that is
        needed.
        """
        with self._lock:
            before = self.builds.get(path)
            if before is None or before.error:
                self.builds[path] = background.building(model, path, asked)

    def relevance(self, key: tuple, make: Callable[[], Relevance]) -> Relevance:
        """What `make` gives, which is kept for all visitors; a result is never changed."""
        with self._lock:
            result = self._relevances.pop(key, None)
        if result is None:
            result = make()
        with self._lock:
            self._relevances[key] = result
            while len(self._relevances) > 1 and sum(map(_bytes, self._relevances.values())) > self.room:
                del self._relevances[next(iter(self._relevances))]
        return result


def _bytes(relevance: Relevance) -> int:
    return relevance.neurons.nbytes


@st.cache_resource(show_spinner=False)
def shared() -> Shared:
    """The one of this server."""
    return Shared()
