"""Beside a conversation about an image: the region of the picture behind the selected words of an answer."""

from __future__ import annotations

import streamlit as st

from icebear.app.web import chat_clicks
from icebear.app.web.shared import image_answers, words
from icebear.app.web.shared.explanations import conversation_answer
from icebear.models.text.chat import Chat

NOT_SHOWN = (
    "Bars by message, labels of neurons, and *Details* with neurons and circuits are of conversations without an image."
)


def show(chat: Chat, turn: int, span: tuple[int, int]) -> None:
    """Show the region, the shares and the tokens behind the words; of a region, the words it raised."""
    above = st.container()
    contrast = chat_clicks.choose_with_contrast()
    text, answer = conversation_answer(chat, turn)
    with above:
        image_answers.show((text, turn), answer, answer.token_range(span), is_wide=False, contrast=contrast)
        st.caption(NOT_SHOWN)


def colors(chat: Chat, turn: int, span: tuple[int, int]) -> list[words.Colored]:
    """Return no colors: the tokens stand beside the picture, in one sum with it."""
    return [()] * len(chat.messages)
