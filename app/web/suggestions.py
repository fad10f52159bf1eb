"""The field for a counterfactual prompt, and suggestions for it."""

from __future__ import annotations

import streamlit as st

from icebear.app.web import ui
from icebear.app.web.background import Job
from icebear.concepts.models.chat import Chat


def field(prompt: str, default: str) -> str | None:
    """Draw the field; None if it is empty."""
    label = "Compared with (counterfactual prompt)"
    hint = "Choose a suggestion, or write a prompt with the same number of tokens"
    return ui.typed(st.text_input, label, "counterfactual", value=default, placeholder=hint) or None


def offer(prompt: str) -> None:
    """Suggest three counterfactuals, found in the background; a click chooses one."""
    if isinstance(ui.read_prompt(prompt), Chat):
        return
    job = _started(ui.model_name(), prompt)
    if job.is_alive():
        _waiting(job)
        return
    if job.error or not job.result:
        st.caption("No suggestion has the same number of tokens and another answer; write one.")
        return
    rows = {
        row.text: f"{row.word.strip()} for {row.instead_of.strip()} (answer: {row.answer.strip()})"
        for row in job.result
    }

    def take() -> None:
        st.session_state["counterfactual"] = st.session_state["suggestion"] or ""

    st.pills(
        "Compare with", list(rows), format_func=lambda text: ui.plain(rows[text]), key="suggestion", on_change=take
    )


@st.fragment(run_every=1.0)
def _waiting(job: Job) -> None:
    st.caption("Looking for prompts to compare with ...")
    if not job.is_alive():
        st.rerun()


@st.cache_resource(max_entries=64, show_spinner=False)
def _started(name: str, prompt: str) -> Job:
    """Return the job that finds suggestions, for all visitors."""
    from icebear.concepts.attribution.counterfactuals import suggest_counterfactuals

    model = ui.model()
    return Job("Looking for prompts to compare with", lambda job: suggest_counterfactuals(model, prompt))
