"""The field for a counterfactual prompt, and suggestions for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import streamlit as st

from icebear.app.web.shared import jobs, links, markdown, served
from icebear.app.web.shared.background import Job
from icebear.models.text.chat import Chat

if TYPE_CHECKING:
    from icebear.concepts.answers.counterfactuals import Suggestion


def field(default: str) -> str | None:
    """Draw the field; None if it is empty."""
    label = "Compared with (counterfactual prompt)"
    hint = "Choose a suggestion, or write a prompt with the same number of tokens"
    return links.bound(st.text_input, label, "counterfactual", value=default, placeholder=hint) or None


def offer(prompt: str) -> None:
    """Suggest three counterfactuals; a click chooses one."""
    names = {
        row.text: f"{row.word.strip()} for {row.instead_of.strip()} (answer: {row.answer.strip()})"
        for row in rows(prompt)
    }

    def take() -> None:
        st.session_state["counterfactual"] = st.session_state["suggestion"] or ""

    if names:
        label = "Compare with"
        st.pills(
            label, list(names), format_func=lambda text: markdown.plain(names[text]), key="suggestion", on_change=take
        )


def rows(prompt: str) -> list[Suggestion]:
    """Return prompts with another answer, which a click asks for; the page says if there is none yet."""
    if isinstance(markdown.read_prompt(prompt), Chat):
        return []

    def ask() -> None:
        st.session_state["suggested"] = prompt

    if st.session_state.get("suggested") != prompt:
        st.button("Suggest prompts", key="suggest", type="tertiary", icon=":material/lightbulb:", on_click=ask)
        return []
    job = _started(served.model_name(), prompt)
    if job.is_alive():
        _waiting(job)
        return []
    if not job.result:
        st.caption("No suggestion has the same number of tokens and another answer; write one.")
    return job.result or []


@st.fragment(run_every=1.0)
def _waiting(job: Job) -> None:
    st.caption("Looking for prompts to compare with ...")
    if not job.is_alive():
        st.rerun()


@st.cache_resource(max_entries=64, show_spinner=False)
def _started(name: str, prompt: str) -> Job:
    """Return the job that finds suggestions, for all visitors."""
    loading = jobs.loading()

    def work(job: Job) -> list[Suggestion]:
        model = loading.outcome()
        from icebear.concepts.answers.counterfactuals import suggest_counterfactuals

        return suggest_counterfactuals(model, prompt)

    return Job("Looking for prompts to compare with", work)
