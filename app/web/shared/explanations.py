"""Relevances, answers and predictions, computed once for all visitors."""

from __future__ import annotations

import streamlit as st

from icebear.app.web.shared import ui
from icebear.app.web.shared.background import shared
from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.methods.registry import METHODS
from icebear.concepts.results.result import Relevance
from icebear.models.text.answer import Answer, answer_of
from icebear.models.text.chat import Chat
from icebear.records import TokenScore

DEFAULT = "default"
"""AttnLRP; with a counterfactual, difference rules."""


def explained(
    prompt: str, target: str | None, contrast: str | None, method: str, counterfactual: str | None
) -> Relevance:
    """Return the relevance for a prompt, cached for all visitors."""

    model, read = ui.model(), ui.read_prompt(prompt)
    other, known = ui.read_prompt(counterfactual) if counterfactual else None, METHODS.get(method)

    def make() -> Relevance:
        return attribute(model, read, target, contrast, counterfactual=other, method=known)

    key = (model, prompt, target, contrast, method, counterfactual)
    return shared().relevance(key, lambda: ui.computed("Explaining", make))


@st.cache_resource(max_entries=64, show_spinner=False)
def answered(name: str, chat: str, turn: int) -> Answer:
    return answer_of(ui.model(), Chat.from_json(chat), turn)


def explained_words(chat: str, turn: int, span: tuple[int, int], contrast: str | None) -> Relevance:
    """Return the relevance for words of an answer, cached for all visitors; neurons only at the last word."""

    model, answer = ui.model(), answered(ui.model_name(), chat, turn)

    def make() -> Relevance:
        return attribute(model, answer, contrast=contrast, span=span, record="last")

    key = (model, chat, turn, span, contrast)
    return shared().relevance(key, lambda: ui.computed("Explaining", make))


@st.cache_data(max_entries=64, show_spinner=False)
def predicted(name: str, prompt: str) -> list[TokenScore]:
    return ui.model().predict(ui.read_prompt(prompt), 10)
