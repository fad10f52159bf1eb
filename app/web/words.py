"""A message as words to click on: one component of Streamlit, which draws text as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib.resources import files

import streamlit as st

Word = tuple[str, int, int]
"""A text, and its tokens, half open."""

HERE = files("icebear.app.web")
component = st.components.v2.component(
    "icebear_words",
    html='<div class="words"></div>',
    css=HERE.joinpath("words.css").read_text(encoding="utf-8"),
    js=HERE.joinpath("words.js").read_text(encoding="utf-8"),
)


def draw(
    words: Sequence[Word],
    marked: tuple[int, int] | None,
    key: str,
    on_picked: Callable[[int, int, str], None],
) -> None:
    """The words, those of the tokens `marked` stand out; a click on one, or with shift (by touch a second tap) on a
    span, calls `on_picked` with its tokens and its text."""

    def picked() -> None:
        found = st.session_state[key].picked
        if found:
            on_picked(*found)

    component(
        data={"words": list(map(list, words)), "marked": marked and list(marked)},
        key=key,
        on_picked_change=picked,
    )


def words_of(pieces: Sequence[str]) -> list[Word]:
    """Tokens to click on; a character of several is one, which stands for all of them."""
    found: list[Word] = []
    start = 0
    for place, piece in enumerate(pieces):
        if piece:
            found.append((piece, start, place + 1))
            start = place + 1
    return found


def split(text: str) -> list[str]:
    """A text in words and signs, each with the space before it."""
    return re.findall(r"\s*(?:\w+(?:['\u2019-]\w+)*|[^\w\s]+)|\s+$", text)
