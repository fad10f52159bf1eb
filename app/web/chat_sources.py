"""Beside a conversation: the sources of a sentence of an answer, and what a source did, measured by removal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import streamlit as st

from icebear.app.web import chat_clicks
from icebear.app.web.shared import jobs, markdown, served, words
from icebear.app.web.shared.background_job import Job
from icebear.app.web.shared.bars import Bar, bars
from icebear.app.web.shared.explanations import answer_at
from icebear.concepts.answers.source_records import NAT, SourcedSentence, SourceEffect
from icebear.concepts.answers.source_sentences import change_text, finding
from icebear.concepts.answers.sources import Sources, effect_of_source, sources
from icebear.concepts.answers.units import units_of
from icebear.errors import InputError
from icebear.models.text.answer import Answer, message_ids
from icebear.models.text.chat import Chat

QUOTED = 60
"""The longest quote of a source, in characters."""
Painted = tuple[int, int, float]
"""Characters [start, stop) of a message, and the nats that are lost."""


def show(chat: Chat, turn: int, span: tuple[int, int]) -> None:
    """Show what a sentence of an answer came from; of another message, what its sentence did to the last answer."""
    above = st.container()
    chat_clicks.choose()
    with above:
        if chat.messages[turn]["role"] == "assistant":
            _from(chat, turn, span)
        else:
            _did(chat, turn, span)


def colors(chat: Chat, turn: int, span: tuple[int, int]) -> list[words.Colored] | None:
    """Return the pieces of each message with the nats that are lost; none of a message without. None until it is
    measured."""
    try:
        job = _job(chat, turn, span)
    except InputError:  # of a broken link, which `show` says
        return None
    if job.result is None:
        return None
    rows: dict[int, list[Painted]] = {}
    if isinstance(job.result, SourceEffect):
        last, answer = _last_answer(chat)
        ends = [len("".join(answer.token_strings[:stop])) for stop in range(len(answer.ids) + 1)]
        parts = [part for part in job.result.sentences if part.is_hit]
        rows[last] = [(ends[part.start], ends[part.stop], -part.change) for part in parts]
    else:
        for source in job.result.sentences[0].leading:
            if source.characters:  # a call of a tool is no text
                rows.setdefault(source.message, []).append((*source.characters, -source.change))
    return [_painted(_pieces(chat, number), rows.get(number, ())) for number in range(len(chat.messages))]


def marked(chat: Chat, turn: int, span: tuple[int, int]) -> tuple[int, int]:
    """Return the pieces of the sentence that was clicked."""
    pieces = _pieces(chat, turn)
    parts = [(part.start, part.stop) for part in units_of(pieces, (), None, "sentence")]
    return next((part for part in parts if part[0] <= span[0] < part[1]), span)


def _pieces(chat: Chat, turn: int) -> list[str]:
    """Return the pieces of a message that can be clicked: tokens of an answer, words of another one."""
    message = chat.messages[turn]
    if not isinstance(message["content"], str):
        return []
    if message["role"] == "assistant":
        model = jobs.model()
        return list(model.pieces(message_ids(model, chat, turn))) if message["content"] else []
    return words.split(message["content"])


def _painted(pieces: Sequence[str], rows: Iterable[Painted]) -> words.Colored:
    """Return pieces with the value of the row that has their first letter; nothing without rows."""
    rows, at, result = list(rows), 0, []
    for piece in pieces:
        letter = at + len(piece) - len(piece.lstrip())
        result.append((piece, next((value for start, stop, value in rows if start <= letter < stop), 0.0)))
        at += len(piece)
    return result if rows else ()


# --- measured -------------------------------------------------------------------------------------------


def _job(chat: Chat, turn: int, span: tuple[int, int]) -> Job:
    start, stop = marked(chat, turn, span)
    if chat.messages[turn]["role"] == "assistant":
        text = chat.of(chat.messages[: turn + 1]).to_json(None)
        return jobs.cached_job(_sources, served.model_name(), text, turn, (start, stop))
    last, _ = _last_answer(chat)
    if last < turn:
        raise InputError("There is no answer after this message; ask for one.")
    pieces = _pieces(chat, turn)
    at = len("".join(pieces[:start])) + len(pieces[start]) - len(pieces[start].lstrip())
    text = chat.of(chat.messages[: last + 1]).to_json(None)
    return jobs.cached_job(_effect, served.model_name(), text, last, turn, at)


def _last_answer(chat: Chat) -> tuple[int, Answer]:
    """Return the last answer and its index. Raises `InputError` if there is none."""
    numbers = [number for number, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if not numbers:
        raise InputError("There is no answer yet; ask for one.")
    text = chat.of(chat.messages[: numbers[-1] + 1]).to_json(None)
    return numbers[-1], answer_at(served.model_name(), text, numbers[-1])


@st.cache_resource(max_entries=64, show_spinner=False)
def _sources(name: str, chat: str, turn: int, span: tuple[int, int]) -> Job:
    """Return the job that measures where a sentence came from, or has measured it, for all visitors."""
    model, answer = jobs.model(), answer_at(name, chat, turn)
    return Job("Removing sentences", lambda job: sources(model, answer, span=span, on_progress=job.step))


@st.cache_resource(max_entries=64, show_spinner=False)
def _effect(name: str, chat: str, turn: int, message: int, at: int) -> Job:
    """Return the job that measures what a sentence of the context did, for all visitors."""
    model, answer = jobs.model(), answer_at(name, chat, turn)
    return Job("Removing the sentence", lambda job: effect_of_source(model, answer, message, at))


# --- shown ----------------------------------------------------------------------------------------------


def _from(chat: Chat, turn: int, span: tuple[int, int]) -> None:
    measured: Sources = jobs.wait_for(_job(chat, turn, span), stops=True)
    [sentence] = measured.sentences
    st.markdown(f"## Where does {_quoted(sentence.text)} come from?")
    st.markdown(f"**{markdown.plain(finding(sentence, measured.units))}**")
    st.html(bars(_rows(sentence)))
    largest = sentence.sources[0]
    st.caption(
        markdown.plain(
            f"Without the first: {change_text(sentence, largest.change)}. Each bar is a removal: the nats of "
            "log-probability that this sentence of the answer loses. Gray: other sentences, as the control."
        )
    )
    for dropped in measured.dropped:
        st.caption(markdown.plain(f"The template drops this text, so the model did not read it: {dropped.text}"))


def _rows(sentence: SourcedSentence) -> list[Bar]:
    """Return a bar for each shown source, what they lose together, and the control."""
    rows = [
        Bar(
            "The image (blurred)" if source.is_image else _name(source.role, source.text),
            -source.change,
            f"{source.change:+.1f}",
        )
        for source in sentence.leading
    ]
    if sentence.together is not None and len(sentence.leading) > 1:
        name = f"The first {len(sentence.leading)} together"
        rows.append(Bar(name, -sentence.together, f"{sentence.together:+.1f}"))
    other = "Another sentence" if sentence.random.are_all else "A random other sentence"
    return rows + [Bar(other, -x, f"{x:+.1f}", True) for x in sentence.random.singles]


def _did(chat: Chat, turn: int, span: tuple[int, int]) -> None:
    effect: SourceEffect = jobs.wait_for(_job(chat, turn, span), stops=True)
    st.markdown(f"## What did {_quoted(effect.text)} do to the answer?")
    hit = [part for part in effect.sentences if part.is_hit]
    most = min(hit, key=lambda part: part.change, default=None)
    little = "No sentence of the answer loses 1 nat more without it than without every control."
    if not all(part.random for part in effect.sentences):
        little = "There is no other sentence as a control, so it is open what the answer hangs on."
    st.markdown(f"**{_quoted(most.text)} hangs on it.**" if most else f"**{little}**")
    rows = []
    for part in effect.sentences:
        rows.append(Bar(_name("", part.text), -part.change, f"{part.change:+.1f}"))
        rows += [Bar("without another sentence", -x, f"{x:+.1f}", True) for x in part.random]
    st.html(bars(rows, high=NAT))
    st.caption(
        "Each bar is a removal: the nats of log-probability that a sentence of the answer loses without the sentence "
        "that you clicked. Gray: without another sentence of the context, as the control."
    )


def _name(role: str, text: str) -> str:
    quote = markdown.in_quotes(text, QUOTED)
    return f"{role}: {quote}" if role else quote


def _quoted(text: str) -> str:
    return markdown.plain(_name("", text))
