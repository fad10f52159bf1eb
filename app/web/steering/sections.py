"""Concepts & steering: change an answer by a flip, find a concept and steer by it, or edit single neurons."""

from __future__ import annotations

import streamlit as st

from icebear.app.web.shared import gallery, links, question, served
from icebear.app.web.steering import concepts, edit_neurons, flips
from icebear.recipe import Recipe


def _flip() -> None:
    label = "Source prompt (optional): one that the model continues with this word"
    prompt, source, slots = question.prompts(label)
    answers = question.answers(prompt, source)
    to = question.contrast(slots[1], answers, "The word it should say") or answers.contrast or ""
    with st.container(horizontal=True):
        slot = st.container(width="content")
        with st.popover("Advanced", icon=":material/tune:"):
            most = links.bound(st.number_input, "Edits at most", "most", 1, 50, flips.MOST)
            unbounded = links.bound(st.toggle, "Allow activations outside each neuron's usual range", "unbounded")
    example = gallery.known(prompt, source)
    recorded = example and to.strip() == (example.explanation.contrast or "").strip()
    if example and recorded and most == flips.MOST and not unbounded:
        flips.show(Recipe.from_dict(example.flip))
        return
    request = (served.model_name(), prompt, to, source, most, unbounded)
    why = None if to.strip() else "Write the word that the model should say."
    if slot.button("Change the answer", type="primary", key="flip", disabled=not to.strip(), help=why):
        flips.resume(request)  # only a click starts it again, not each run of the page
        links.to_url(run="flip")
    if to.strip() and links.from_url("run") == "flip":
        flips.show_progress_or_flip(request)


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
