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
NOTHING = "nothing"
ANOTHER_IMAGE = "another image"
ANOTHER_PROMPT = "another prompt"
IMAGES = {"blurred": "blur", "gray": "grey"}
"""A choice -> the counterfactual image of `attribute`."""
NAMES = {
    **{"blurred": "the image blurred", "gray": "a gray image"},
    **{ANOTHER_IMAGE: "another image", ANOTHER_PROMPT: "another prompt about the same image"},
}
"""A choice -> what the answer is compared with."""


@dataclass(frozen=True)
class ImageRequest:
    """What is answered about an image."""

    digest: str
    """The SHA-256 of the file."""
    prompt: str
    is_message: bool
    """Whether the prompt is a message of a chat."""

    def prompt_about(self, picture: Any) -> Prompt:
        return replace(Prompt.of(self._asked(markdown.read_prompt(self.prompt))), image=picture)

    def counterfactual(self, text: str) -> Prompt:
        """Return another prompt about the same image; in a chat it replaces the last message of the user."""
        read = markdown.read_prompt(self.prompt)
        return Prompt.of(read.asking(text) if isinstance(read, Chat) else self._asked(text))

    def _asked(self, prompt: str | Chat) -> str | Chat:
        is_message = self.is_message and isinstance(prompt, str)
        return Chat([{"role": "user", "content": prompt}]) if is_message else prompt


@dataclass(frozen=True)
class Comparison:
    """What an answer about an image is compared with: another image, or another prompt about the same image."""

    kind: str
    """Of `NAMES`."""
    text: str = ""
    """The other prompt."""
    uploaded: Any = None
    """The file of the other image."""

    @property
    def name(self) -> str:
        return NAMES[self.kind]

    @property
    def is_ready(self) -> bool:
        """Whether what it needs is there."""
        return bool({ANOTHER_PROMPT: self.text, ANOTHER_IMAGE: self.uploaded}.get(self.kind, True))

    @property
    def key(self) -> tuple[str, str, str]:
        return self.kind, self.text, uploads.digest(self.uploaded) if self.uploaded else ""

    def options(self, request: ImageRequest) -> dict[str, Any]:
        """Return the counterfactual as an option of `attribute`. Raises `InputError`."""
        if self.kind == ANOTHER_PROMPT:
            return {"counterfactual": request.counterfactual(self.text)}
        image = uploads.read(self.uploaded) if self.kind == ANOTHER_IMAGE else IMAGES[self.kind]
        return {"counterfactual_image": image}


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
    comparison, contrast = _comparison()
    answer = jobs.wait_for_cached(_answering, served.model_name(), request, picture, stops=True)
    if not answer.ids:
        st.info("The model ended its answer before its first word; write another prompt.")
        return
    word = image_answers.chosen("image_word", request) or first_content_word(answer.token_strings, prompt)
    span = answer.token_range(word)
    st.caption("The answer. Click a word to see its region of the picture.")
    words.draw(words.words_of(answer.token_strings), span, "answer_words", partial(_choose_word, request))
    if comparison is None:
        image_answers.show(request, answer, span, is_wide=True, contrast=contrast)
    elif comparison.is_ready:
        st.caption(f"Compared with {comparison.name}: red and blue are what differs, and sum to the difference.")
        about = (request, comparison.key)
        image_answers.show(about, answer, span, is_wide=True, contrast=contrast, compared=comparison.options(request))


def _comparison() -> tuple[Comparison | None, str | None]:
    """Draw what the answer is compared with, and the field for an alternative to the word. Return both, None for
    nothing."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        kind = links.bound(st.selectbox, "Compared with", "compared", [NOTHING, *NAMES], width=200)
        contrast = question.contrast_field("rather_than")
    if kind == ANOTHER_PROMPT:
        hint = "Write a prompt with the same number of tokens"
        text = links.bound(st.text_input, "The other prompt", "about_other", placeholder=hint)
        return Comparison(kind, text=text.strip()), contrast
    if kind == ANOTHER_IMAGE:
        return Comparison(kind, uploaded=st.file_uploader("The other image", ENDINGS, key="other_image")), contrast
    return Comparison(kind) if kind != NOTHING else None, contrast


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
