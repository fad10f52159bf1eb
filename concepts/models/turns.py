"""Threads share a model by turns."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

PutIn = Callable[[], AbstractContextManager[Any]]


class Turns:
    """A reentrant lock; threads get it in the order in which they asked for it."""

    # Hooks on a shared model see the passes of every thread. So `give_way` takes out all that its thread has put in,
    # and only then lets go: whoever holds the lock finds nothing of another thread in the model, no hook has to ask
    # whose pass it sees, and it does not matter which of two threads leaves first.

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._holder: int | None = None
        self._depth = 0  # of the holder's `with`
        self._lent: list[tuple[PutIn, ExitStack]] = []  # those among them that can be interrupted

    def __enter__(self) -> None:
        if self._holder != threading.get_ident():
            self._take()
        self._depth += 1

    def __exit__(self, *_: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self._leave()

    def _take(self) -> None:
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                self._changed.wait_for(lambda: self._holder is None and self._waiting[0] is ticket)
                self._holder = threading.get_ident()
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def _leave(self) -> None:
        with self._changed:
            self._holder = None
            self._changed.notify_all()

    @contextmanager
    def lending(self, put_in: PutIn) -> Iterator[None]:
        """Hold the lock inside the context that `put_in` makes; `give_way` leaves it and enters a new one."""
        with self, ExitStack() as inside:
            inside.enter_context(put_in())
            self._lent.append((put_in, inside))
            try:
                yield
            finally:
                self._lent.pop()

    def give_way(self) -> None:
        """Let those who wait go first; not inside a plain `with` of this lock, as nobody knows how to undo that."""
        if not self._waiting or self._depth > len(self._lent):
            return
        lent, depth = self._lent, self._depth
        for _, inside in reversed(lent):
            inside.close()
        self._lent, self._depth = [], 0
        self._leave()
        interrupt: BaseException | None = None
        while self._holder != threading.get_ident():
            try:
                self._take()
            except BaseException as error:  # Ctrl-C: what is around this call still has to be left in its own turn
                interrupt = error
        self._lent, self._depth = lent, depth
        for put_in, inside in lent:
            inside.enter_context(put_in())
        if interrupt:
            raise interrupt


def draws(device: torch.device, seed: int) -> PutIn:
    """For `Turns.lending`: torch's random numbers on a device are those of `seed`, going on where they were left."""
    place: Any = torch if device.type == "cpu" else torch.get_device_module(device)
    where = (device,) if device.type == "cuda" else ()
    state = torch.Generator(device).manual_seed(seed).get_state()

    @contextmanager
    def drawing() -> Iterator[None]:
        nonlocal state
        others = place.get_rng_state(*where)
        place.set_rng_state(state, *where)
        try:
            yield
        finally:
            state = place.get_rng_state(*where)
            place.set_rng_state(others, *where)

    return drawing
