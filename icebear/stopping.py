"""An end within two seconds after Ctrl-C or SIGTERM, whatever the command does: it imports, is inside torch, waits."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NoReturn

SAID = "Stopped. Run the same command again to resume."
GRACE = 1.2
"""Seconds in which the command may end in order: leave its transactions, stop its workers."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)

_received: list[int] = []


class Stopped(SystemExit):
    """Raised where the command is; no `Exception`, so that nothing takes it for a failure."""


def stoppable(command: Callable[[], None]) -> None:
    """Runs `command` in the main thread of a process of its own."""
    # Python calls its handlers between two steps of the main thread only, and an import may swallow what they raise;
    # the descriptor is written to by the system's handler, at once.
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader,), daemon=True, name="stopping").start()
    complain = sys.unraisablehook
    # Where nothing can be raised, as in a callback of an import, Python prints it; the watcher ends the process then.
    sys.unraisablehook = lambda lost: None if issubclass(lost.exc_type, Stopped) else complain(lost)
    try:
        for number in SIGNALS:
            signal.signal(number, _stop)
        command()
    except BaseException:
        if not _received:
            raise
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        _end(_received[0])
    finally:
        signal.set_wakeup_fd(-1)
        writer.close()


def _stop(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    raise Stopped(128 + number)


def _watch(reader: socket.socket) -> None:
    while data := reader.recv(1):
        if data[0] in SIGNALS:
            time.sleep(GRACE)
            _end(data[0])


def _end(number: int) -> NoReturn:
    """Threads inside torch would hold an orderly end up, or abort it."""
    os.write(2, f"{SAID}\n".encode())
    os._exit(128 + number)
