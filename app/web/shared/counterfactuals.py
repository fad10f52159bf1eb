"""The field for a counterfactual prompt, what icebear fills it with, and suggestions for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import streamlit as st

from icebear.app.web.shared import jobs, links, markdown, served
from icebear.app.web.shared.background import Job
from icebear.explanation.sentences import chosen_sentence
from icebear.models.text.chat import Chat

if TYPE_CHECKING:
    from icebear.concepts.answers.counterfactuals import Suggestion

WAYS = "write another one, or empty the field for none"
RECENT = 8
"""The prompts of a visit that are kept to choose again."""


def forget() -> None:
    """What was chosen for another prompt does not fit the one that is typed, for which icebear chooses; a callback."""
    st.session_state.update(counterfactual="", target=None, contrast=None, switch=False)
    typed = st.session_state["typed"] = st.session_state["prompt"]
    before = [prompt for prompt in st.session_state.get("recent", []) if prompt != typed]
    st.session_state["recent"] = [typed, *before][:RECENT]


def field(prompt: str, default: str, label: str) -> str | None:
    """Draw the field; None if it is empty. Once after a prompt was typed, icebear fills it, unless a person does; the
    page ends here while it looks for a counterfactual."""
    job = _chosen(prompt)
    hint = "Choose a suggestion, or write a prompt with the same number of tokens"
    options = {"value": default, "placeholder": hint, "on_change": _decide}
    counterfactual = links.bound(st.text_input, label, "counterfactual", **options) or None
    if job:
        # No run waits for it: a request of the browser from before the field was filled would empty the field again.
        jobs.watched(job)
        st.stop()
    if _is_chosen(prompt, counterfactual):
        st.caption(markdown.plain(chosen_sentence(counterfactual, WAYS)))
    return counterfactual


def _decide() -> None:
    """What a person writes into the field, or an empty one, stays; a callback."""
    st.session_state["typed"] = None


def _is_chosen(prompt: str, counterfactual: str | None) -> bool:
    """Return whether icebear chose this counterfactual, or looked for one and found none."""
    return st.session_state.get("chosen") == (prompt, counterfactual)


def _chosen(prompt: str) -> Job | None:
    """Fill the empty field with what is chosen for a prompt that was typed. Return the job while it looks for that."""
    state, request = st.session_state, (served.model_name(), prompt)
    if state.get("typed") != prompt or state.get("counterfactual") or isinstance(markdown.read_prompt(prompt), Chat):
        return None
    job = jobs.current(_choosing, *request)
    job.join(jobs.QUICK)
    if jobs.is_awaited(job):
        return job
    is_done = not (job.is_alive() or job.error)  # else it was stopped, or failed, which the page says
    state.update(typed=None, chosen=(prompt, job.result) if is_done else None, counterfactual=job.result or "")
    if job.error:
        _choosing.clear(*request)
    return None


@st.cache_resource(max_entries=64, show_spinner=False)
def _choosing(name: str, prompt: str) -> Job:
    """Return the job that chooses a counterfactual, for all visitors; its result is None if there is no good one."""
    loading = jobs.loading()

    def work(job: Job) -> str | None:
        model = loading.outcome()
        from icebear.concepts.answers.counterfactuals import chosen_counterfactual
        from icebear.concepts.stages.stages import stage_sites

        row = chosen_counterfactual(model, prompt) if stage_sites(model) else None
        return row.text if row else None

    return Job("Looking for a prompt to compare with", work)


def offer(prompt: str, counterfactual: str | None) -> None:
    """Suggest three counterfactuals, unless a person has chosen one; a click chooses one."""
    if counterfactual and not _is_chosen(prompt, counterfactual):
        return
    names = {
        row.text: f"{row.word.strip()} for {row.instead_of.strip()} (answer: {row.answer.strip()})"
        for row in rows(prompt)
        if row.text != counterfactual
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
    job = jobs.current(_started, served.model_name(), prompt)
    if not jobs.is_done(job):
        return []
    if not job.result:
        st.caption("No suggestion has the same number of tokens and another answer; write one.")
    return job.result or []


@st.cache_resource(max_entries=64, show_spinner=False)
def _started(name: str, prompt: str) -> Job:
    """Return the job that finds suggestions, for all visitors."""
    loading = jobs.loading()

    def work(job: Job) -> list[Suggestion]:
        model = loading.outcome()
        from icebear.concepts.answers.counterfactuals import suggest_counterfactuals

        return suggest_counterfactuals(model, prompt)

    return Job("Looking for prompts to compare with", work)
