"""What if: the words of the prompt as buttons, and their exchanges."""

from __future__ import annotations

from typing import TYPE_CHECKING

import streamlit as st

from icebear.app.web.shared import counterfactuals, jobs, markdown, served
from icebear.app.web.shared.question import Request, measuring
from icebear.concepts.answers.content_words import is_content, words_of
from icebear.errors import InputError
from icebear.explanation.saved import SavedExplanation
from icebear.explanation.sentences import control_text
from icebear.render import headline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from icebear.concepts.answers.comparisons import Exchange
    from icebear.concepts.answers.what_if import WhatIf


def picks(explanation: SavedExplanation) -> dict[int, str]:
    """Return the positions of content words of a text -> the bounds of their word."""
    tokens = explanation.tokens if isinstance(explanation.prompt, str) else ()
    spans = (span for span in words_of(tokens) if is_content("".join(tokens[slice(*span)])))
    return {position: f"{start}-{end}" for start, end in spans for position in range(start, end)}


def pick(span: str) -> None:
    """Open the exchanges of a word, or close them; a callback."""
    state = st.session_state
    chosen = (state["prompt"], span)
    state.update(word=None if state.get("word") == chosen else chosen, own_word="")


def show_word(request: Request, explanation: SavedExplanation) -> None:
    """Show the exchanges of the word that was clicked on, with a field for one's own."""
    prompt, span = st.session_state.get("word") or ("", "")
    if not span or prompt != request.prompt:
        return
    start, end = map(int, span.split("-"))
    word = "".join(explanation.tokens[start:end]).strip()
    with st.container(border=True, key="word_box"):
        job = counterfactuals.exchanging(request.prompt)
        if not job or not jobs.show_until_done(job):
            return
        exchanged = counterfactuals.outcome(job)
        if exchanged is None:
            st.caption("The words of this prompt are not exchanged: it is long, or a question to a chat model.")
            return
        rows = [row for row in exchanged.exchanges if row.position < end and start < row.position + row.length]
        bounds = (rows[0].position, rows[0].position + rows[0].length) if rows else (start, end)
        st.markdown(f"**{markdown.word(rows[0].word if rows else word)}** exchanged for another word. Then comes:")
        if rows:
            draw(exchanged, rows, "word")
        _typed_word(exchanged, bounds)


def draw(exchanged: WhatIf, rows: Sequence[Exchange], key: str) -> None:
    """Show exchanges as buttons that compare by them, a column for each word, with the control."""
    words = dict.fromkeys((row.position, row.length) for row in rows)
    for column, word in zip(st.columns(max(len(words), 1)), words, strict=False):
        with column:
            for number, row in enumerate(row for row in rows if (row.position, row.length) == word):
                with st.container(horizontal=True, vertical_alignment="center"):
                    counterfactuals.offer(exchanged, row, f"{key}_{row.position}_{number}")
                    st.markdown(f"{row.change:+.1f} nats", width="content")
    st.caption(markdown.plain(control_text(exchanged)))


def _typed_word(exchanged: WhatIf, span: tuple[int, int]) -> None:
    """Exchange the word for one that a person writes, or for the nearest one that fits."""
    word = st.text_input("Another word", key="own_word", placeholder="Write your own word")
    if not word or not word.strip():
        return
    try:
        exchange = measuring().own_exchange(served.model_name(), exchanged, str(exchanged.prompt), span, word.strip())
    except InputError as error:
        st.info(markdown.message(error))
        return
    if exchange.instead != word.strip():
        count = f"{exchange.length} token{'s' * (exchange.length != 1)}"
        reason = f"{word.strip()!r} does not have {count}, as {exchange.word!r} has; the nearest word that fits:"
        st.caption(markdown.plain(reason))
    draw(exchanged, [exchange], "own")


def show_table(request: Request, explanation: SavedExplanation) -> bool:
    """Show on which word the answer hangs, with the exchanges that change it most and their control. Return whether."""
    job = counterfactuals.exchanging(request.prompt)
    exchanged = counterfactuals.outcome(job) if job and jobs.show_until_done(job) else None
    if exchanged is None:
        return False
    if request.contrast or explanation.target.strip() != exchanged.explained.token_text.strip():
        return False
    st.html(headline(str(exchanged)))
    if exchanged.exchanges:
        draw(exchanged, exchanged.shown, "shown")
    return bool(exchanged.exchanges)
