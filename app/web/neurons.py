"""Neurons: a search by words, or by an image, and the card of one neuron."""

from __future__ import annotations

import re
from typing import Any

import streamlit as st
from markupsafe import Markup

from icebear.actmax import page
from icebear.actmax.crops import crops_of
from icebear.actmax.describe import LARGE
from icebear.actmax.searching import headings, search, search_image
from icebear.actmax.shipped.index_choice import store_name
from icebear.app.web import neuron_card
from icebear.app.web.shared import jobs, links, markdown, served, uploads
from icebear.app.web.shared.header import no_store_yet
from icebear.db.search import LIKE_IMAGE, NO_NEURON, NO_NEURON_LIKE, absent_line, absent_words
from icebear.db.store import Store, open_store
from icebear.db.terms import has_words, padded, words_of
from icebear.errors import InputError
from icebear.models.image_examples import ENDINGS
from icebear.records import WRITERS, Example, Hit, Neuron

HITS = 50
"""The results of a search."""
PAGE_HITS = 10
"""The results that the page shows, and then adds on each click."""
IMAGES_SHOWN = 4
"""The images of each result of a search by an image."""
SENTENCES = 2
"""The sentences of each polarity of a result."""


def show() -> None:
    name = links.from_url("neuron")
    left, right = st.columns([3, 1], vertical_alignment="bottom")
    right.text_input("Go to a neuron", placeholder=served.a_neuron(), key="jump", on_change=_jump)
    results = st.empty() if name else st.container()  # empty: else old results would stay below a card that is measured
    if name:
        left.button(_back(), icon=":material/arrow_back:", key="back", on_click=_go_back)
        neuron_card.show(name)
        return
    st.session_state["card_from"] = None
    if served.has_images():
        with results:
            _search_by_image(left.file_uploader("Image", ENDINGS, key="image"))
        return
    text = links.bound(left.text_input, "Words", "text", value="water")
    with results:
        _search(text)


def _jump() -> None:
    name = st.session_state["jump"].strip()
    if name:
        links.open_card(name, "+")
    st.session_state["jump"] = ""


def _back() -> str:
    """Return the name of the view or search that a card came from."""
    if st.session_state.get("card_from"):
        return links.VIEWS[st.session_state["card_from"][0]].title
    searched = st.session_state.get("text")
    return f"Search: {markdown.plain(searched)}" if searched else "Search"


def _go_back() -> None:
    if st.session_state.get("card_from"):
        links.go(st.session_state["card_from"][0])
    else:
        links.to_url(neuron=None)


def _search(text: str) -> None:
    if no_store_yet("A search by words needs"):
        return
    with served.store() as opened, served.beside(opened) as other:
        for index in (opened, other) if other else (opened,):
            name = store_name(index) if other else ""
            if name:
                st.caption(markdown.plain(f"Index: {name}"))
            _search_in(index, text, name)


def _search_by_image(uploaded: Any) -> None:
    """Show the neurons whose strongest images are like an uploaded one."""
    if uploaded is None:
        st.caption(
            "Choose an image: the neurons whose strongest images are like it are shown, by the model's features."
        )
        return
    with served.store() as opened:
        model = jobs.model_of_index(opened)
        try:
            result = search_image(model, opened, uploads.read(uploaded), PAGE_HITS)
        except InputError as error:
            st.error(markdown.message(error))
            return
        similar = ", ".join(f"{markdown.plain(name)} ({cosine:.2f})" for name, cosine in result.images)
        st.caption(f"The most similar images of the index, by cosine: {similar}")
        st.markdown(f"## {LIKE_IMAGE}")
        if not result.hits:
            st.info(NO_NEURON_LIKE)
        for hit in result.hits:
            examples = opened.examples(hit.neuron, hit.polarity, IMAGES_SHOWN)
            crops = crops_of(model, opened, examples)
            with st.container(border=True, key=f"result {hit}"):
                st.button(f"**{hit}**", key=f"open {hit}", type="tertiary", on_click=links.open_card, args=_side(hit))
                st.caption(markdown.plain("; ".join(hit.why)))
                shown = page.images_html(examples, crops, hit.neuron.site == "head")
                st.html(neuron_card.STYLED.format(Markup(page.STYLE), shown))


def _side(hit: Hit) -> tuple[str, str]:
    return str(hit.neuron), hit.polarity


def _search_in(opened: Store, text: str, name: str) -> None:
    """Show the results of an index. name: of the index, if there are two."""
    lacking, hits = absent_words(opened, text), search(opened, text, HITS)
    if lacking:
        st.info(f"{markdown.plain(absent_line(lacking))} It holds {markdown.plain(opened.documents_phrase)}.")
    elif not hits:
        st.info(NO_NEURON)
    for by, heading in headings(opened).items():
        by_kind = [hit for hit in hits if hit.by == by]
        if by_kind:
            st.markdown(f"## {markdown.plain(heading)}")
            _show(opened, by_kind, f"{by} {text} {name}".rstrip(), name)


def _show(opened: Store, hits: list[Hit], search: str, index: str) -> None:
    """Show the first results as cards, and more of them on a click. index: its name, if there are two."""
    shown = st.session_state.get("shown", {}).get(search, PAGE_HITS)
    for hit in hits[:shown]:
        _result(opened, hit, index)
    if shown < len(hits):
        more = {"shown": {search: shown + PAGE_HITS}}
        st.button(
            "More", key=f"more {search}", icon=":material/expand_more:", on_click=st.session_state.update, args=(more,)
        )


def _result(opened: Store, hit: Hit, index: str) -> None:
    """Show a neuron as a card, the side of the hit first. index: its name, if there are two."""
    name, side = str(hit.neuron), hit.polarity
    label = opened.labels.shown(hit.neuron, side)
    with st.container(border=True, key=f"result {hit} {index}"):
        with st.container(horizontal=True, vertical_alignment="center", gap="small"):
            st.button(
                f"**{name}**" if hit.neuron.site == "head" else f"**{name}** at {neuron_card.SIDES[side]}",
                key=f"open {hit} {index}".rstrip(),
                type="tertiary",
                on_click=links.open_card,
                args=(name, side),
            )
            if label:
                st.markdown(f"**{markdown.plain(label)}**", width="content")
            st.caption(markdown.plain("; ".join(filter(None, (_reasons(hit), index)))), width="content")
        searched = st.session_state.get("text", "") if hit.by == "sentences" else ""
        st.html(_content(str(opened.path), opened.changed(), name, side, searched))


def _reasons(hit: Hit) -> str:
    """Return why a neuron was found, in words."""
    reasons = [re.sub(r"\bexamples\b", "sentences", reason) for reason in hit.why]
    return "; ".join(re.sub(r" \(-?[\d.]+\)$", "", reason) for reason in reasons)  # numbers of different things


@st.cache_data(max_entries=500, show_spinner=False)
def _content(path: str, changed: int, name: str, side: str, text: str = "") -> str:
    """Return words and sentences of a neuron, a side first, as HTML. Sentences with a word of the text come before
    stronger ones."""
    neuron, phrases = Neuron.parse(name), list(map(padded, words_of(text) if has_words(text) else ()))

    def strongest(polarity: str) -> list[Example]:
        rows = opened.examples(neuron, polarity, None if phrases else SENTENCES)
        return sorted(rows, key=lambda row: not any(map(padded(row.sentence.text).__contains__, phrases)))[:SENTENCES]

    with open_store(path) as opened:
        projection = None
        if neuron.site in WRITERS and opened.vectors.size() < LARGE:
            worded = neuron_card.words(opened, neuron, 15)
            projection = worded and worded.at(side)
        order = (side, "-" if side == "+" else "+")
        sides = [(f"Sentences with {neuron_card.SIDES[s]}", strongest(s)) for s in order]
        if neuron.site == "head":
            sides = [("Sentences in which it writes most", strongest("+"))]
    return str(neuron_card.STYLED.format(Markup(page.STYLE), page.result_html(projection, sides)))
