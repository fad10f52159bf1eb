"""Finished examples from files, which need no model to look at."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import streamlit as st
from markupsafe import Markup

from icebear.app.example import MODEL
from icebear.app.web.shared import markdown, served
from icebear.explanation.saved import SavedExplanation
from icebear.render import heatmap

NAMES = ("geography", "languages", "music", "grammar", "chat", "sums")
"""Files in `examples`; the first one is what a first visit shows."""


@dataclass(frozen=True)
class Example:
    """A saved explanation with the flip of its answer."""

    title: str
    about: str
    explanation: SavedExplanation
    flip: dict[str, Any]

    @property
    def fields(self) -> tuple[str, str]:
        """The prompt and the counterfactual, as they are in their fields."""
        return markdown.prompt_field(self.explanation.prompt), markdown.prompt_field(self.explanation.counterfactual)


@cache
def example(name: str) -> Example:
    record = json.loads(files("icebear.app.web.why").joinpath("examples", f"{name}.json").read_text(encoding="utf-8"))
    return Example(**record | {"explanation": SavedExplanation.from_dict(record["explanation"])})


def known(prompt: str, counterfactual: str | None) -> Example | None:
    """Return the example with these prompts, if the app shows its model."""
    if served.model_name() != MODEL:
        return None
    return next((one for one in map(example, NAMES) if one.fields == (prompt, counterfactual)), None)


def show() -> None:
    """Offer every example; a click shows it in place of what is shown."""
    st.markdown("#### Examples")
    columns = st.columns(3)
    for place, one in enumerate(map(example, NAMES)):
        with columns[place % 3].container(border=True):
            st.markdown(f"**{markdown.plain(one.title)}**")
            st.html(markdown.HEAT.format(_picture(one.explanation)))
            st.caption(markdown.plain(one.about))
            st.button("Show", key=f"example_{place}", on_click=_take, args=(one,))


def _picture(explanation: SavedExplanation) -> Markup:
    """Return the heatmap with a space in place of the chat template between two messages."""
    places = [place for place in range(len(explanation.tokens)) if place not in explanation.template]
    sinks = [number for number, place in enumerate(places) if place in explanation.sinks]
    before = [places[0] - 1, *places]
    texts = [" " * (place - last > 1) + explanation.tokens[place] for last, place in zip(before, places, strict=False)]
    return heatmap(texts, [explanation.relevance[place] for place in places], sinks)


def _take(example: Example) -> None:
    prompt, counterfactual = example.fields
    st.session_state.update(prompt=prompt, counterfactual=counterfactual, target=None, contrast=None, switch=False)
