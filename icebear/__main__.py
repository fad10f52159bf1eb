"""The `icebear` command, also as ``python -m icebear``."""

from __future__ import annotations

import gc
import os
import sys

from icebear.postponed import Postponing
from icebear.stopping import stoppable

SERVERS = ["app"], ["mcp"], ["serve"]
"""Their threads may import the same module at once, where postponing it could wait forever."""


def main() -> None:
    if sys.getfilesystemencoding() != "utf-8":  # as with LC_ALL=C, which would split prompts and names into bytes
        os.execv(sys.executable, [sys.executable, "-P", "-X", "utf8", "-m", "icebear", *sys.argv[1:]])
    gc.set_threshold(1_000_000)  # imports make many objects that stay, which Python would walk again and again
    if sys.argv[1:2] not in SERVERS:
        sys.meta_path.insert(0, Postponing)  # type: ignore[arg-type]
    for number in range(3):
        _opened(number)
    sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    try:
        stoppable(_command)
    finally:
        gc.freeze()  # and once more when it ends


def _opened(number: int) -> None:
    """Open a standard stream that whoever started the command has closed: a store would get its number, and Python
    has None in its place."""
    name, way = ("stdin", "r") if number == 0 else (("stdout", "stderr")[number - 1], "w")
    if getattr(sys, name) is None:
        null = os.open(os.devnull, os.O_RDWR)
        if null != number:
            os.dup2(null, number)
            os.close(null)
        setattr(sys, name, os.fdopen(number, way))


def _command() -> None:
    from icebear.app.cli.main import main as command

    command(prog_name="icebear")


if __name__ == "__main__":
    main()
