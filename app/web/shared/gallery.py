"""Finished examples from files, which need no model to look at."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Any

import streamlit as st
from markupsafe import Markup

from icebear.app.example import MODEL
from icebear.app.web.shared import counterfactuals, links, markdown, served
from icebear.explanation.saved import SavedExplanation
from icebear.render import heatmap

NAMES = ("geography", "languages", "music", "grammar", "chat", "sums")
"""Files in `examples`; the first one is what a first visit shows."""


@dataclass(frozen=True)
class Example:
    """A saved explanation with the flip of its answer."""

    name: str
    title: str
    about: str
    explanation: SavedExplanation
    flip: dict[str, Any]

    @property
    def fields(self) -> tuple[str, str]:
        """The prompt and the counterfactual, as they are in their fields."""
        return markdown.prompt_text(self.explanation.prompt), markdown.prompt_text(self.explanation.counterfactual)


@cache
def example(name: str) -> Example:
    record = _read(name)
    return Example(name, **record | {"explanation": SavedExplanation.from_dict(record["explanation"])})


def circuit(example: Example) -> dict[str, Any]:
    """Return the circuit of an example, as the circuit view records it."""
    return _read(f"{example.name}.circuit")


def _read(name: str) -> dict[str, Any]:
    return json.loads(files("icebear.app.web.why").joinpath("examples", f"{name}.json").read_text(encoding="utf-8"))


def known(prompt: str, counterfactual: str | None) -> Example | None:
    """Return the example with these prompts, if the app shows its model."""
    if served.model_name() != MODEL:
        return None
    return next((shown for shown in map(example, NAMES) if shown.fields == (prompt, counterfactual)), None)


def show() -> None:
    """Offer every example; a click shows it in place of what is shown."""
    st.markdown("## Examples")
    st.caption("icebear shows which parts of a language model gave its answer, and lets you change them.")
    columns = st.columns(3)
    for number, shown in enumerate(map(example, NAMES)):
        with columns[number % 3].container(border=True):
            st.markdown(f"**{markdown.plain(shown.title)}**")
            st.html(markdown.HEAT.format(_picture(shown.explanation)))
            st.caption(markdown.plain(shown.about))
            st.button(f"Show: {shown.title}", key=f"example_{number}", on_click=_take, args=(shown,))
    recent = st.session_state.get("recent", [])
    if recent:
        st.pills("Your recent prompts", recent, format_func=markdown.plain, key="again", on_change=_again)


def _again() -> None:
    prompt = st.session_state["again"]
    if prompt:
        st.session_state.update(prompt=prompt, again=None)
        counterfactuals.forget()


def verdict(example: Example) -> None:
    """Say what an example shows, above it, and show its top when it was chosen."""
    st.markdown(f"**{markdown.plain(example.title)}.** {markdown.plain(example.about)}")
    if st.session_state.get("shows"):
        markdown.to_top(st.session_state["shows"])


def _picture(explanation: SavedExplanation) -> Markup:
    """Return the heatmap with a space in place of the chat template between two messages."""
    positions = [position for position in range(len(explanation.tokens)) if position not in explanation.template]
    sinks = [number for number, position in enumerate(positions) if position in explanation.sinks]
    before = [positions[0] - 1, *positions]
    texts = [" " * (position - last > 1) + explanation.tokens[position] for last, position in pairwise(before)]
    return heatmap(texts, [explanation.relevance[position] for position in positions], sinks)


def _take(example: Example) -> None:
    """Show an example; one with an answer in a conversation in the chat, which explains the answer's last word."""
    shown = example.explanation
    if isinstance(shown.prompt, list) and shown.prompt[-1]["role"] == "assistant":
        written = sum(position > max(shown.template) for position in range(len(shown.tokens)))
        *before, answer = shown.prompt
        chat = [*before, {**answer, "content": answer["content"] + shown.target}]
        links.go("chat", chat=markdown.prompt_text(chat), turn=str(len(before)), span=f"{written}-{written + 1}")
        return
    prompt, counterfactual = example.fields
    values = {"prompt": prompt, "counterfactual": counterfactual, "target": None, "contrast": None, "switch": False}
    st.session_state.update(values, shows=st.session_state.get("shows", 0) + 1)
