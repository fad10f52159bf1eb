"""Stop within two seconds after Ctrl-C or SIGTERM, also during imports, inside torch, and while waiting."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

SAID = "Stopped. Run the same command again to resume."
GRACE = 1.2
"""Seconds for the command to end in order: to leave transactions and stop workers."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
MUST_NOT_RAISE = {"importlib._bootstrap", "asyncio.base_events"}
"""The handler must not raise inside calls of these modules. An import swallows the exception, or torch's C++ code
aborts on it; a task prints its traceback."""

_received: list[int] = []


class Stopped(SystemExit):
    """Raised in the command. It is not an `Exception`, so that no handler treats it as a failure."""


def stoppable(command: Callable[[], None]) -> None:
    """Run a command that signals stop; this must be the main thread of a process without other work."""
    # Python calls signal handlers only between two steps of the main thread, and code may swallow their exception.
    # The handler of the system writes to this descriptor at once.
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader,), daemon=True, name="stopping").start()
    complain = sys.unraisablehook
    # Python prints an exception that it cannot raise, such as in `__del__`. The watcher ends the process.
    sys.unraisablehook = lambda lost: None if issubclass(lost.exc_type, Stopped) else complain(lost)
    try:
        for number in SIGNALS:
            signal.signal(number, _stop)
        command()
    except BaseException:
        if not _received:
            raise
        _flush_and_end(_received[0])
    finally:
        signal.set_wakeup_fd(-1)
        writer.close()


@contextmanager
def interruptible() -> Iterator[None]:
    """In a block, Ctrl-C raises `KeyboardInterrupt`, so that it ends one command of several."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _stop(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    while frame is not None:
        if frame.f_globals.get("__name__") in MUST_NOT_RAISE:
            _flush_and_end(number)
        frame = frame.f_back
    raise Stopped(128 + number)


def _watch(reader: socket.socket) -> None:
    while data := reader.recv(1):
        if data[0] in SIGNALS and signal.getsignal(data[0]) is _stop:
            time.sleep(GRACE)
            _end(data[0])


def _flush_and_end(number: int) -> NoReturn:
    with suppress(OSError, ValueError, RuntimeError):  # the last, if a write to stdout is in progress
        sys.stdout.flush()
    _end(number)


def _end(number: int) -> NoReturn:
    """End the process at once, because threads inside torch would delay or abort an orderly end."""
    os.write(2, f"{SAID}\n".encode())
    os._exit(128 + number)
