"""Why this word? One sentence with its answer, the groups of neurons behind it, and a switch to another answer."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import streamlit as st

from icebear.app.web.shared import background, counterfactuals, jobs, links, markdown, served
from icebear.app.web.why import gallery, group_cards
from icebear.app.web.why.request import Answers, Request
from icebear.explanation.saved import SavedExplanation, SavedGroup
from icebear.recipe import Recipe
from icebear.records import TokenScore


def show() -> None:
    """Show an example from its file if these are its prompts, which needs no model; else what is measured."""
    first_prompt, first_counterfactual = gallery.example(gallery.NAMES[0]).fields
    row = st.columns([6, 2, 2], vertical_alignment="bottom")
    prompt = links.bound(row[0].text_input, "Prompt", "prompt", value=first_prompt, on_change=_forget)
    counterfactual = counterfactuals.field(prompt, first_counterfactual if prompt == first_prompt else "")
    offered = st.container()
    example = gallery.known(prompt, counterfactual)
    answers: Answers | SavedExplanation = example.explanation if example else _live().answers(prompt, counterfactual)
    target = _chip(row[1], "Answer", "target", answers.predictions, answers.target)
    rather = answers.counterfactual_predictions or answers.predictions
    contrast = _chip(row[2], "Rather than", "contrast", rather, answers.contrast)
    method = st.session_state.get("method") or st.query_params.get("method")
    request = Request(prompt, counterfactual, target, contrast, method)
    if example and request.is_default:
        shown = example.explanation
        _page(Request(prompt, counterfactual, shown.target, shown.contrast, None), shown, lambda: shown, example.flip)
        st.caption("Measured before, and read from a file that comes with icebear; no model was needed.")
        if jobs.loading().is_alive():
            _loading()
    else:
        with st.container():  # one element, measured or not, so that what follows keeps its place
            begun = _live().tokens(request) if _live().is_short(request) else None
        if begun:
            _page(request, begun, partial(_live().with_groups, request, begun), None)
    if counterfactual is None:
        with offered:
            counterfactuals.offer(prompt)
    gallery.show()


def _live() -> ModuleType:
    """Return the module that measures, as soon as the model is loaded."""
    jobs.model()
    return _module("why.measuring")


def _module(name: str) -> ModuleType:
    """Import what imports torch."""
    with background.importing:
        return importlib.import_module(f"icebear.app.web.{name}")


@st.fragment(run_every=1.0)
def _loading() -> None:
    """Show how far the model is."""
    job = jobs.loading()
    if job.is_alive():
        st.progress(job.share, f"{markdown.plain(job.doing)} ...")


def _forget() -> None:
    """What was chosen for another prompt does not hold for this one."""
    st.session_state.update(counterfactual="", target=None, contrast=None, switch=False)


def _chip(place: Any, label: str, key: str, tokens: Sequence[TokenScore], default: str | None) -> str | None:
    """Draw a chip with probable tokens; another one can be typed. None is the default."""
    # A link has these names.
    texts = {f"{token.text.strip() or repr(token.text)} {token.number}": token.text for token in tokens}
    chosen = links.bound(
        place.selectbox,
        label,
        key,
        list(texts),
        index=None,
        placeholder=(default or "any other word").strip(),
        accept_new_options=True,
    )
    return texts.get(chosen, chosen)


def _page(
    request: Request, begun: SavedExplanation, finished: Callable[[], SavedExplanation], flip: dict[str, Any] | None
) -> None:
    """Show the sentence, the switch, the cards, and what is folded. finished: measures the cards, in seconds."""
    left, right = st.columns([3, 1], vertical_alignment="top")
    with left:
        group_cards.head(begun)
    switched = st.container()
    with right:
        _switch(request, begun.contrast, flip, switched)
    place = st.container()
    _folded(request)
    with place:
        with st.container():
            explanation = finished()
        group_cards.cards(explanation, partial(_set, request), _foot)


def _switch(request: Request, contrast: str | None, recorded: dict[str, Any] | None, place: Any) -> None:
    """Offer to change the answer to the word that it is explained against."""
    if not contrast:
        st.caption("To make the model say another word, choose it under “Rather than”.")
        return
    word = markdown.plain(contrast.strip() or contrast)
    again = partial(st.session_state.pop, "flip_of", None)  # after Stop
    if not links.bound(st.toggle, f"**Make it say {word}**", "switch", on_change=again):
        return
    with place.container(border=True):
        if recorded:
            _module("steering.flips").show(Recipe.from_dict(recorded))
        else:
            _live().flip(request, contrast)


def _set(request: Request, number: int, group: SavedGroup) -> None:
    """Offer to set the nodes of a group to their other values, and say what that does."""
    what = (
        "Set the group to its values in the counterfactual"
        if request.counterfactual
        else "Set the group to its average"
    )
    if group.edits and st.toggle(what, key=f"set_{number}"):
        with st.container(key=f"result_{number}"):
            st.markdown(markdown.plain(_live().without(request, group.edits)))
        markdown.into_view(f"result_{number}", (request, group.edits))


def _foot(number: int, group: SavedGroup) -> None:
    """Offer the card of the strongest neuron of a group."""
    node = group.strongest[0]
    neuron = node.ranked.neuron
    if neuron.site != "head":
        label, values = f"Card of {neuron}", (str(neuron), node.ranked.polarity)
        st.button(
            label,
            key=f"card_{number}",
            type="tertiary",
            icon=":material/arrow_forward:",
            on_click=links.open_card,
            args=values,
        )


def _folded(request: Request) -> None:
    titles = {"details": "Details", "method": "Method"}
    if served.base_name():
        titles = {"fine_tuning": "What fine-tuning changed", **titles}
    for name, title in titles.items():
        box = st.expander(title, key=f"{name}_open", bind="query-params")
        if box.open:
            with box:
                getattr(_live(), name)(request)
