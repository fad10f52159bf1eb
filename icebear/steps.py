"""Progress in one form: what takes long calls `on_progress` with the number of steps done, and of all (0: unknown)."""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[int, int], None]


def unwatched(done: int, total: int) -> None:
    """Take progress that nobody watches."""


def counting(on_progress: OnProgress, total: int) -> Callable[[int], None]:
    """Return a function that is called with further steps, and reports those done."""
    done = 0

    def advance(steps: int) -> None:
        nonlocal done
        done = min(done + steps, total or done + steps)
        on_progress(done, total)

    return advance
