"""stdout and stderr that a text cannot steer: control characters are shown, not sent to the terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

BIDIRECTIONAL = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""They reorder what a terminal shows, up to the end of the line."""
CONTROL_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
CONTROL_PICTURES |= {0x7F: 0x2421, **dict.fromkeys((*range(0x80, 0xA0), *BIDIRECTIONAL), 0xFFFD)}
"""Unicode has a picture of each C0 control character."""
MOVES = re.compile(r"(\n|\x1b\[A)*")
"""What tqdm writes to move between its bars, and nothing else in one piece."""


class Filtered:
    """A text stream that shows the control characters of what libraries and icebear write to it."""

    def __init__(self, stream: TextIO):
        self.unfiltered = stream

    def write(self, text: str) -> int:
        begin = "\r" * text.startswith("\r")  # of tqdm's bars
        shown = text if MOVES.fullmatch(text) else begin + text.removeprefix(begin).translate(CONTROL_PICTURES)
        self.unfiltered.write(shown)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)


def unfiltered(stream: TextIO) -> TextIO:
    """Return the stream behind a filter, for a console that filters and sends colors."""
    return getattr(stream, "unfiltered", stream)


@contextmanager
def filtered() -> Iterator[None]:
    """Filter stdout and stderr in a block, once: a command may run in another one."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, Filtered(unfiltered(stream))) for stream in streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
