"""Why this word? The stages of the answer as one picture, with a switch for each head, and one to another answer."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from functools import partial
from typing import Any

import streamlit as st
from markupsafe import Markup
from streamlit.delta_generator import DeltaGenerator

from icebear.app.web.shared import clickable, gallery, jobs, links, markdown, pictures, question, served
from icebear.app.web.shared.question import Request, measuring
from icebear.app.web.why import exchanges
from icebear.concepts.stages.stage_picture import Probabilities, on_paper, stage_part, stage_picture
from icebear.concepts.stages.stage_records import StageRecord
from icebear.errors import IcebearError
from icebear.explanation.saved import SavedExplanation
from icebear.models.text.chat import Chat
from icebear.recipe import Recipe
from icebear.records import Neuron
from icebear.render import PART, as_word, heatmap, linked

SWITCHES = 6
"""The largest number of heads with a switch, those that were found first."""
LONG_COMMAND = 400
"""The letters of a command that is in one row, which scrolls."""
STAGES = "<style>p,ul{margin:.6rem 0}table{border-spacing:0}td{padding:0 1.5rem .2rem 0;vertical-align:top}</style>"
STYLE = Markup(
    "<style>.answer{display:flex;flex-wrap:wrap;align-items:center;gap:0 .8rem}"
    ".tokens [data-pick]:focus::after{content:none!important}</style>"
)
RATHER = Markup("<span>not <i>{}</i></span>")


def show() -> None:
    """Show an answer about an image, if there is an image; an example from its file if these are its prompts, which
    needs no model; else what is measured."""
    try:
        uploaded = question.module("why.about_image").field() if jobs.reads_images() else None
        if uploaded:
            question.module("why.about_image").show(uploaded)
        else:
            _explained()
    except IcebearError as error:
        st.error(markdown.message(error))
    gallery.show()


def _explained() -> None:
    had_field = jobs.reads_images()
    prompt, counterfactual, slots = question.prompts()
    example = gallery.known(prompt, counterfactual)
    if not example:
        jobs.model()
        if jobs.reads_images() and not had_field:  # the page waited for the model
            st.rerun()
        if measuring().offered_to_shorten(prompt):
            return
    answers = question.answers(prompt, counterfactual)
    target, contrast = question.target(slots[0], answers), question.contrast(slots[1], answers)
    method = st.session_state.get("method") or st.query_params.get("method")
    request = Request(prompt, counterfactual, target, contrast, method)
    if example and request.is_default:
        shown = example.explanation
        fixed = Request(prompt, counterfactual, shown.target, shown.contrast, None)
        gallery.verdict(example)
        _page(fixed, shown, lambda: shown, example.flip)
        st.caption(
            "These numbers were measured before, and come with icebear; what is opened or switched is measured now."
        )
        if jobs.model_job().is_alive():
            _loading()
    else:
        with st.container():  # one element, so that what follows keeps its place
            without_stages = measuring().explanation_without_stages(request)
        _page(request, without_stages, partial(measuring().explanation_with_stages, request, without_stages), None)


@st.fragment(run_every=1.0)
def _loading() -> None:
    """Show how far the model is."""
    job = jobs.model_job()
    if job.is_alive():
        st.progress(job.share, f"{markdown.plain(job.doing)} ...")


def _page(
    request: Request,
    without_stages: SavedExplanation,
    finished: Callable[[], SavedExplanation],
    flip: dict[str, Any] | None,
) -> None:
    """Show the prompt, the switch, the stages, and what is folded. finished: measures the stages, in seconds."""
    left, right = st.columns([3, 1], vertical_alignment="top")
    with left:
        _head(without_stages)
        exchanges.show_word(request, without_stages)
        for typed, token in ((request.target, without_stages.target), (request.contrast, without_stages.contrast)):
            if typed and token and typed.strip() != token.strip():
                st.caption(f"Of {markdown.word(typed)} the first token is explained: {markdown.word(token)}.")
    switched = st.container()
    with right:
        _switch(request, without_stages.contrast, flip, switched)
    slot = st.container()
    details = _folded(request)
    with slot:
        with st.container():
            explanation = finished()
        if explanation.stages:
            _stages(request, explanation.stages)
        else:
            _effects(request, explanation)
    if details and explanation.stages:
        with details:
            _stage_part("stage_details", explanation.stages)


def _switch(request: Request, contrast: str | None, recorded: dict[str, Any] | None, slot: Any) -> None:
    """Offer to change the answer to the word that it is explained against."""
    if not contrast:
        st.caption("To make the model say another word, choose it under “Rather than”.")
        return
    word = markdown.plain(as_word(contrast))
    again = partial(st.session_state.pop, "flip_of", None)  # after Stop
    if not links.bound(st.toggle, f"Make it say {word}", "switch", on_change=again):
        return
    with slot.container(border=True):
        if recorded:
            question.module("steering.flips").show(Recipe.from_dict(recorded))
        else:
            measuring().flip(request, contrast)


def _folded(request: Request) -> DeltaGenerator | None:
    """Draw what is folded; return where the details of the stages belong, if they are unfolded."""
    slot = None
    for name, title in (("details", "Details"), ("method", "Method")):
        box = st.expander(title, key=f"{name}_open", bind="query-params")
        if box.open:
            with box:
                if name == "details":
                    slot = st.container()
                    measuring().show_details(request)
                else:
                    measuring().show_method(request)
    return slot


# --- what is saved, and drawn without a model --------------------------------------------------------------


def _head(explanation: SavedExplanation) -> None:
    """Show the prompt with its answer."""
    target, contrast = (as_word(word) if word else "" for word in (explanation.target, explanation.contrast))
    rather = RATHER.format(contrast) if explanation.contrast else ""
    tokens = heatmap(
        list(explanation.tokens),
        list(explanation.relevance),
        explanation.sinks,
        explanation.template,
        picks=exchanges.picks(explanation),
    )
    clickable.draw(STYLE + markdown.tokens_and_answer(tokens, target, rather), "prompt_words", exchanges.pick)


def _stages(request: Request, stages: StageRecord) -> None:
    """Show what was found, the switches of its parts, the picture, and the shares."""
    _stage_part("stage_finding", stages)
    off, now = _switched_off(request, stages)
    if not stages.says_little:
        drawn = stage_picture(stages, None, off, now)
        clickable.draw(f'<div style="overflow-x:auto">{drawn}</div>', "picture", links.open_card)
    _stage_part("stage_shares", stages)
    with st.container(horizontal=True):
        pictures.offer("stages", partial(on_paper, stages))
    _command(request, off)


def _stage_part(name: str, stages: StageRecord) -> None:
    """Show a part of what stages say, whose names open cards."""
    clickable.draw(STAGES + _unspaced(str(stage_part(name, stages, None))), name, links.open_card)


def _command(request: Request, off: list[Neuron]) -> None:
    """Show the command that does the same, or that gives the parts that are off their counterfactual values."""
    prompt = markdown.read_prompt(request.prompt)
    if isinstance(prompt, Chat) or not request.counterfactual:
        return
    words = ["explain", prompt, "--counterfactual", request.counterfactual]
    for option, answer in (("--target", request.target), ("--contrast", request.contrast)):
        words += [option, answer] if answer else []
    if off:
        swaps = (f"{node}<-{json.dumps(request.counterfactual, ensure_ascii=False)}@last" for node in off)
        words = ["steer", prompt, *(word for swap in swaps for word in ("--edit", swap)), "--max-new-tokens", "1"]
    command = shlex.join(["icebear", *words, "--model", served.model_name()])
    st.code(command, "bash", wrap_lines=len(command) < LONG_COMMAND)


def _switched_off(request: Request, stages: StageRecord) -> tuple[list[Neuron], Probabilities | None]:
    """Draw a switch for each head, and one for the neurons together; return what is off, and the probabilities then."""
    neurons = [node.neuron for node in stages.neurons]
    parts = {f"{len(neurons)} FFN neuron{'s' * (len(neurons) > 1)}": neurons} if neurons else {}
    parts |= {str(node.neuron): [node.neuron] for node in stages.heads[:SWITCHES]}
    if not parts or stages.prompt.target is None or stages.says_little:
        return [], None
    st.caption(markdown.plain(f"Switch a part off: it takes its value after “{request.counterfactual}”."))
    key = f"{request.prompt} {request.counterfactual}"
    with st.container(horizontal=True):
        off = [node for name, nodes in parts.items() if not st.toggle(name, True, f"{name} {key}") for node in nodes]
    return off, measuring().swapped(request, stages, tuple(off)) if off else None


def _effects(request: Request, explanation: SavedExplanation) -> None:
    """Show what is known without stages: probable words, what other words in the prompt change, tokens, nodes with an
    effect above random ones, and what to compare with."""
    predicted = ", ".join(f"{markdown.word(token.text)} {token.number}" for token in explanation.predictions[:3])
    st.markdown(f"Predicted: {predicted}")
    has_table = exchanges.show_table(request, explanation)
    st.markdown(markdown.plain(_unspaced(f"{explanation.tokens_sentence} {explanation.margins_sentence}")))
    title, *nodes = map(_unspaced, explanation.effects or ("",))
    st.markdown(markdown.plain(title))
    if nodes:
        rows = Markup().join(Markup("<li>{}</li>").format(linked(node, None)) for node in nodes)
        clickable.draw(Markup("<ul>{}</ul>").format(rows), "effects", links.open_card)
    if explanation.advice and not has_table:
        st.markdown(f"**{markdown.plain(explanation.advice)}**")


def _unspaced(text: str) -> str:
    """Return a text, or HTML, whose quoted tokens have no space at their beginning."""
    return re.sub(r"('|&#39;) (?=[^'& ]+\1)", r"\1", text).replace("\ufffd", PART)
