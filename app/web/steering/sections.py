"""Concepts & steering: change an answer by a flip, find a concept and steer by it, or edit single neurons."""

from __future__ import annotations

import streamlit as st

from icebear.app.example import PROMPT
from icebear.app.web.shared import counterfactuals, links, markdown, served
from icebear.app.web.steering import concepts, edit_neurons, flips


def _flip() -> None:
    prompt = links.bound(st.text_area, "Prompt", "prompt", value=PROMPT, height=80, on_change=counterfactuals.forget)
    left, right = st.columns(2)
    to = links.bound(left.text_input, "The word it should say", "to", placeholder="desert")
    label = "Source prompt (optional): one that the model continues with this word"
    source = links.bound(right.text_input, label, "source", placeholder="The camel lives in the")
    with st.container(horizontal=True):
        slot = st.container(width="content")
        with st.popover("Advanced", icon=":material/tune:"):
            most = links.bound(st.number_input, "Edits at most", "most", 1, 50, flips.MOST)
            unbounded = links.bound(st.toggle, "Allow activations outside each neuron's usual range", "unbounded")
    request = (served.model_name(), prompt, to, source or None, most, unbounded)
    why = None if to.strip() else "Write the word that the model should say."
    if slot.button("Change the answer", type="primary", key="flip", disabled=not to.strip(), help=why):
        flips.resume(request)  # only a click starts it again, not each run of the page
        links.to_url(run="flip")
    if not to.strip():
        _suggestions(prompt)
    elif links.from_url("run") == "flip":
        flips.watch(request)


def _suggestions(prompt: str) -> None:
    """Suggest source prompts with their answers; a click chooses one."""
    rows = {row.text: row for row in counterfactuals.rows(prompt)}

    def take() -> None:
        row = rows.get(st.session_state["chosen_source"])
        if row:
            st.session_state.update(source=row.text, to=row.answer)

    names = {text: f"{markdown.plain(text)} → {markdown.word(row.answer)}" for text, row in rows.items()}
    if names:
        label = "Or the answer of another prompt"
        st.pills(label, list(names), format_func=names.__getitem__, key="chosen_source", on_change=take)


SECTIONS = {
    "flip": ("Change the answer", _flip),
    "concepts": ("Concepts", concepts.show),
    "edits": ("Edits", edit_neurons.show),
}
"""The value in the URL -> its name, and what shows it."""


def show() -> None:
    section = links.from_url("section") or "flip"
    st.session_state["_section"] = section = section if section in SECTIONS else "flip"

    def choose() -> None:
        links.to_url(section=st.session_state["_section"])

    st.segmented_control(
        "Steer by",
        list(SECTIONS),
        format_func=lambda name: SECTIONS[name][0],
        key="_section",
        on_change=choose,
        required=True,
        label_visibility="collapsed",
    )
    SECTIONS[section][1]()
