"""The first page: a conversation with the model, whose words can be clicked on; before it begins, what can be done."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from functools import partial
from typing import Any

import streamlit as st
from markupsafe import Markup
from streamlit.delta_generator import DeltaGenerator

from icebear.app.web import start, why, words
from icebear.app.web.state import LINK, keep, kept, loading, model, plain, typed
from icebear.concepts.models.answer import message_ids, read_span
from icebear.concepts.models.chat import Chat, template_of
from icebear.errors import IcebearError, InputError

LAST = 8
"""Messages that are shown of a longer conversation."""
TEXT = Markup('<div dir="auto" style="white-space:pre-wrap;overflow-wrap:anywhere">{}</div>')


def show() -> None:
    _keep_what_was_said()
    try:
        chat = _conversation()
    except InputError as error:
        st.error(plain(str(error)))
        chat = None
    if chat is None:
        with st.container():
            _nothing_said()
        return
    st.empty()  # in its place, as the page is not at its end before the answer is
    model()
    asked = st.session_state.pop("asked", False) and chat.messages[-1]["role"] != "assistant"
    turn, span = _marked(chat)
    _turns(chat, turn, span, live=not asked)
    place = st.container()
    _field("Write on")
    options = _tools(chat)
    if asked:
        st.empty()  # in the place of what is below
        _answer(place, chat, options)
        return
    with st.container():
        if chat.messages[-1]["role"] != "assistant":
            place.caption("There is no answer yet.")
            place.button("Answer", key="ask", on_click=_ask)
        elif span is None:
            st.caption("Click a word of an answer to see why the model said it; with shift, or a second tap, a phrase.")
        if span is not None:
            why.show(chat, turn, span)


# --- the conversation -----------------------------------------------------------------------------------


def _conversation() -> Chat | None:
    """Of the URL, or of this session. Raises `InputError`."""
    text = kept("chat")
    return Chat.from_json(text, "The conversation in this link") if text else None


def _go_on(chat: Chat) -> None:
    keep(chat=chat.to_json(None))


def _keep_what_was_said() -> None:
    """The words of an answer that somebody ended, or left."""
    ids = st.session_state.pop("writing", None)
    chat = _conversation() if ids else None
    if not chat or chat.messages[-1]["role"] == "assistant":
        return
    loaded = model()
    ids = ids[:-1] if ids[-1] in loaded.ends else ids
    if ids:
        _go_on(chat.then("assistant", "".join(loaded.pieces(ids)), ids))


def _ask() -> None:
    st.session_state["asked"] = True


def _say() -> None:
    _keep_what_was_said()
    chat = None
    with suppress(InputError):  # of a link that is broken; a new conversation begins
        chat = _conversation()
    message = {"role": "user", "content": st.session_state["said"]}
    _go_on(Chat([*(chat.messages if chat else ()), message]))
    _unmark()
    _ask()


def _forget() -> None:
    for key in ("writing", "earlier"):
        st.session_state.pop(key, None)
    keep(chat=None)
    _unmark()


# --- the page -------------------------------------------------------------------------------------------


def _nothing_said() -> None:
    place = st.empty()
    without = _no_template()
    if without:
        place.info(plain(without))
    else:
        with place.container():
            st.markdown("#### Talk to the model, and click a word of what it says to see why it said so.")
            _field("Write to the model")
    start.show()
    if not without and (without := _no_template()):  # the model was waited for
        place.info(plain(without))


def _no_template() -> str | None:
    """Why the model takes no messages; None while it is being loaded."""
    job = loading()
    if job.is_alive() or job.error:
        return None
    try:
        template_of(job.result)
    except InputError as error:
        return str(error)
    return None


def _field(label: str) -> None:
    with st.container():  # else it is at the foot of the window, and the page scrolls to its end by itself
        st.chat_input(label, key="said", on_submit=_say)


def _tools(chat: Chat) -> dict[str, Any]:
    """Buttons below the conversation; how it is answered."""
    text = chat.to_json(None)
    with st.container(horizontal=True, vertical_alignment="center"):
        st.button("New conversation", icon=":material/add:", key="forget", on_click=_forget)
        with st.popover("Settings", icon=":material/tune:"):
            count = typed(st.number_input, "New tokens at most", "length", 1, 4096, 256)
            temperature = typed(st.number_input, "Temperature", "temperature", 0.0, 5.0, 0.0, 0.1, help="0: greedy")
            seed = typed(st.number_input, "Seed", "seed", 0, 2**31, 0, disabled=not temperature)
        st.download_button(
            "JSON", chat.to_json(), "chat.json", key="chat.json", icon=":material/download:", on_click="ignore"
        )
    if len(text) > LINK:
        st.caption("This conversation is too long for a link; download it as JSON to share it.")
    return {"max_new_tokens": count, "temperature": temperature, "seed": seed}


def _turns(chat: Chat, turn: int, span: tuple[int, int] | None, live: bool) -> None:
    count = len(chat.messages)
    first = max(0, count - LAST - st.session_state.setdefault("earlier", 0))
    first = first if span is None else min(first, turn)
    if first:
        st.button(f"Show earlier messages ({first})", key="show_earlier", on_click=_earlier)
    for place in range(first, count):
        with _box(chat.messages[place]["role"]):
            _message(chat, place, span if place == turn else None, live)


def _earlier() -> None:
    st.session_state["earlier"] += LAST


def _box(role: str) -> DeltaGenerator:
    if role in ("user", "assistant"):
        return st.chat_message(role)
    box = st.chat_message("other", avatar=":material/settings:")
    box.caption(plain(role))
    return box


def _message(chat: Chat, turn: int, marked: tuple[int, int] | None, live: bool) -> None:
    message = chat.messages[turn]
    content, answers = message["content"], message["role"] == "assistant"
    if not isinstance(content, str):
        st.html(TEXT.format(json.dumps(content, ensure_ascii=False)))
    elif not live or not (answers or why.against_wanted()):
        st.html(TEXT.format(content))
    elif answers:
        try:
            found = words.words_of(model().pieces(message_ids(model(), chat, turn)))
        except InputError as error:
            st.error(plain(str(error)))
            return
        words.draw(found, marked, f"turn {turn}", partial(_picked, turn))
    else:
        words.draw(words.words_of(words.split(content)), None, f"turn {turn}", _against)


def _answer(place: DeltaGenerator, chat: Chat, options: dict[str, Any]) -> None:
    """Word by word; then the page is drawn anew."""
    loaded = model()
    with place:
        with st.chat_message("assistant"):
            shown = st.empty()
        st.button("Stop", key="stop_answer")  # any click ends this run at the next token; what was said is kept
    shown.caption("Reading ...")

    def told(ids: list[int]) -> None:
        st.session_state["writing"] = ids
        text = loaded.tokenizer.decode(ids, skip_special_tokens=True).rstrip("\ufffd")
        shown.html(TEXT.format(text))

    try:
        answer = loaded.answer(chat, on_token=told, **options)
    except IcebearError as error:
        shown.error(plain(str(error)))
        return
    st.session_state.pop("writing", None)
    if not answer.ids:
        shown.info("The model ended its answer before its first word.")
        return
    _go_on(answer.chat)
    st.rerun()


# --- what is marked -------------------------------------------------------------------------------------


def _marked(chat: Chat) -> tuple[int, tuple[int, int] | None]:
    """The message and the tokens that are explained; what cannot be is said."""
    turn, span = kept("turn"), kept("span")
    if not turn or not span:
        return 0, None
    found = read_span(span)
    if re.fullmatch("[0-9]{1,6}", turn) and int(turn) < len(chat.messages) and isinstance(found, tuple):
        return int(turn), found
    st.error(plain(f"This link marks {span!r} of message {turn!r}, which are no tokens of a message here."))
    return 0, None


def _picked(turn: int, first: int, stop: int, text: str) -> None:
    if why.against_wanted():
        _against(first, stop, text)
        return
    keep(turn=str(turn), span=f"{first}-{stop}")
    st.session_state["rather"] = ""


def _against(first: int, stop: int, text: str) -> None:
    st.session_state["rather"] = text.strip()
    st.session_state["clicks"] = why.EXPLAINED


def _unmark() -> None:
    keep(turn=None, span=None)
    st.session_state["rather"] = ""
