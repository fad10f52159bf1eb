"""An answer about an image: the region of the picture behind a word of it, and the words that a region raised."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import streamlit as st

from icebear.app.web.shared import explanations, image_regions, jobs, markdown, pictures, served
from icebear.app.web.shared.background_job import Job
from icebear.concepts.answers.image_words import word_maps
from icebear.concepts.nodes.image_shares import image_shares
from icebear.concepts.results.result import Relevance
from icebear.models.text.answer import Answer


def show(
    about: Hashable,
    answer: Answer,
    span: tuple[int, int],
    is_wide: bool,
    contrast: str | None = None,
    compared: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Show the picture with the relevance for a word, the shares, and the tokens; of a region, the words it raised.

    about: what was answered, and what it is compared with. is_wide: whether there is room for two columns. compared:
    the counterfactual as an option of `attribute`.
    """
    relevance = explanations.explained_about_image(about, answer, span, contrast=contrast, **compared)
    image, region = relevance.image, chosen("image_region", about)
    assert image is not None
    st.markdown(f"## Why {markdown.target_label(relevance)}?")
    left, right = st.columns(2) if is_wide else (st.container(), st.container())
    with left:
        if "counterfactual" in compared:
            st.caption("Both prompts are about this image, so the difference is in the tokens of the prompt alone.")
        else:
            image_regions.draw(image, region, partial(_choose_region, about))
            st.caption("Click a region to see the words it raised.")
            pictures.downloads("region", {"png": image.png})
        raised = st.container()
    with right:
        st.html(markdown.tokens_and_answer(relevance.text_heatmap(), relevance.target_text))
        st.caption("Red supports the word, blue opposes it; gray: the template; dotted: attention sinks.")
        shares = jobs.wait_for_cached(_sharing, served.model_name(), (about, span, contrast), relevance, stops=True)
        if shares:  # of no comparison
            image_regions.draw_shares(shares)
        st.caption(markdown.plain(f"Method check. {relevance.conservation_text()}."))
    if region and "counterfactual" not in compared:
        with raised:
            maps = jobs.wait_for_cached(_mapping, served.model_name(), about, answer, compared, stops=True)
            image_regions.draw_words(maps, region)


# --- what is selected: a part of the state belongs to the answer for which it was chosen -------------------------


def chosen(key: str, about: Hashable) -> Any:
    """Return what was chosen for an answer, None if nothing was."""
    chosen_for, value = st.session_state.get(key) or (None, None)
    return value if chosen_for == about else None


def _choose_region(about: Hashable, name: str) -> None:
    """Open the words of a region, or close them."""
    region = (about, name)
    st.session_state["image_region"] = None if st.session_state.get("image_region") == region else region


# --- measured ----------------------------------------------------------------------------------------------------


@st.cache_resource(max_entries=64, show_spinner=False)
def _sharing(name: str, key: Hashable, _relevance: Relevance) -> Job:
    """Return the job that measures the shares of image, text and template, also with the image blurred."""
    model = jobs.model()
    return Job("Measuring with the image blurred", lambda job: image_shares(model, _relevance))


@st.cache_resource(max_entries=16, show_spinner=False)
def _mapping(name: str, about: Hashable, _answer: Answer, _compared: Mapping[str, Any]) -> Job:
    """Return the job that makes the map of each word of an answer."""
    model = jobs.model()
    return Job("Making the map of each word", lambda job: word_maps(model, _answer, job.step, **_compared))
