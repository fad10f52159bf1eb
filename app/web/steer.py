"""Concepts & steering: find a concept and steer by it, or edit single neurons."""

from __future__ import annotations

import streamlit as st

from icebear.app.web import concept, editing, ui

SECTIONS = {"concepts": "Find a concept", "edits": "Edit neurons"}


def show() -> None:
    section = ui.typed(
        st.segmented_control,
        "Steer by",
        "section",
        list(SECTIONS),
        default="concepts",
        required=True,
        format_func=SECTIONS.__getitem__,
    )
    if section == "concepts":
        concept.show()
    else:
        editing.show()
