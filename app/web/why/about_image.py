"""Why this word about an image? The words of the answer, and the region of the picture behind each of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import streamlit as st

from icebear.app.web.shared import image_answers, jobs, links, markdown, question, served, uploads, words
from icebear.app.web.shared.background_job import Job
from icebear.concepts.answers.content_words import first_content_word
from icebear.errors import InputError
from icebear.models.image_examples import ENDINGS
from icebear.models.text.chat import Chat
from icebear.models.text.prompts import Prompt

MOST_TOKENS = 24
"""The largest number of tokens of an answer."""


@dataclass(frozen=True)
class ImageRequest:
    """What is answered about an image."""

    digest: str
    """The SHA-256 of the file."""
    prompt: str
    is_message: bool
    """Whether the prompt is a message of a chat."""

    def prompt_about(self, picture: Any) -> Prompt:
        read = markdown.read_prompt(self.prompt)
        message = self.is_message and not isinstance(read, Chat)
        return replace(Prompt.of(Chat([{"role": "user", "content": read}]) if message else read), image=picture)


def field() -> Any:
    """Draw the field for an image. Return the file in it, None if it is empty."""
    about = "The prompt is then about this image. It stays on this page: a link does not have it."
    return st.file_uploader("Image (optional)", ENDINGS, key="about_image", help=about)


def show(uploaded: Any) -> None:
    """Show the answer about an uploaded image, and the region and the tokens behind the word that is selected."""
    prompt, is_message = question.prompt_field(st), _asked_as_message()
    try:
        picture = uploads.read(uploaded)
    except InputError as error:
        st.error(str(error))
        return
    request = ImageRequest(uploads.digest(uploaded), prompt, is_message)
    answer = jobs.wait_for_cached(_answering, served.model_name(), request, picture, stops=True)
    if not answer.ids:
        st.info("The model ended its answer before its first word; write another prompt.")
        return
    word = image_answers.chosen("image_word", request) or first_content_word(answer.token_strings, prompt)
    span = answer.token_range(word)
    st.caption(f"The answer. {image_answers.HINT}")
    words.draw(words.words_of(answer.token_strings), span, "answer_words", partial(_choose_word, request))
    image_answers.show(request, answer, span, is_wide=True)


def _asked_as_message() -> bool:
    """Draw the choice of a model of chats: whether the prompt is a message."""
    has_template = bool(getattr(jobs.model().tokenizer, "chat_template", None))
    return has_template and links.bound(st.toggle, "Ask it as a chat message", "as_message", value=True)


@st.cache_resource(max_entries=64, show_spinner=False)
def _answering(name: str, request: ImageRequest, _picture: Any) -> Job:
    """Return the job that answers, or has answered, for all visitors."""
    model = jobs.model()
    return Job("Answering", lambda job: model.answer(request.prompt_about(_picture), MOST_TOKENS))


def _choose_word(request: ImageRequest, start: int, stop: int, text: str) -> None:
    st.session_state["image_word"] = (request, (start, stop))
