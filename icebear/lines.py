"""The lines of a screen, for a terminal and for `print`."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from icebear.render import PART

WIDTH = 100
"""The columns of a screen."""


@dataclass(frozen=True)
class Line:
    text: str
    style: str = ""
    """``bold``, ``dim``, ``yellow`` or nothing."""
    wraps: bool = True
    """Else it is cut at the end of the line."""
    indent: int = 0
    """The columns before its second and later rows."""

    def __post_init__(self) -> None:  # before it is wrapped, because it gets longer
        object.__setattr__(self, "text", self.text.replace("\ufffd", PART))

    def __str__(self) -> str:
        if not self.wraps:
            return self.text[:WIDTH]
        return textwrap.fill(self.text, WIDTH, subsequent_indent=" " * self.indent)
