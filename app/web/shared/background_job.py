"""A job: work in a thread of the server, which makes way for the pages that people wait for."""

from __future__ import annotations

import atexit
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from streamlit import runtime

from icebear.errors import IcebearError, known_error

PAUSED = "paused while a page is drawn"
STOPPED = "Stopped. Change the settings, or start again."

log = logging.getLogger("icebear.app")

importing = threading.Lock()
"""Held while torch or transformers is imported: two threads that import transformers at once find half of it."""
first_page = threading.Event()
"""Set when the browser has the first page, or the page waits for a job. The import of torch would slow it down."""
FETCHING = 1.5
"""Seconds in which a browser fetches the code of the pictures of a page that is drawn."""


def set_first_page() -> None:
    """Set `first_page` when a browser had time to fetch what a page, which is drawn, needs."""
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
        while not (self.stopped or self.has_waiting_visitors or self._holds_a_model()):
            if anyone_waits():
                busy = time.monotonic()
            elif time.monotonic() - busy > CALM:
                break
            self.doing = PAUSED
            time.sleep(PAUSE)
        self.doing, self.clock = doing, (since + time.monotonic() - now, before)
        self.check()

    def _holds_a_model(self) -> bool:
        """Return whether this job holds a model's lock: a page may wait for that lock, so the job must not pause."""
        return any(load.result and load.result.lock.holder == self.ident for load in list(loads.values()))

    def check(self) -> None:
        if self.stopped:
            raise IcebearError(STOPPED)

    def _stoppable(self) -> AbstractContextManager:
        """Check before each operation of torch in this thread, once torch is imported."""
        if "torch.overrides" not in sys.modules:
            return nullcontext()
        from icebear.concepts.passes.run import Checked

        return Checked(self.check)


loads: dict[str, Job] = {}
"""The settings of a model -> the job that loads it, or has loaded it."""


def _is_open(visitor: str) -> bool:
    """Return whether the page of a visitor is open."""
    return not runtime.exists() or runtime.get_instance().is_active_session(visitor)


def duration(seconds: float) -> str:
    """Return a time in words."""
    return f"{max(10, round(seconds, -1)):.0f} seconds" if seconds < 90 else f"{seconds / 60:.0f} minutes"
