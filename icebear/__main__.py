"""The `icebear` command, also as ``python -m icebear``."""

from __future__ import annotations

import gc
import os
import sys

from icebear.stopping import stoppable


def main() -> None:
    if (
        sys.getfilesystemencoding() != "utf-8"
    ):  # such as with LC_ALL=C, where prompts and names would be split into bytes
        os.execv(sys.executable, [sys.executable, "-X", "utf8", "-m", "icebear", *sys.argv[1:]])
    gc.set_threshold(7_000)  # imports make many objects that stay, which 700 has Python walk again and again
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    stoppable(_command)


def _command() -> None:
    from icebear.app.cli.main import main as command

    command(prog_name="icebear")


if __name__ == "__main__":
    main()
