"""Why this word about an image? The words of the answer, and the region of the picture behind each of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any

import streamlit as st

from icebear.app.web.shared import explanations, jobs, links, markdown, pictures, question, served, words
from icebear.app.web.shared.background_job import Job
from icebear.app.web.why import image_regions
from icebear.concepts.answers.content_words import first_content_word
from icebear.concepts.answers.image_words import word_maps
from icebear.concepts.nodes.image_shares import image_shares
from icebear.concepts.results.result import Relevance
from icebear.errors import InputError
from icebear.models.image_examples import ENDINGS
from icebear.models.text.answer import Answer
from icebear.models.text.chat import Chat
from icebear.models.text.images import read_picture
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
        picture = read_picture(uploaded)
    except InputError:
        st.error("This file cannot be read as an image; choose another one.")
        return
    request = ImageRequest(sha256(uploaded.getvalue()).hexdigest(), prompt, is_message)
    answer = jobs.wait_for_cached(_answering, served.model_name(), request, picture, stops=True)
    if not answer.ids:
        st.info("The model ended its answer before its first word; write another prompt.")
        return
    span = answer.token_range(_chosen("image_word", request) or first_content_word(answer.token_strings, prompt))
    st.caption("The answer. Click a word to see its region of the picture; click a region to see the words it raised.")
    words.draw(words.words_of(answer.token_strings), span, "answer_words", partial(_choose_word, request))
    _word(request, answer, span)


def _asked_as_message() -> bool:
    """Draw the choice of a model of chats: whether the prompt is a message."""
    has_template = bool(getattr(jobs.model().tokenizer, "chat_template", None))
    return has_template and links.bound(st.toggle, "Ask it as a chat message", "as_message", value=True)


@st.cache_resource(max_entries=64, show_spinner=False)
def _answering(name: str, request: ImageRequest, _picture: Any) -> Job:
    """Return the job that answers, or has answered, for all visitors."""
    model = jobs.model()
    return Job("Answering", lambda job: model.answer(request.prompt_about(_picture), MOST_TOKENS))


# --- what is selected: a part of the state belongs to the request for which it was chosen ------------------------


def _chosen(key: str, request: ImageRequest) -> Any:
    chosen_for, value = st.session_state.get(key) or (None, None)
    return value if chosen_for == request else None


def _choose_word(request: ImageRequest, start: int, stop: int, text: str) -> None:
    st.session_state["image_word"] = (request, (start, stop))


def _choose_region(request: ImageRequest, name: str) -> None:
    """Open the words of a region, or close them."""
    chosen = (request, name)
    st.session_state["image_region"] = None if st.session_state.get("image_region") == chosen else chosen


# --- the word, and the region ------------------------------------------------------------------------------------


def _word(request: ImageRequest, answer: Answer, span: tuple[int, int]) -> None:
    """Show the picture with the relevance for a word, the shares, and the tokens; of a region, the words it raised."""
    relevance = explanations.explained_about_image(request, answer, span)
    image, region = relevance.image, _chosen("image_region", request)
    assert image is not None
    st.markdown(f"## Why {markdown.target_label(relevance)}?")
    left, right = st.columns(2)
    with left:
        image_regions.draw(image, region, partial(_choose_region, request))
        pictures.downloads("region", {"png": image.png})
    with right:
        st.html(markdown.ANSWER.format(relevance.text_heatmap(), relevance.target_text))
        st.caption("Red supports the word, blue opposes it; gray: the template; dotted: attention sinks.")
        shares = jobs.wait_for_cached(_sharing, served.model_name(), request, span, relevance, stops=True)
        image_regions.draw_shares(shares)
        st.caption(markdown.plain(f"Method check. {relevance.conservation_text()}."))
    if region:
        maps = jobs.wait_for_cached(_mapping, served.model_name(), request, answer, stops=True)
        image_regions.draw_words(maps, region)


@st.cache_resource(max_entries=64, show_spinner=False)
def _sharing(name: str, request: ImageRequest, span: tuple[int, int], _relevance: Relevance) -> Job:
    """Return the job that measures the shares of image, text and template, also with the image blurred."""
    model = jobs.model()
    return Job("Measuring with the image blurred", lambda job: image_shares(model, _relevance))


@st.cache_resource(max_entries=16, show_spinner=False)
def _mapping(name: str, request: ImageRequest, _answer: Answer) -> Job:
    """Return the job that makes the map of each word of an answer."""
    model = jobs.model()
    return Job("Making the map of each word", lambda job: word_maps(model, _answer, job.step))
