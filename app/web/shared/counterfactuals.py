"""The field for a counterfactual prompt, and what icebear fills it with."""

from __future__ import annotations

import streamlit as st

from icebear.app.web.shared import jobs, links, markdown, served
from icebear.app.web.shared.background import Job
from icebear.explanation.sentences import chosen_sentence
from icebear.models.text.chat import Chat

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
    hint = "Write a prompt with the same number of tokens"
    options = {"value": default, "placeholder": hint, "on_change": _decide}
    counterfactual = links.bound(st.text_input, label, "counterfactual", **options) or None
    if job:
        # No run waits for it: a request of the browser from before the field was filled would empty the field again.
        jobs.watched(job)
        st.stop()
    if st.session_state.get("chosen") == (prompt, counterfactual):  # by icebear, which may have chosen none
        st.caption(markdown.plain(chosen_sentence(counterfactual, WAYS)))
    return counterfactual


def _decide() -> None:
    """What a person writes into the field, or an empty one, stays; a callback."""
    st.session_state["typed"] = None


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
        from icebear.concepts.answers.what_if import chosen_counterfactual
        from icebear.concepts.stages.stages import stage_sites

        return chosen_counterfactual(model, prompt) if stage_sites(model) else None

    return Job("Looking for a prompt to compare with", work)
