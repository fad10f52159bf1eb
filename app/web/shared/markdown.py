"""Texts of a page: Markdown without surprises, tokens in colors, prompts."""

from __future__ import annotations

import json
import re
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import streamlit as st
from markupsafe import Markup

from icebear.errors import InputError
from icebear.models.text.chat import Chat
from icebear.render import PART, visible

if TYPE_CHECKING:
    from icebear.concepts.results.result import Relevance

COMMAND = re.compile(r"(^|\W)--[a-z]|\bicebear [a-z]")
"""What only a command line knows."""
HEAT = Markup('<div class="heat">{}</div>')
TOKENS_AND_ANSWER = Markup('<div class="heat answer">{}<b>&rarr; {}</b>{}</div>')


def read_prompt(text: str) -> str | Chat:
    """Return a text as it is, and the messages of a chat as JSON as a `Chat`. Raises `InputError`."""
    if not re.match(r'\s*\[\s*{\s*"role"', text):
        return text
    chat = Chat.from_json(text, "The prompt")
    if chat.image is not None:  # its path would be a file of the server
        raise InputError("The messages in this field have an image, and the field reads text alone; leave it out.")
    return chat


def prompt_text(prompt: Any) -> str:
    """Return a prompt as `read_prompt` reads it: a text as it is, the messages of a chat as JSON."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False, separators=(",", ":"))


def tokens_and_answer(tokens: Markup, target: str, after: str | Markup = "") -> Markup:
    """Return shaded tokens followed by the explained answer, as HTML."""
    return TOKENS_AND_ANSWER.format(tokens, target, after)


def target_label(relevance: Relevance) -> str:
    """Return the target, and the contrast if there is one, as Markdown."""
    contrast = f" rather than {word(relevance.contrast_text)}" if relevance.contrast_text else ""
    return word(relevance.target_text) + contrast


def in_quotes(text: str, most: int) -> str:
    """Return a text of at most so many characters in quotes; a longer one ends in dots."""
    return f"\u201c{shorten(text, most, placeholder=' ...')}\u201d"


def plain(text: str) -> str:
    """Escape a text that Streamlit would read as Markdown."""
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", text.replace("\n", " ").replace("\ufffd", PART))


def message(error: object) -> str:
    """Return an error in Markdown, without the parts that are about the command line."""
    parts = re.split(r"(?<=[.;?]) ", str(error))
    useful = [part for part in parts if not COMMAND.search(part)]
    return plain(re.sub(r";$", ".", " ".join(useful or parts)))


def token_label(text: str) -> str:
    """Return a token with visible spaces and escaped Markdown."""
    return plain(visible(text.replace(" ", "␣")))


def word(text: str) -> str:
    """Return a token without the space before it, as Markdown."""
    return token_label(text.strip() or text)


def to_top(what: object) -> None:
    """Scroll to the top of the page, once for each `what`."""
    top = f"document.querySelector('[data-testid=stMain]').scrollTo(0, 0)  // {what}"
    st.html(f"<script>{top}</script>", unsafe_allow_javascript=True)


def into_view(key: str, result: object) -> None:
    """Scroll to the container with this key when its result is new, unless it is in view."""
    look = f"setTimeout(() => document.querySelector('.st-key-{key}')?.scrollIntoView({{block: 'nearest'}}), 300)"
    st.html(f"<script>{look}  // {hash(str(result))}</script>", unsafe_allow_javascript=True)
