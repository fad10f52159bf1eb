"""The card of one neuron."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import streamlit as st
from markupsafe import Markup

from icebear.actmax import page
from icebear.actmax.card import SILENT, Card, describe
from icebear.actmax.index.annotation import annotate
from icebear.actmax.index.classes import class_name
from icebear.actmax.writes import FEW, Writes, writes
from icebear.app.web import ui
from icebear.app.web.header import no_store_yet
from icebear.concepts.lens import mean_lens
from icebear.concepts.models.model import Model
from icebear.concepts.projection import both_projections
from icebear.db.store import Store
from icebear.errors import IcebearError, ModelError
from icebear.records import Neuron

EXAMPLES = 8
STYLED = Markup('<style>{}</style><div class="card">{}</div>')


def show(name: str) -> None:
    polarity = ui.typed(
        st.segmented_control,
        "Sentences with high (+) or low (-) activation",
        "polarity",
        ["+", "-"],
        default="+",
        required=True,
    )
    neuron = Neuron.parse(name)
    if not ui.has_store():
        st.markdown(f"#### {neuron}")
        vocabulary = st.container()
        no_store_yet("Its sentences, statistics and similar neurons need")
        with vocabulary, suppress(ModelError):  # already on the page
            _vocabulary(neuron)
        return
    with ui.store() as opened:
        if neuron.site in opened.facts.get("sites") or neuron.site in SILENT["writes"]:
            _card(opened, neuron, polarity)
        else:
            st.markdown(f"#### {neuron}")
            st.caption(f"The index has no {neuron.site} neurons; `icebear index --site {neuron.site}` adds them.")
            _vocabulary(neuron)


def _vocabulary(neuron: Neuron) -> None:
    """Show the part of a card that needs no index."""
    if neuron.site not in SILENT["writes"]:
        _styled(page.projections_html(both_projections(ui.model(), neuron, EXAMPLES)))


def _card(opened: Store, neuron: Neuron, polarity: str) -> None:
    model = ui.loaded(opened)
    reading = model if model and mean_lens(model) else None  # else the lens of the neuron would take seconds
    card = describe(opened, neuron, reading, EXAMPLES, places=0)
    if card.left_out:
        size = f"{opened.vectors.size() / 1e9:.0f} GB"
        if st.button(f"Vocabulary and nearest neurons (reads {size})", icon=":material/hub:", key="whole_card"):
            card = describe(opened, neuron, reading, EXAMPLES, whole=True, places=0)
    st.markdown(f"#### {card.neuron} {ui.plain(card.title)}")
    st.caption(page.statistics_line(card))
    _styled(page.histogram_html(card.statistics.histogram))
    written = None if card.has_fixed_words else st.container()
    _styled(page.projections_html(card.projections))
    written = written or st.container()
    if card.by == "relevance":
        st.caption(ui.plain(page.RELMAX))
    st.markdown(f"#### {page.heading(card, polarity)}")
    _styled(page.meaning_html(card, polarity))
    st.caption(ui.plain(f"class: {class_name(card.kind[polarity])}"))
    sentences = st.empty()
    if card.examples[polarity]:
        _styled(page.examples_html(card.examples[polarity]), sentences)
    else:
        st.caption("There is none.")
    if card.by == "activation" and any(example.relevance is None for example in card.examples[polarity]):
        _annotating(opened, neuron)
    for by, hits in card.nearest.items():
        ui.neuron_pills(
            page.nearest_title(by, card.nearest_by_chance[by]),
            [(hit.neuron, hit.polarity) for hit in hits],
            f"nearest_{by}",
        )
    actions = st.container()
    if model:  # after all that is there at once
        with written:
            card = replace(card, writes=_writes(str(neuron), str(opened.path), opened.made_with(), opened, model))
        _styled(page.writes_html(card), written)
        places = card.writes[polarity].places if polarity in card.writes else ()
        _styled(page.examples_html(card.examples[polarity], places), sentences)
    with actions:
        _actions(card)


@st.cache_data(show_spinner="Measuring what it writes at its sentences ...", max_entries=1000)
def _writes(neuron: str, path: str, index: dict[str, Any], _opened: Store, _model: Model) -> dict[str, Writes]:
    return writes(_model, _opened, Neuron.parse(neuron), FEW)


def _styled(html: Markup, place: Any = st) -> None:
    if html:
        place.html(STYLED.format(Markup(page.STYLE), html))


def _annotating(opened: Store, neuron: Neuron) -> None:
    """Attribute the examples that are shown, on demand, and store the result."""
    if st.button("Highlight the cause", icon=":material/palette:", key="annotate"):
        loaded = ui.fitting(opened)
        with ui.progress("Attributing; finished sentences are kept") as step:
            annotate(loaded, opened, [neuron], EXAMPLES, on_progress=step)
        st.rerun()


def _actions(card: Card) -> None:
    left, middle, right = st.columns(3, vertical_alignment="bottom")
    key = f"label {card.neuron} {card.label or ''}"  # another key, and so another text, when somebody changes it

    def write() -> None:
        try:
            with ui.store() as opened:
                opened.labels.set_own(card.neuron, st.session_state[key])
        except IcebearError as error:  # in a callback; the next run shows it
            st.session_state["trouble"] = str(error)

    left.text_input("Your label", card.label or "", key=key, on_change=write)
    middle.button("Send to Steer", on_click=ui.to_steer, args=(card.neuron,), key="card_to_steer")
    with right:
        as_json = partial(json.dumps, card.to_dict(), ensure_ascii=False, indent=1)
        ui.downloads(str(card.neuron), {"html": card.to_html, "json": as_json})
