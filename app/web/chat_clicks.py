"""What a click on a conversation chooses: a word to explain, a sentence, or an alternative to the word."""

from __future__ import annotations

import streamlit as st

from icebear.app.web.shared import links, question

WORD = "word"
SENTENCE = "sentence"
ALTERNATIVE = "alternative"


def selects_alternative() -> bool:
    """Return whether a click selects the alternative, not the word to explain."""
    return _clicks() == ALTERNATIVE


def selects_sentences() -> bool:
    """Return whether a click selects a sentence, whose sources are measured."""
    return _clicks() == SENTENCE


def _clicks() -> str | None:
    """Return what a click chooses; in the first run of a link its widget is not drawn yet."""
    return st.session_state.get("clicks") or st.query_params.get("clicks")


def choose() -> None:
    """Show what a click on the conversation chooses."""
    about = (
        "A click on a word shows its tokens and sources by relevance; on a sentence, what is lost without each source, "
        "measured. An alternative is what could stand there instead of the word."
    )
    choices = [WORD, SENTENCE, ALTERNATIVE]
    links.bound(st.segmented_control, "Select", "clicks", choices, default=WORD, required=True, help=about)


def choose_with_contrast() -> str | None:
    """Show the choice, and beside it the field for another word. Return what is in the field, None if it is empty."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        choose()
        return question.contrast_field("rather")
