"""Results in the names of another library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Group
from rich.constrain import Constrain
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree


def renamed(shown: Any, write: Callable[[str], str]) -> Any:
    """Return a document, or what is printed, with `write` of each of its texts: of `icebear.points.in_names`."""
    if isinstance(shown, str):
        return write(shown)
    if isinstance(shown, dict):
        return {renamed(key, write): renamed(value, write) for key, value in shown.items()}
    if isinstance(shown, list | tuple):
        return [renamed(part, write) for part in shown]
    if isinstance(shown, Text):
        return _text(shown, write)
    if isinstance(shown, Group):
        return Group(*renamed(shown.renderables, write))
    if isinstance(shown, Padding | Constrain):
        shown.renderable = renamed(shown.renderable, write)
    if isinstance(shown, Tree):
        shown.label, shown.children = renamed(shown.label, write), renamed(shown.children, write)
    if isinstance(shown, Table):
        shown.title = renamed(shown.title, write)
        for column in shown.columns:
            column._cells = renamed(column._cells, write)
    return shown


def _text(text: Text, write: Callable[[str], str]) -> Text:
    """Return a text in its styles. Ids lie within one style, so each part of a style is written alone."""
    ends = {end for span in text.spans for end in (span.start, span.end)}
    parts = text.divide(sorted(ends - {0, len(text)})) if text.spans else [text]
    result = Text(style=text.style, justify=text.justify, overflow=text.overflow, end=text.end)
    for part in parts:
        written = Text(write(part.plain), style=part.style)
        for span in part.spans:
            written.stylize(span.style, 0, len(written))
        result.append_text(written)
    return result
