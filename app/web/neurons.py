"""Neurons: a search by words, by similarity to another neuron or by statistics; and the card of one neuron."""

from __future__ import annotations

from typing import Any

import pandas
import streamlit as st

from icebear.actmax.page import RELMAX
from icebear.app.web import card, ui
from icebear.app.web.header import no_store_yet
from icebear.db.search import NEAR, nearest_by_chance
from icebear.records import Hit, Neuron

HOW = ("words", "similar to a neuron", "statistics")


def show() -> None:
    if ui.from_url("neuron"):
        st.button("Search", icon=":material/arrow_back:", key="back", on_click=ui.to_url, kwargs={"neuron": None})
        card.show(st.session_state["neuron"])
        return
    how = ui.typed(st.segmented_control, "Search by", "how", HOW, default=HOW[0], required=True)
    {"words": _words, "similar to a neuron": _similar, "statistics": _statistics}[how]()


def _words() -> None:
    text = ui.typed(st.text_input, "Words", "text", value="water")
    if no_store_yet("Neurons for these words need"):
        return
    with ui.store() as opened:
        _show(opened.search(text, 50))


def _similar() -> None:
    left, middle, right = st.columns(3)
    name = ui.typed(left.text_input, "Neuron", "near", value=ui.a_neuron())
    by = ui.typed(middle.selectbox, "By output (writes), input (reads) or example sentences", "by", list(NEAR))
    polarity = ui.typed(right.segmented_control, "At", "near_polarity", ["+", "-"], default="+", required=True)
    if no_store_yet("Similar neurons need"):
        return
    with ui.store() as opened:
        st.caption("The most similar to random neurons: {:.2f}, at most {:.2f}.".format(*nearest_by_chance(opened, by)))
        _show(opened.similar(Neuron.parse(name), 50, by, polarity))


def _show(hits: list[Hit]) -> None:
    if not hits:
        st.info("No neuron was found; try other words.")
        return
    rows = [
        {"neuron": str(hit.neuron), "sign": hit.polarity, "score": hit.score, "why": "; ".join(hit.why)} for hit in hits
    ]
    widths = {"neuron": 110, "sign": 45, "why": 380, "label": 300}
    columns = {name: st.column_config.TextColumn(width=width) for name, width in widths.items()}
    score = {"score": st.column_config.NumberColumn(format="%.4f", width=70)}
    ui.neuron_table(pandas.DataFrame(rows), "hits", labels=True, column_config=columns | score)


@st.cache_data(max_entries=2, show_spinner="Reading the statistics ...")
def _table(path: str, changed: int) -> pandas.DataFrame:
    with ui.store() as opened:
        table = opened.neurons.table().rename(columns={"name": "neuron"})
        table["sign"] = "" if opened.by == "relevance" else (table["max"] > -table["min"]).map({True: "+", False: "-"})
        return table


def _statistics() -> None:
    if no_store_yet("The neurons' statistics need"):
        return
    with ui.store() as opened:
        changed, by = opened.changed(), opened.by
    table = _table(str(ui.store_path()), changed)
    left, middle, right = st.columns(3)
    stays: dict[str, Any] = {"persist_state": "session"}
    sites = left.multiselect("Components", sorted(set(table["site"])), key="sites", placeholder="all", **stays)
    classes = sorted(set(table["class_plus"]))
    kinds = middle.multiselect("Class, either sign", classes, key="kinds", placeholder="all", **stays)
    sharpness = right.slider(
        "Peak at least (standard deviations from the mean)", 0.0, 100.0, 0.0, key="sharpness", **stays
    )
    last = max(1, int(table["layer"].max()))
    low, high = st.slider("Layers", 0, last, (0, last), key="search_layers", **stays)
    chosen = table["layer"].between(low, high) & (table["sharpness"] >= sharpness)
    if sites:
        chosen &= table["site"].isin(sites)
    if kinds:
        chosen &= table["class_plus"].isin(kinds) | table["class_minus"].isin(kinds)
    rows = table[chosen].sort_values("sharpness", ascending=False)
    st.caption(f"{len(rows):,} of {len(table):,} neurons; click a column's header to sort by it.")
    if by == "relevance":
        st.caption(ui.plain(RELMAX))
    number = st.column_config.NumberColumn(format="%.3f")
    formats = dict.fromkeys(("mean", "std", "min", "max", "positive"), number)
    formats["sharpness"] = st.column_config.NumberColumn("peak (std. dev.)", format="%.3f")
    shown = ("neuron", "layer", "site", "sharpness", "mean", "std", "min", "max", "positive", "label")
    ui.neuron_table(rows, "statistics", sorts=True, height=420, column_order=shown, column_config=formats)
