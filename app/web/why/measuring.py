"""Measure what the first view shows; imported when the model is there."""

from __future__ import annotations

import time
from functools import partial

import streamlit as st

from icebear.app.web.shared import explanations, jobs, links, markdown, served
from icebear.app.web.shared.explanations import explained, predicted
from icebear.app.web.steering import flips
from icebear.app.web.why import fine_tuning as two_models
from icebear.app.web.why import measured
from icebear.app.web.why import ranked_neurons as tables
from icebear.app.web.why.finding import Answers, Finding, Request
from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.methods.registry import METHODS
from icebear.concepts.results.result import Relevance
from icebear.edits import parse_edits
from icebear.steering.apply import steer
from icebear.steering.outcome import number_text

LONG, SAMPLE = 512, 64
"""Tokens of a prompt that is explained without a question, and of a part of it that is timed for the question."""
PEAK = {False: 5, True: 15}
"""The memory of an explanation, without and with a counterfactual, in multiples of its result (smollm2-135m)."""
CLOSE = 1e-3
"""The largest remainder, as a share of the explained number, with which the check of a method is passed."""
SMALL = 0.01
"""A change of a probability that is called almost nothing."""


def answers(prompt: str, counterfactual: str | None) -> Answers:
    """Return the probable answers, and which ones are explained if none is chosen."""
    here = predicted(served.model_name(), prompt)
    there = predicted(served.model_name(), counterfactual) if counterfactual else []
    contrast = there[0].text if there and there[0].id != here[0].id else None
    return Answers(measured.listed(here), measured.listed(there), here[0].text, contrast)


def is_short(request: Request) -> bool:
    """Return whether to explain the prompt at once; else offer to explain a part of it."""
    ids = jobs.model().ids(markdown.read_prompt(request.prompt))
    if len(ids) <= LONG or st.session_state.get("whole") == request.prompt:
        return True
    seconds, size = _cost(tuple(ids), request.counterfactual is not None)
    duration = f"{seconds:.0f} seconds" if seconds < 90 else f"{seconds / 60:.0f} minutes"
    st.info(f"{len(ids):,} tokens: about {duration} and {size:.1f} GB of memory. Explain the last {LONG} instead?")
    with st.container(horizontal=True):
        part = jobs.model().tokenizer.decode(ids[-LONG:], skip_special_tokens=True)
        shorten = partial(st.session_state.update, prompt=part, counterfactual="")
        st.button(f"Explain the last {LONG} tokens", key="shorten", type="primary", on_click=shorten)
        whole = partial(st.session_state.update, whole=request.prompt)
        st.button("Explain all of it", key="whole_prompt", on_click=whole)
    return False


@st.cache_data(max_entries=16, show_spinner="Estimating how long this takes ...")
def _cost(ids: tuple[int, ...], compared: bool) -> tuple[float, float]:
    """Return about how many seconds an explanation takes, and how many GB, from that of a part of the prompt."""
    part, begun = list(ids[:SAMPLE]), time.monotonic()
    first, second = (token.id for token in jobs.model().predict(part, 2))
    other = [*part[:-1], part[0]] if compared else None
    relevance = attribute(jobs.model(), part, first, second, counterfactual=other)
    scale = len(ids) / SAMPLE
    return (time.monotonic() - begun) * scale, PEAK[compared] * relevance.neurons.nbytes * scale / 1e9


def relevance_of(request: Request) -> Relevance:
    method = request.method or ("default" if request.counterfactual else "attnlrp")
    model, prompt = jobs.model(), markdown.read_prompt(request.prompt)
    target, contrast = (
        flips.completed(model, prompt, text) if text else None for text in (request.target, request.contrast)
    )
    return explained(request.prompt, target, contrast, method, request.counterfactual)


def finding(request: Request) -> Finding:
    return measured.finding(relevance_of(request), request.prompt, request.counterfactual)


def finished(request: Request, begun: Finding) -> Finding:
    """Return the finding with its groups."""
    relevance = relevance_of(request)
    if not relevance.sites:
        st.info("Only the tokens of this kind of model have relevance; its neurons are not known to icebear.")
        return begun
    site = "ffn" if "ffn" in relevance.sites else "head"
    return measured.with_groups(jobs.model(), begun, relevance, site, explanations.grouped(relevance, site))


def flip(request: Request, word: str) -> None:
    """Show the flip that makes a word the answer, with the counterfactual as its source."""
    wanted = (served.model_name(), request.prompt, word, request.counterfactual, flips.MOST, False)
    if st.session_state.get("flip_of") != request:  # it is wanted anew, perhaps after Stop
        flips.resume(wanted)
    st.session_state["flip_of"] = request
    flips.watch(wanted)


def without(request: Request, edits: tuple[str, ...]) -> str:
    """Return in words what happens to both answers when the edits are made."""
    relevance = relevance_of(request)
    tokens = [token for token in (relevance.target, relevance.contrast) if token]
    before, after = (_probabilities(request.prompt, each, tuple(token.id for token in tokens)) for each in ((), edits))
    moved = [
        f"P({token.text.strip() or token.text}) goes from {number_text(old)} to {number_text(new)}"
        for token, old, new in zip(tokens, before[0], after[0], strict=True)
    ]
    same = max(abs(old - new) for old, new in zip(before[0], after[0], strict=True)) < SMALL
    answer = (
        f"the answer stays {after[1].strip()}" if before[1] == after[1] else f"the answer becomes {after[1].strip()}"
    )
    return f"{'Almost nothing changes: ' if same else ''}{', '.join(moved)}; {answer}."


@st.cache_data(max_entries=256, show_spinner="Setting it ...")
def _probabilities(prompt: str, edits: tuple[str, ...], ids: tuple[int, ...]) -> tuple[list[float], str]:
    """Return the probabilities of tokens, and the most probable one, with edits."""
    model = jobs.model()
    with steer(model, parse_edits(edits)):
        logits = model.next_logits(markdown.read_prompt(prompt))
    probabilities = logits.softmax(-1)
    return [probabilities[token].item() for token in ids], model.answer_text(int(logits.argmax()))


def details(request: Request) -> None:
    relevance = relevance_of(request)
    if relevance.sites:
        tables.show(relevance, request.prompt, request.target or "")


def fine_tuning(request: Request) -> None:
    two_models.show(request)


def method(request: Request) -> None:
    """Say how the numbers were made, and whether they add up; offer other methods."""
    relevance = relevance_of(request)
    usable = [name for name, one in METHODS.items() if one.scores_neurons]
    names = [name for name in usable if request.counterfactual or not METHODS[name].needs_counterfactual]
    links.bound(st.selectbox, "Attribution method", "method", names, index=None, placeholder=repr(relevance.method))
    st.caption("Red supports the answer, blue opposes it; dotted tokens are attention sinks, which are ignored.")
    st.caption(markdown.plain(relevance.comparison_text()))
    total, parts = relevance.sums.target, relevance.sums.tokens
    passed = "passed. " if abs(total - parts) <= CLOSE * max(1.0, abs(total)) else "not passed. "
    st.caption(
        markdown.plain(f"Method check: {passed if request.counterfactual else ''}{relevance.conservation_text()}.")
    )
