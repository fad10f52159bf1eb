"""Measure what the first view shows; imported when the model is there."""

from __future__ import annotations

from functools import partial

import streamlit as st

from icebear.app.web.shared import explanations, jobs, links, markdown, served
from icebear.app.web.shared.explanations import explained
from icebear.app.web.shared.question import Answers, Request
from icebear.app.web.steering import flips
from icebear.app.web.why import ranked_neurons
from icebear.concepts.answers import what_if
from icebear.concepts.answers.comparisons import Exchange
from icebear.concepts.answers.what_if import WhatIf
from icebear.concepts.methods.registry import METHODS
from icebear.concepts.results.result import Relevance
from icebear.concepts.stages.stage_records import StageRecord
from icebear.concepts.stages.stages import Stages
from icebear.explanation import sentences
from icebear.explanation.explanation import saved_tokens
from icebear.explanation.saved import SavedExplanation
from icebear.records import Neuron

LONG_TOKENS = 512
"""The largest number of tokens of a prompt that is explained without a question."""


def answers(prompt: str, counterfactual: str | None) -> Answers:
    """Return the probable answers, and which ones are explained if none is chosen; a long prompt is asked about."""
    if offered_to_shorten(prompt):
        st.stop()
    likely = explanations.predicted(served.model_name(), prompt)
    others = explanations.predicted(served.model_name(), counterfactual) if counterfactual else []
    contrast = others[0].text if others and others[0].id != likely[0].id else None
    return Answers(likely, others, likely[0].text, contrast)


def offered_to_shorten(prompt: str) -> bool:
    """Offer to explain a part of a prompt that is long. Return whether it was offered; else it is explained at once."""
    ids = jobs.model().ids(markdown.read_prompt(prompt))
    if len(ids) <= LONG_TOKENS or st.session_state.get("whole") == prompt:
        return False
    st.info(f"{len(ids):,} tokens take long and much memory. Explain the last {LONG_TOKENS} instead?")
    with st.container(horizontal=True):
        part = jobs.model().tokenizer.decode(ids[-LONG_TOKENS:], skip_special_tokens=True)
        shorten = partial(st.session_state.update, prompt=part, counterfactual="")
        st.button(f"Explain the last {LONG_TOKENS} tokens", key="shorten", type="primary", on_click=shorten)
        explain_all = partial(st.session_state.update, whole=prompt)
        st.button("Explain all of it", key="whole_prompt", on_click=explain_all)
    return True


def relevance_of(request: Request) -> Relevance:
    method = request.method or ("default" if request.counterfactual else "attnlrp")
    target, contrast = explanations.completed(request.prompt, request.target, request.contrast)
    return explained(request.prompt, target, contrast, method, request.counterfactual)


def explanation_without_stages(request: Request) -> SavedExplanation:
    """Return the explanation without its stages, which take seconds."""
    prompts = map(markdown.read_prompt, filter(None, (request.prompt, request.counterfactual)))
    return saved_tokens(relevance_of(request), *prompts)


def explanation_with_stages(request: Request, without: SavedExplanation) -> SavedExplanation:
    relevance = relevance_of(request)
    if not relevance.sites:
        st.info("Only the tokens of this kind of model have relevance; its neurons are not known to icebear.")
        return without
    return explanations.staged(without, relevance)


def swapped(request: Request, saved: StageRecord, nodes: tuple[Neuron, ...]) -> tuple[float | None, float | None]:
    """Return the probabilities of both answers when the nodes take their counterfactual values."""
    compared = relevance_of(request).counterfactual
    assert compared is not None
    return _swapped(request, nodes, Stages(**vars(saved), model=jobs.model(), pairs=compared.pairs))


@st.cache_data(max_entries=256, show_spinner="Exchanging it ...")
def own_exchange(name: str, _exchanged: WhatIf, prompt: str, span: tuple[int, int], word: str) -> Exchange:
    """Return the exchange of a word of a prompt for a person's word. Raises `InputError` if none like it fits."""
    return what_if.own_exchange(jobs.model(), _exchanged, span, word)


@st.cache_data(max_entries=256, show_spinner="Switching it off ...")
def _swapped(request: Request, nodes: tuple[Neuron, ...], _stages: Stages) -> tuple[float | None, float | None]:
    return _stages.swapped(nodes)


def flip(request: Request, word: str) -> None:
    """Show the flip that makes a word the answer, with the counterfactual as its source."""
    wanted = (served.model_name(), request.prompt, word, request.counterfactual, flips.MOST, False)
    if st.session_state.get("flip_of") != request:  # it is wanted anew, perhaps after Stop
        flips.resume(wanted)
    st.session_state["flip_of"] = request
    flips.show_progress_or_flip(wanted)


def show_details(request: Request) -> None:
    relevance = relevance_of(request)
    if relevance.sites:
        ranked_neurons.show(relevance, request.prompt)


def show_method(request: Request) -> None:
    """Say how the numbers were made, and whether they add up; offer other methods."""
    relevance = relevance_of(request)
    usable = [name for name, kind in METHODS.items() if kind.scores_neurons]
    names = [name for name in usable if request.counterfactual or not METHODS[name].needs_counterfactual]
    links.bound(st.selectbox, "Attribution method", "method", names, index=None, placeholder=repr(relevance.method))
    st.caption("Red supports the answer, blue opposes it; dotted tokens are attention sinks, which are ignored.")
    st.caption(markdown.plain(relevance.comparison_text()))
    st.caption(markdown.plain(sentences.check_sentence(relevance)))
