"""The field for a counterfactual prompt, and the exchanges of words that icebear fills it with."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import streamlit as st

from icebear.app.web.shared import jobs, links, markdown, served
from icebear.app.web.shared.background_job import Job
from icebear.explanation.sentences import after_sentence, chosen_sentence, word_sentence
from icebear.models.text.chat import Chat

if TYPE_CHECKING:
    from icebear.concepts.answers.comparisons import Exchange
    from icebear.concepts.answers.what_if import WhatIf

WAYS = "write another one, or empty the field for none"
RECENT = 8
"""The prompts of a visit that are kept to choose again."""
OFFERED = 2
"""The comparisons that are offered beside the one that is chosen."""


def forget() -> None:
    """Clear what was chosen for the previous prompt, so that icebear chooses again; callback of the prompt field."""
    state = st.session_state
    state.update(counterfactual="", target=None, contrast=None, switch=False, word=None, typed_as=None)
    if edits := state.get("edits"):  # a swap is with another prompt
        state["edits"] = "\n".join(line for line in edits.splitlines() if "<-" not in line)
    state["typed"] = state["prompt"]
    _remember(state["prompt"])


def _remember(prompt: str) -> None:
    """Put a prompt before those of this visit that can be chosen again."""
    before = [other for other in st.session_state.get("recent", []) if other != prompt]
    st.session_state["recent"] = [prompt, *before][:RECENT]


def field(default: str, label: str) -> str | None:
    """Draw the field; None if it is empty."""
    options = {
        "value": default,
        "placeholder": "Write a prompt with the same number of tokens",
        "on_change": _decide,
    }
    return links.bound(st.text_input, label, "counterfactual", **options) or None


def _decide() -> None:
    """Keep what the person wrote, also an empty text, and clear the contrast; the callback of the field."""
    st.session_state.update(typed=None, contrast=None, switch=False)


def choose() -> Job | None:
    """Fill the fields for a prompt that was typed, once, unless a person does. Return the job while it looks."""
    state = st.session_state
    prompt = state.get("typed")
    if prompt is None or state.get("prompt") != prompt or state.get("counterfactual"):
        return None
    job = exchanging(prompt)
    if job and jobs.works_for_visitor(job):
        return job
    state["typed"] = None
    if job and job.error:
        _exchanging.clear(served.model_name(), prompt)
    if exchanged := outcome(job):
        put(exchanged, next(iter(exchanged.comparisons), None))
    state["is_message"] = prompt if job and job.result and exchanged is None else None
    if not (job and (job.is_alive() or job.error)):  # else it was stopped, or failed, which the page says
        state["chosen"] = (state["prompt"], state["counterfactual"])
    return None


def put(exchanged: WhatIf, exchange: Exchange | None) -> None:
    """Fill the fields with a prompt and one of its exchanges, or the prompt alone, and the words that are compared."""
    target, contrast = exchanged.answers(exchange)
    prompt = exchanged.read(str(exchanged.prompt))
    st.session_state.update(
        prompt=prompt,
        counterfactual=exchanged.read(exchange.text) if exchange else "",
        target=target,
        contrast=contrast,
        switch=False,
        typed=None,
        word=None,
        typed_as=(prompt, exchanged.prompt),
    )


def show_choice(prompt: str, counterfactual: str | None) -> None:
    """Say what icebear chose, and offer the next comparisons in its order; of a question, to ask it in the chat."""
    if st.session_state.get("is_message") == prompt:
        with st.container(horizontal=True, vertical_alignment="center"):
            st.markdown("**This is a question to a chat model**, which does not go on with it.", width="content")
            chat = Chat([{"role": "user", "content": prompt}]).to_json(None)
            st.button("Ask it in Chat", key="ask_in_chat", type="primary", on_click=_ask, args=(chat,))
        return
    if st.session_state.get("chosen") == (prompt, counterfactual or ""):
        st.caption(markdown.plain(chosen_sentence(counterfactual, WAYS)))
    exchanged = outcome(exchanging(prompt)) if _typed_as(prompt) else None
    if exchanged is None:
        return
    if about := word_sentence(exchanged):
        st.caption(markdown.plain(about))
    if exchanged.explained_after:
        with st.container(horizontal=True, vertical_alignment="center"):
            st.caption(markdown.plain(after_sentence(exchanged)), width="content")
            st.button("Explain the next token instead", key="next_token", on_click=_take_back, args=(exchanged.prompt,))
    others = [row for row in exchanged.comparisons if exchanged.read(row.text) != counterfactual]
    if others and len(others) < len(exchanged.comparisons):
        with st.container(horizontal=True, vertical_alignment="center"):
            st.caption("Or compare by:", width="content")
            for number, exchange in enumerate(others[:OFFERED]):
                offer(exchanged, exchange, f"other_{number}")


def _take_back(prompt: str) -> None:
    """Explain the likeliest token after a prompt, as it was typed; a callback."""
    st.session_state.update(prompt=prompt, counterfactual="", target=None, contrast=None, typed_as=None, chosen=None)


def _ask(chat: str) -> None:
    """Ask a question in the chat; a callback."""
    st.session_state["answering"] = True
    links.go("chat", chat=chat, turn="", span="")


def offer(exchanged: WhatIf, exchange: Exchange, key: str) -> None:
    """Draw a button that compares by an exchange."""
    word, instead, answer = map(markdown.word, (exchange.word, exchange.instead, exchange.answer))
    begins = "… " if exchange.likely.after else ""  # other words come before it
    label = f"{word} → {instead}: {begins}{answer} {exchange.probability:.2f}"
    st.button(label, key=key, on_click=partial(put, exchanged, exchange))


def exchanging(prompt: str) -> Job | None:
    """Return the job that exchanges the words of a prompt; None for a chat. A result is waited for shortly."""
    text = _typed_as(prompt) or prompt
    if not text or isinstance(markdown.read_prompt(text), Chat):
        return None
    job = jobs.cached_job(_exchanging, served.model_name(), text)
    job.join(jobs.QUICK)
    return job


def _typed_as(prompt: str) -> str | None:
    """Return the text that was typed, or linked to, if a prompt took its place to fill the fields; else None."""
    filled, typed = st.session_state.get("typed_as") or (None, None)
    return typed if filled == prompt else None


def outcome(job: Job | None) -> WhatIf | None:
    """Return what a job exchanged in a text; None while it looks, if it failed, and for a question to a chat model."""
    done = None if job is None or job.is_alive() or job.error else job.result
    return done if done and isinstance(done.prompt, str) else None


@st.cache_resource(max_entries=64, show_spinner=False)
def _exchanging(name: str, prompt: str) -> Job:
    """Return the job that exchanges words, for all visitors; its result is None for a long text."""
    loading = jobs.model_job()

    def work(job: Job) -> WhatIf | None:
        model = loading.outcome()
        from icebear.concepts.answers.what_if import exchange_words_if_short
        from icebear.concepts.stages.stages import stage_sites

        return exchange_words_if_short(model, prompt) if stage_sites(model) else None

    return Job("Exchanging words of the prompt", work)
