"""Results in the names of another library."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rich.console import Group
from rich.constrain import Constrain
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from icebear.edits import Edit
from icebear.errors import InputError

TEXTS = ("prompt", "counterfactual", "text", "tokens", "query", "store")
"""Keys whose values are the user's own texts; ids in them stay."""
_ID = re.compile(r"L\d{1,9}\.[a-z]+\.\d{1,9}")
_AFTER = re.compile(r"(@\d+)?( [+-])?")
"""What an id may have behind it: a token, a polarity."""


def renamed_document(document: Any, write: Callable[[str], str]) -> Any:
    """Return a document with `write` of each id in it: alone, with a token or polarity, or at the start of an edit."""
    if isinstance(document, str):
        return _renamed_id(document, write)
    if isinstance(document, dict):
        return {
            _renamed_id(key, write): value if key in TEXTS else renamed_document(value, write)
            for key, value in document.items()
        }
    return [renamed_document(part, write) for part in document] if isinstance(document, list | tuple) else document


def _renamed_id(text: str, write: Callable[[str], str]) -> str:
    match = _ID.match(text)
    if match is None:
        return text
    rest = text[match.end() :]
    is_id = bool(_AFTER.fullmatch(rest))
    with suppress(InputError):
        is_id = is_id or bool(Edit.parse(text))
    return write(match[0]) + rest if is_id else text


def renamed(shown: Any, write: Callable[[str], str]) -> Any:
    """Return what is printed, with `write` (`icebear.points.in_names`) applied to each text.

    Tables, trees and paddings are changed in place."""
    if isinstance(shown, str):
        return write(shown)
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
        shown.title, shown.caption = renamed(shown.title, write), renamed(shown.caption, write)
        for column in shown.columns:
            before, column._cells = [*column._cells], renamed(column._cells, write)
            column.no_wrap = column.no_wrap or column._cells != before  # a name in two lines cannot be copied
    return shown


def _text(text: Text, write: Callable[[str], str]) -> Text:
    """Return a text in its styles. Ids lie within one style, so each part of a style is written alone."""
    ends = {end for span in text.spans for end in (span.start, span.end)}
    parts = text.divide(sorted(ends - {0, len(text)})) if text.spans else [text]
    result = text.blank_copy()
    for part in parts:
        written = Text(write(part.plain), style=part.style)
        for span in part.spans:
            written.stylize(span.style, 0, len(written))
        result.append_text(written)
    return result
