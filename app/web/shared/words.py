"""A message as words to click on: one Streamlit component, which never reads text as HTML."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib.resources import files

import streamlit as st

from icebear.render import style

Word = tuple[str, int, int]
"""A text, and its tokens, half open."""
Colored = Sequence[tuple[str, float]]
"""Pieces of a message with their values, by which they are colored."""

FOLDER = files("icebear.app.web.shared")
component = st.components.v2.component(
    "icebear_words",
    html='<div class="words"></div>',
    css=FOLDER.joinpath("words.css").read_text(encoding="utf-8"),
    js=FOLDER.joinpath("words.js").read_text(encoding="utf-8"),
)


def draw(
    words: Sequence[Word],
    marked: tuple[int, int] | None,
    key: str,
    on_picked: Callable[[int, int, str], None],
    colored: Sequence[tuple[str, float, float]] = (),
) -> None:
    """Draw the words, mark those of the tokens `marked`, and color them.

    colored: tokens from the first one on with their value, and its share of the largest one.
    A click on a word, or a shift-click (or a second tap) that ends a span, calls `on_picked` with tokens and text.
    """

    def picked() -> None:
        if st.session_state[key].picked:
            on_picked(*st.session_state[key].picked)

    colors = []
    for _, start, stop in words if colored else ():
        tokens = colored[start:stop]
        value, share = sum(value for _, value, _ in tokens), sum(share for _, _, share in tokens)
        colors.append((style(share), f"{value:+.2f}"))
    data = {"words": list(map(list, words)), "marked": marked and list(marked), "colors": colors}
    component(data=data, key=key, on_picked_change=picked)


def words_of(pieces: Sequence[str]) -> list[Word]:
    """Return the words of tokens; a character of several tokens is one word, which stands for all of them."""
    words: list[Word] = []
    for index, piece in enumerate(pieces):
        if piece:
            words.append((piece, words[-1][2] if words else 0, index + 1))
    return words


def split(text: str) -> list[str]:
    """Split a text into words and signs, each with the space before it."""
    return re.findall(r"\s*(?:\w+(?:['\u2019-]\w+)*|[^\w\s]+)|\s+$", text)
