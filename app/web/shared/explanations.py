"""Relevances, answers and predictions, computed once for all visitors."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import nullcontext
from functools import partial
from typing import Any

import streamlit as st

from icebear.app.web.shared import jobs, markdown, served, uploads
from icebear.app.web.shared.all_visitors import server_state
from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.methods.registry import METHODS
from icebear.concepts.results.ranking import Ranking
from icebear.concepts.results.result import Relevance
from icebear.explanation.explanation import Explanation, saved_stages
from icebear.explanation.saved import SavedExplanation
from icebear.models.objective import likelier_form
from icebear.models.text.answer import Answer, answer_of
from icebear.models.text.chat import Chat
from icebear.models.text.prompts import PromptLike
from icebear.records import TokenScore

DEFAULT = "default"
"""AttnLRP; with a counterfactual, difference rules."""


def completed(prompt: str, *words: str | None) -> list[str | None]:
    """Return words as the model continues the prompt with them: with a space before them where that is likelier."""
    model, read = jobs.model(), markdown.read_prompt(prompt)
    return [likelier_form(model, read, word) if word else None for word in words]


def explained(
    prompt: str, target: str | None, contrast: str | None, method: str, counterfactual: str | None
) -> Relevance:
    """Return the relevance for a prompt, cached for all visitors."""
    other, known = markdown.read_prompt(counterfactual) if counterfactual else None, METHODS.get(method)
    key, read = (prompt, target, contrast, method, counterfactual), markdown.read_prompt(prompt)
    return _attributed(key, read, target=target, contrast=contrast, counterfactual=other, method=known)


def _attributed(key: tuple, prompt: PromptLike | Answer, **options: Any) -> Relevance:
    """Call `attribute` in the background, or return the relevance that another visitor's call had by this key."""
    model = jobs.model()
    make = partial(jobs.run_and_wait, "Explaining", lambda _: attribute(model, prompt, **options))
    return server_state().relevance((model, *key), make)


@st.cache_resource(max_entries=64, show_spinner=False)
def answer_at(name: str, chat: str, turn: int) -> Answer:
    """Return the message of a chat with this index as an answer. chat: the messages, as JSON."""
    messages = Chat.from_json(chat)
    before = uploads.prompt_of(messages.of(messages.messages[:turn])) if 0 < turn < len(messages.messages) else None
    return answer_of(jobs.model(), messages, turn, before)


def conversation_answer(chat: Chat, turn: int) -> tuple[str, Answer]:
    """Return a conversation up to a message, as JSON, and this message."""
    text = chat.of(chat.messages[: turn + 1]).to_json(None)
    return text, answer_at(served.model_name(), text, turn)


def explained_words(chat: str, turn: int, span: tuple[int, int], contrast: str | None) -> Relevance:
    """Return the relevance for words of an answer, cached for all visitors; neurons only at the last word."""
    answer = answer_at(served.model_name(), chat, turn)
    return _attributed((chat, turn, span, contrast), answer, contrast=contrast, span=span, record="last")


def explained_about_image(about: Hashable, answer: Answer, span: tuple[int, int], **options: Any) -> Relevance:
    """Return the relevance of an image and its prompt for words of an answer, cached for all visitors.

    about: what was answered, and what it is compared with. options: of `attribute`."""
    return _attributed((about, span, options.get("contrast")), answer, span=span, sites=(), **options)


@st.cache_data(max_entries=64, show_spinner=False)
def predicted(name: str, prompt: str) -> list[TokenScore]:
    return jobs.model().predict(markdown.read_prompt(prompt), 10)


def explanation_of(relevance: Relevance, ranking: Ranking) -> Explanation:
    """Return the nodes of a relevance with their effects, and with their labels if there is an index."""
    with st.skeleton(height=240), served.store() if served.has_readable_store() else nullcontext() as opened:
        return Explanation.of(jobs.model(), relevance, ranking, store=opened)


def staged(without: SavedExplanation, relevance: Relevance) -> SavedExplanation:
    """Return the explanation with its stages, measured once for all visitors."""
    known, model = server_state().staged, jobs.model()
    if relevance not in known:
        what, measure = "Measuring which heads and neurons compute it", partial(saved_stages, without, model, relevance)
        known[relevance] = jobs.run_and_wait(what, lambda job: measure(job.step))
    return known[relevance]
