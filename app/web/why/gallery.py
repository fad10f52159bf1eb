"""Finished examples from files, which need no model to look at."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import streamlit as st
from markupsafe import Markup

from icebear.app.web.shared import markdown, served
from icebear.app.web.why.finding import Finding
from icebear.example import MODEL
from icebear.render import heatmap

NAMES = ("geography", "languages", "music", "grammar", "chat", "sums")
"""Files in `examples`; the first one is what a first visit shows."""


@dataclass(frozen=True)
class Example:
    """A finding with the flip of its answer."""

    title: str
    about: str
    made_with: dict[str, Any]
    """`Model.made_with` of the model that it was measured on."""
    finding: Finding
    flip: dict[str, Any] | None


@cache
def example(name: str) -> Example:
    record = json.loads(files("icebear.app.web.why").joinpath("examples", f"{name}.json").read_text(encoding="utf-8"))
    return Example(**record | {"finding": Finding.from_dict(record["finding"])})


def known(prompt: str, counterfactual: str | None) -> Example | None:
    """Return the example with these prompts, if the app shows its model."""
    if served.model_name() != MODEL:
        return None
    every = map(example, NAMES)
    return next(
        (one for one in every if (one.finding.prompt, one.finding.counterfactual) == (prompt, counterfactual)), None
    )


def show() -> None:
    """Offer every example; a click shows it in place of what is shown."""
    st.markdown("#### Examples")
    columns = st.columns(3)
    for place, one in enumerate(map(example, NAMES)):
        finding = one.finding
        with columns[place % 3].container(border=True):
            st.markdown(f"**{markdown.plain(one.title)}**")
            st.html(markdown.HEAT.format(_picture(finding)))
            st.caption(markdown.plain(one.about))
            st.button("Show", key=f"example_{place}", on_click=_take, args=(finding,))


def _picture(finding: Finding) -> Markup:
    """Return the heatmap with a space in place of the chat template between two messages."""
    places = [place for place in range(len(finding.tokens)) if place not in finding.template]
    sinks = [number for number, place in enumerate(places) if place in finding.sinks]
    before = [places[0] - 1, *places]
    texts = [" " * (place - last > 1) + finding.tokens[place] for last, place in zip(before, places, strict=False)]
    return heatmap(texts, [finding.values[place] for place in places], sinks)


def _take(finding: Finding) -> None:
    st.session_state.update(
        prompt=finding.prompt, counterfactual=finding.counterfactual or "", target=None, contrast=None, switch=False
    )
