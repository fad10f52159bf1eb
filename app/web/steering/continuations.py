"""Two continuations of a prompt side by side, and how the probability of a word changed, in words."""

from __future__ import annotations

import difflib
import re
from typing import Any

import streamlit as st
from markupsafe import Markup

from icebear.app.web.shared import markdown
from icebear.steering.records import number_text

SIDE = Markup(
    "<style>mark{{background:rgba(230,180,40,.3);color:inherit;border-radius:.2em}}</style>"
    '<div dir="auto" style="white-space:pre-wrap;overflow-wrap:anywhere"><span style="opacity:.6">{}</span>{}</div>'
)


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


def probability_text(word: str, before: float, after: float) -> str:
    """Return how the probability of a word changed, as Markdown."""
    numbers = markdown.plain(f"{number_text(before)} to {number_text(after)}")
    return f"P({markdown.word(word)}) went from {numbers}"
