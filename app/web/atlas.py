"""Atlas: the map of all neurons, with those of a search or a prompt lit up, and concepts made of its points."""

from __future__ import annotations

from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import streamlit as st
from streamlit import runtime

from icebear.actmax.atlas.atlas import atlas
from icebear.actmax.atlas.atlas_page import asset
from icebear.actmax.atlas.saved_map import map_path, save_map, saved_drawing
from icebear.actmax.searching import search
from icebear.app.web.shared import header, links, markdown, question, served
from icebear.app.web.shared.all_visitors import server_state
from icebear.app.web.shared.background_job import Job
from icebear.db.search import NO_NEURON, absent_line, absent_words, nearest_by_chance
from icebear.db.store import Store, open_store
from icebear.db.terms import has_words
from icebear.records import Neuron

LIT = ("words", "neighbors of a neuron", "neurons of this prompt")
LIT_HITS = 200
"""The hits of a search that are lit up."""
NEIGHBORS = 20
"""The neighbors of a neuron that are lit up."""
PROMPT_NEURONS = 100
"""The neurons of a prompt that are lit up, those of the largest relevance."""
RANKED_NEURONS = 1000
"""Neurons at a token, of all sites, among which these are."""
SCRIPT = files("icebear.app.web").joinpath("atlas.js").read_text(encoding="utf-8")
picture = st.components.v2.component(
    "icebear_atlas", html=asset("map.html", app=True), css=asset("atlas.css"), js=str(asset("atlas.js")) + SCRIPT
)


def show() -> None:
    if header.no_store_yet("A map of neurons needs"):
        return
    with served.store() as opened:
        drawing = _drawing(str(opened.path), opened.changed(), _saved_at(opened))
        if drawing is None:
            _offer(opened)
            return
        left, right = st.columns(2, vertical_alignment="bottom")
        lit = links.bound(left.segmented_control, "Light up", "lit", LIT, default=LIT[0], required=True)
        sides = {LIT[0]: _of_words, LIT[1]: _of_neighbors, LIT[2]: _of_prompt}[lit](opened, right)
    _map(drawing, sides)
    _list(st.session_state.get("find") or "my concept")


def _saved_at(opened: Store) -> int:
    path = map_path(opened)
    return path.stat().st_mtime_ns if path.exists() else 0


@st.cache_resource(max_entries=2, show_spinner=False)
def _drawing(path: str, changed: int, saved_at: int) -> bytes | None:
    with open_store(path) as opened:
        return saved_drawing(opened)


def _offer(opened: Store) -> None:
    """Ask to draw the map, which an index with vectors of sentences has; the progress is on top of every view."""
    key = ("map", opened.path)
    job = server_state().builds.get(key)
    if job and job.is_alive():
        st.caption("The map is being drawn; the progress is at the top of the page, and the page then updates itself.")
        return
    if job and job.error:
        st.info(markdown.message(job.error))
    st.markdown(
        "The map is drawn once, and kept beside the index. Meanwhile you can use the app; the top of the page says how "
        "long it takes."
    )
    begin = partial(server_state().begin, key, "Drawing the map", partial(_draw, opened.path))
    st.button("Draw the map", type="primary", key="draw_map", on_click=begin)


def _draw(path: Path, job: Job) -> None:
    job.doing = "reading the index"
    with open_store(path) as opened:
        save_map(opened, atlas(opened, on_progress=lambda done, total: job.step(done, total, f"{done}%")))


def _map(drawing: bytes, sides: list[str] | None) -> None:
    """Draw the map with these sides lit up, or all."""
    # Not in the data of the component, which would be sent at each click.
    url = runtime.get_instance().media_file_mgr.add(drawing, "application/json", "atlas")
    key = f"map {url}"

    def card() -> None:
        if st.session_state[key].card:
            links.open_card(*st.session_state[key].card)

    def take() -> None:
        if st.session_state[key].taken:
            st.session_state["taken"] = st.session_state[key].taken

    picture(data={"url": url, "lit": sides}, key=key, on_card_change=card, on_taken_change=take)


def _of_words(opened: Store, slot: Any) -> list[str] | None:
    """Return the sides that a search finds by their sentences, the best first; None without a text."""
    text = links.bound(slot.text_input, "Search by words or meaning", "find", placeholder="for example music")
    if not text:
        return None
    if not has_words(text):
        return []
    if lacking := absent_words(opened, text):
        st.caption(markdown.plain(absent_line(lacking)))
    sides = _hits(str(opened.path), opened.changed(), text)
    if not sides:
        st.info(NO_NEURON)
    return sides


@st.cache_data(max_entries=50, show_spinner="Searching ...")
def _hits(path: str, changed: int, text: str) -> list[str]:
    with open_store(path) as opened:
        return [str(hit) for hit in search(opened, text, LIT_HITS) if hit.by == "sentences"]


def _of_neighbors(opened: Store, slot: Any) -> list[str]:
    """Return a side and those with the most similar sentences."""
    left, right = slot.columns([2, 1], vertical_alignment="bottom")
    neuron = Neuron.parse(links.bound(left.text_input, "Neuron", "near", value=served.a_neuron()))
    polarity = links.bound(right.segmented_control, "At", "near_polarity", ["+", "-"], default="+", required=True)
    hits, (median, _) = opened.similar(neuron, NEIGHBORS, "examples", polarity), nearest_by_chance(opened, "examples")
    if hits:
        st.caption(
            f"{neuron} {polarity} and the {len(hits)} with the most similar sentences, the nearest first (cosine "
            f"{hits[0].score:.2f} to {hits[-1].score:.2f}; the nearest of a random neuron: {median:.2f})."
        )
    return [f"{neuron} {polarity}", *map(str, hits)]


def _of_prompt(opened: Store, slot: Any) -> list[str]:
    """Return the most relevant sides of the question that the views share, of the sites of the map."""
    prompt, counterfactual, slots = question.prompts()
    if question.measuring().offered_to_shorten(prompt):
        return []
    known = question.answers(prompt, counterfactual)
    answers = question.target(slots[0], known), question.contrast(slots[1], known)
    request = question.Request(prompt, counterfactual, *answers, None)
    relevance = question.measuring().relevance_of(request)
    rows = relevance.top(RANKED_NEURONS, position="all" if counterfactual else "last")
    sites = opened.facts.get("sites")
    sides = list(dict.fromkeys(f"{row.neuron} {row.polarity}" for row in rows if row.neuron.site in sites))
    sides = sides[:PROMPT_NEURONS]
    st.caption(
        f"The {len(sides)} neurons of largest relevance for {markdown.target_label(relevance)}, at the polarity that "
        "they have in this prompt."
    )
    return sides


def _list(name: str) -> None:
    """Show the points of a lasso, and make a concept of them."""
    rows, count = st.session_state.get("taken") or ((), 0)
    if not rows:
        return
    with st.container(key="taken_list"):
        st.markdown(f"## The clearest {len(rows)} of {count:,} points" if count > len(rows) else f"## {count} points")
        st.caption("The clearest first. Tick some for a concept of these, or one to open its card.")
        ticked = question.module("shared.tables").ticked_neurons(rows, "taken_neurons")
        sides = [(str(Neuron.parse(neuron)), sign) for neuron, sign, *_ in ticked or rows]
        number = len(dict(sides))  # a neuron at both polarities is in a concept once
        with st.container(horizontal=True, vertical_alignment="bottom"):
            name = st.text_input("Name", name, key="taken_name", width=240)
            which = f"{'the' if ticked else 'all'} {number} {'neuron' if number == 1 else 'neurons'}"
            if st.button(f"Make a concept of {which}", type="primary", key="taken_concept"):
                question.module("steering.concepts").of_neurons(sides, name)
            if len(ticked) == 1:
                st.button(f"Open {sides[0][0]}", key="taken_card", on_click=links.open_card, args=sides[0])
    markdown.into_view("taken_list", rows)
