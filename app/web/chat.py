"""Chat: a conversation with the model, and for each word of an answer the reason."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any

import streamlit as st
from markupsafe import Markup
from streamlit.delta_generator import DeltaGenerator

from icebear.app.web import chat_breakdown, chat_clicks, chat_image, chat_monitors, chat_sources
from icebear.app.web.shared import jobs, links, markdown, pictures, uploads, words
from icebear.app.web.steering import edit_neurons
from icebear.edits import parse_edits
from icebear.errors import IcebearError, InputError
from icebear.models.image_examples import ENDINGS
from icebear.models.text.answer import message_ids, read_span
from icebear.models.text.chat import Chat, template_of
from icebear.render import style
from icebear.steering.apply import steer

SHOWN_MESSAGES = 8
"""Messages that are shown of a longer conversation."""
PICTURE_WIDTH = 240
"""Of a picture in a message, in pixels of the page."""
FIRST_MESSAGES = (
    "What is the capital of France? Answer in one word.",
    "Ann lives in Rome. Tom lives in Oslo. Where does Tom live?",
    "Write one sentence about an ice bear.",
)
"""First messages, a click each."""
HINT = (
    "Click a word of an answer to see why the model wrote it. Shift-click a second word for a phrase, "
    "Alt-click for a piece of a word."
)
SENTENCE_HINT = (
    "Click a sentence of an answer to measure which sentences of the conversation it hangs on; click another sentence "
    "to measure what it did to the last answer."
)
STICKY = """<style>@media (min-width:641px){
.stColumn:has(.st-key-beside){position:sticky;top:4.5rem;align-self:flex-start}}</style>"""
"""What is shown about an answer stays in view beside a long conversation."""
TOKEN = Markup('<span title="{}" style="{}">{}</span>')
TEXT = Markup('<div dir="auto" style="white-space:pre-wrap;overflow-wrap:anywhere">{}</div>')


def show() -> None:
    _keep_partial_answer()
    try:
        chat = _conversation()
    except InputError as error:
        st.error(markdown.message(error))
        chat = None
    if chat is None:
        with st.container():
            _before_the_first_message()
        return
    st.empty()  # in its place, as the page is not at its end before the answer is
    jobs.model()
    answering = st.session_state.pop("answering", False) and chat.messages[-1]["role"] != "assistant"
    turn, span = _selected(chat)
    left, right = st.columns([3, 2], gap="large")
    beside = _beside(chat, turn)
    colors = beside.colors(chat, turn, span) if span and not answering else None
    with left:
        _messages(chat, turn, span, colors or [()] * len(chat.messages), live=not answering)
        slot = st.container()
        _field("Reply", takes_image=jobs.reads_images() and not chat.image)
        options = _tools(chat)
    if answering:
        right.empty()  # in the places of what is below
        st.empty()
        _answer(slot, chat, options)
        return
    if chat.messages[-1]["role"] != "assistant":
        slot.caption("There is no answer yet.")
        slot.button("Answer", key="ask", on_click=_request_answer)
    with right.container(key="beside"):
        st.html(STICKY)
        if span is None:
            chat_clicks.choose()
            st.caption(SENTENCE_HINT if chat_clicks.selects_sentences() else HINT)
            return
        breakdown = beside.show(chat, turn, span)
    if colors is None:
        st.rerun()  # to color the conversation
    if breakdown is None:
        return
    with st.container():
        chat_breakdown.details(chat, turn, span, breakdown)


def _beside(chat: Chat, turn: int) -> ModuleType:
    """Return the module that shows what is behind the selection of a message."""
    if chat_clicks.selects_sentences():
        return chat_sources
    before = chat.messages[:turn]
    return chat_image if any(message.get("image") for message in before) else chat_breakdown


# --- the conversation -----------------------------------------------------------------------------------


def _conversation() -> Chat | None:
    """Return the conversation of the URL, or of this session. Raises `InputError`."""
    text = links.from_url("chat")
    chat = Chat.from_json(text, "The conversation in this link") if text else None
    if chat:
        uploads.picture_of(chat)  # refused where it is not in this session
    return chat


def _keep_partial_answer() -> None:
    """Add the tokens of an answer that was interrupted to the conversation."""
    ids = st.session_state.pop("writing", None)
    chat = _conversation() if ids else None
    if not chat or chat.messages[-1]["role"] == "assistant":
        return
    loaded = jobs.model_job().outcome()  # draws nothing, so that what follows keeps its place
    ids = ids[:-1] if ids[-1] in loaded.ends else ids
    if ids:
        links.to_url(chat=chat.then("assistant", "".join(loaded.pieces(ids)), ids).to_json(None))


def _request_answer() -> None:
    st.session_state["answering"] = True


def _send(text: str | None = None) -> None:
    """Send a message, by default that of the field."""
    _keep_partial_answer()
    chat = None
    with suppress(InputError):  # of a link that is broken; a new conversation begins
        chat = _conversation()
    try:
        message = {"role": "user", "content": text} if text else _written()
    except InputError as error:
        st.session_state["trouble"] = str(error)
        return
    links.to_url(chat=(chat.of([*chat.messages, message]) if chat else Chat([message])).to_json(None))
    _unselect()
    _request_answer()


def _written() -> dict[str, Any]:
    """Return the message in the field, perhaps with an image. Raises `InputError`."""
    value = st.session_state["message"]
    if isinstance(value, str):
        return {"role": "user", "content": value}
    images = {"image": uploads.keep(value.files[0])} if value.files else {}
    return {"role": "user", "content": value.text, **images}


def _forget() -> None:
    for key in ("writing", "earlier", "verdicts"):
        st.session_state.pop(key, None)
    uploads.forget()
    links.to_url(chat=None)
    _unselect()


# --- the page -------------------------------------------------------------------------------------------


def _before_the_first_message() -> None:
    slot = st.empty()
    reason, had_images = _no_template(), jobs.reads_images()
    if reason is None:
        with slot.container():
            st.markdown("## Talk to the model, and click a word of an answer to see why the model wrote it.")
            _field("Write to the model", takes_image=had_images)
            st.caption("Or ask:")
            with st.container(horizontal=True):
                for number, question in enumerate(FIRST_MESSAGES):
                    st.button(markdown.plain(question), key=f"example_{number}", on_click=_send, args=(question,))
    jobs.model()
    reason = _no_template()  # the model was waited for
    if jobs.reads_images() and not had_images:
        st.rerun()
    if reason:
        slot.info(markdown.message(reason))
    else:
        chat_monitors.choose()


def _no_template() -> str | None:
    """Return why the model takes no messages; None if it takes them, or is being loaded."""
    job = jobs.model_job()
    if job.is_alive() or job.error:
        return None
    try:
        template_of(job.result)
    except InputError as error:
        return str(error)
    return None


def _field(label: str, takes_image: bool) -> None:
    options: dict[str, Any] = {"accept_file": True, "file_type": ENDINGS} if takes_image else {}
    with st.container():  # else it is at the foot of the window, and the page scrolls to its end by itself
        label += " (+ adds an image)" if takes_image else ""
        st.chat_input(label, key="message", on_submit=_send, **options)


def _tools(chat: Chat) -> dict[str, Any]:
    """Show the buttons below the conversation. Return the settings of an answer."""
    with st.container(horizontal=True, vertical_alignment="center"):
        st.button("New conversation", icon=":material/add:", key="forget", on_click=_forget)
        with st.popover("Settings", icon=":material/tune:"):
            count = links.bound(st.number_input, "New tokens at most", "length", 1, 4096, 256)
            temperature = links.bound(
                st.number_input, "Temperature", "temperature", 0.0, 5.0, 0.0, 0.1, help="0: greedy"
            )
            seed = links.bound(st.number_input, "Seed", "seed", 0, 2**31, 0, disabled=not temperature)
        chat_monitors.choose()
        pictures.downloads("chat", {"json": partial(uploads.saved, chat)})
    if chat.image:
        st.caption("The image is not in the link, and a conversation has one image.")
    if len(chat.to_json(None)) > links.LONGEST_URL_VALUE:
        st.caption("This conversation is too long for a link; download it as JSON to share it.")
    edits = [line for line in st.session_state.get("edits", "").splitlines() if line.strip()]
    label = f"Answer with the {len(edits)} edits of {links.VIEWS['steer'].title}"
    if edits and links.bound(st.toggle, label, "edited"):
        st.caption(markdown.plain(f"{', '.join(edits)}. Explanations are of the model without edits."))
    else:
        edits = []
    return {"max_new_tokens": count, "temperature": temperature, "seed": seed, "edits": edits}


def _messages(chat: Chat, turn: int, span: tuple[int, int] | None, colors: Sequence[words.Colored], live: bool) -> None:
    """Show the last messages. colors: of each. live: with words to click on."""
    # At half of the color any text has a contrast of 4.5.
    darkest = 2 * max((abs(value) for row in colors for _, value in row), default=0) or 1.0
    count = len(chat.messages)
    earliest = max(0, count - SHOWN_MESSAGES - st.session_state.setdefault("earlier", 0))
    earliest = earliest if span is None else min(earliest, turn)

    def show_earlier() -> None:
        st.session_state["earlier"] += SHOWN_MESSAGES

    if earliest:
        st.button(f"Show earlier messages ({earliest})", key="show_earlier", on_click=show_earlier)
    for number in range(earliest, count):
        role = chat.messages[number]["role"]
        known = role in ("user", "assistant")
        with st.chat_message(role) if known else st.chat_message("other", avatar=":material/settings:"):
            if not known:
                st.caption(markdown.plain(role))
            colored = [(piece, value, value / darkest) for piece, value in colors[number]]
            _message(chat, number, span if number == turn else None, colored, live)
            chat_monitors.show_verdicts(chat, number)


def _message(
    chat: Chat, turn: int, span: tuple[int, int] | None, colored: Sequence[tuple[str, float, float]], live: bool
) -> None:
    message = chat.messages[turn]
    content, answers = message["content"], message["role"] == "assistant"
    if message.get("image"):
        st.image(uploads.picture_of(chat), width=PICTURE_WIDTH)
    if not isinstance(content, str):
        st.html(TEXT.format(json.dumps(content, ensure_ascii=False)))
    elif not live or not (answers or chat_clicks.selects_alternative() or chat_clicks.selects_sentences()):
        tokens = (TOKEN.format(f"{value:+.2f}", style(share), piece) for piece, value, share in colored)
        st.html(TEXT.format(Markup().join(tokens) if colored else content))
    elif answers:
        try:
            pieces = jobs.model().pieces(message_ids(jobs.model(), chat, turn))
        except InputError as error:
            st.error(markdown.message(error))
            return
        words.draw(words.words_of(pieces), _marked(chat, turn, span), f"turn {turn}", partial(_select, turn), colored)
    elif chat_clicks.selects_sentences():
        parts = words.words_of(words.split(content))
        words.draw(parts, _marked(chat, turn, span), f"turn {turn}", partial(_select, turn), colored)
    else:
        words.draw(words.words_of(words.split(content)), None, f"turn {turn}", _select_alternative)


def _marked(chat: Chat, turn: int, span: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return the selected pieces of a message; a sentence is selected as a whole."""
    return chat_sources.marked(chat, turn, span) if span and chat_clicks.selects_sentences() else span


def _answer(slot: DeltaGenerator, chat: Chat, options: dict[str, Any]) -> None:
    """Show the answer token by token; then the page is drawn again."""
    loaded = jobs.model()
    with slot:
        with st.chat_message("assistant"):
            shown = st.empty()
        st.button("Stop", key="stop_answer")  # any click ends this run at the next token; what was written is kept
    shown.caption("Reading ...")

    def on_token(ids: list[int]) -> None:
        st.session_state["writing"] = ids
        text = loaded.tokenizer.decode(ids, skip_special_tokens=True).rstrip("\ufffd")
        shown.html(TEXT.format(text))

    try:
        edits = edit_neurons.in_raw_units(parse_edits(options.pop("edits"), loaded.name))
        with steer(loaded, edits), chat_monitors.reading(loaded, chat) as stopping:
            answer = loaded.answer(uploads.prompt_of(chat), on_token=on_token, **options, **stopping)
    except IcebearError as error:
        shown.error(markdown.message(error))
        return
    st.session_state.pop("writing", None)
    if not answer.ids:
        shown.info("The model ended its answer before its first word; send another message.")
        return
    links.to_url(chat=answer.chat.to_json(None))
    st.rerun()


# --- the selection --------------------------------------------------------------------------------------


def _selected(chat: Chat) -> tuple[int, tuple[int, int] | None]:
    """Return the message and the tokens to explain; the page says if the URL names others."""
    turn, span = links.from_url("turn"), links.from_url("span")
    if not turn or not span:
        return 0, None
    tokens = read_span(span)
    if re.fullmatch("[0-9]{1,6}", turn) and int(turn) < len(chat.messages) and isinstance(tokens, tuple):
        return int(turn), tokens
    st.error(
        markdown.plain(f"This link selects {span!r} of message {turn!r}, but this conversation has no such tokens.")
    )
    return 0, None


def _select(turn: int, start: int, stop: int, text: str) -> None:
    if chat_clicks.selects_alternative():
        _select_alternative(start, stop, text)
        return
    links.to_url(turn=str(turn), span=f"{start}-{stop}")
    st.session_state["rather"] = ""


def _select_alternative(start: int, stop: int, text: str) -> None:
    st.session_state["rather"] = text.strip()
    st.session_state["clicks"] = chat_clicks.WORD


def _unselect() -> None:
    links.to_url(turn=None, span=None)
    st.session_state["rather"] = ""
