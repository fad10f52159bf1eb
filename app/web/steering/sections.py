"""Concepts & steering: change an answer, find a concept and steer by it, or edit single neurons."""

from __future__ import annotations

import streamlit as st

from icebear.app.web.shared import links
from icebear.app.web.steering import change_answer, concepts, edit_neurons

SECTIONS = {
    "flip": ("Change the answer", change_answer.show),
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
