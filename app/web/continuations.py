"""Two continuations of a prompt side by side, and the probabilities of words without and with edits."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

import pandas
import streamlit as st
from markupsafe import Markup

from icebear.app.web import ui
from icebear.concepts.render import NEGATIVE, hexadecimal

SIDE = Markup(
    '<div dir="auto" style="white-space:pre-wrap;overflow-wrap:anywhere"><span style="opacity:.6">{}</span>{}</div>'
)
COLORS = ["#8a8a8a", hexadecimal(NEGATIVE), "#c9a227"]


def texts(prompt: Any, plain: str, edited: str) -> None:
    """Show both continuations, with marks on the words that only one of them has."""
    if not isinstance(prompt, str):
        prompt = "".join(f"{message['role']}: {message['content']}\n" for message in prompt) + "assistant: "
    names = ("without edits", "with edits")
    for column, name, html in zip(st.columns(2), names, differences(plain, edited), strict=True):
        with column.container(border=True, height="stretch"):
            st.caption(name)
            st.html(SIDE.format(prompt, html))


def differences(plain: str, edited: str) -> tuple[Markup, Markup]:
    """Return both texts as HTML, with marks on the words that only one of them has."""
    words = [re.findall(r"\s*\S+|\s+", text) for text in (plain, edited)]
    out: tuple[list[Markup], list[Markup]] = ([], [])
    for same, *bounds in difflib.SequenceMatcher(None, words[0], words[1], autojunk=False).get_opcodes():
        for side, (first, last) in enumerate((bounds[:2], bounds[2:])):
            text = "".join(words[side][first:last])
            space, word = text[: len(text) - len(text.lstrip())], text.lstrip()
            out[side].append(Markup("{}<mark>{}</mark>" if word and same != "equal" else "{}{}").format(space, word))
    return Markup().join(out[0]), Markup().join(out[1])


def bars(columns: Mapping[str, Mapping[str, float | None]], number: str = "probability") -> None:
    """Show numbers of words as bars. columns: column (such as "with edits") -> word -> number."""
    table = pandas.DataFrame(
        {name: {repr(word): one for word, one in words.items()} for name, words in columns.items()}
    )
    table = table.reindex(list(dict.fromkeys(repr(word) for words in columns.values() for word in words)))
    options: dict[str, Any] = {"horizontal": True, "stack": False, "sort": False, "x_label": "", "y_label": number}
    st.bar_chart(table, color=COLORS[: len(columns)], **options)


def probability_text(word: str, before: float, after: float) -> str:
    """Return how the probability of a word changed, as Markdown."""
    return f"P({ui.token_label(word)}) went from {ui.plain(share(before))} to {ui.plain(share(after))}"


def share(probability: float) -> str:
    """Return a probability with two significant digits, at least two decimals."""
    return f"{probability:.2f}" if probability >= 0.1 else f"{probability:.2g}"
