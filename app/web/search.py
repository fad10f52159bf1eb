"""Which neurons: by words, by likeness, by their statistics."""

from __future__ import annotations

import pandas
import streamlit as st

from icebear.actmax.page import RELMAX
from icebear.app.web.header import no_store_yet
from icebear.app.web.state import a_neuron, downloads, known, neuron_table, plain, store, store_path, typed
from icebear.db.search import NEAR, nearest_by_chance
from icebear.records import Hit, Neuron

HOW = ("words", "like a neuron", "statistics")


def show() -> None:
    how = typed(st.segmented_control, "Search by", "how", HOW, default=HOW[0], required=True)
    {"words": _words, "like a neuron": _like, "statistics": _statistics}[how]()


def _words() -> None:
    text = typed(st.text_input, "Words", "text", value="water")
    if no_store_yet("The neurons of these words come"):
        return
    with store() as opened:
        _show(opened.search(text, 50))


def _like() -> None:
    left, middle, right = st.columns(3)
    name = typed(left.text_input, "Neuron", "neuron", value=a_neuron())
    by = typed(middle.selectbox, "By what it writes, reads, or its examples", "by", list(NEAR))
    polarity = typed(right.segmented_control, "At", "polarity", ["+", "-"], default="+", required=True)
    if no_store_yet("The neurons most like this one come"):
        return
    with store() as opened:
        st.caption("The nearest to random neurons: {:.2f}, at most {:.2f}.".format(*nearest_by_chance(opened, by)))
        _show(opened.similar(Neuron.parse(name), 50, by, polarity))


def _show(hits: list[Hit]) -> None:
    if not hits:
        st.info("No neuron was found; try other words.")
        return
    table = pandas.DataFrame(
        {
            "neuron": [str(hit.neuron) for hit in hits],
            "sign": [hit.polarity for hit in hits],
            "score": [hit.score for hit in hits],
            "why": ["; ".join(hit.why) for hit in hits],
            **known([(hit.neuron, hit.polarity) for hit in hits]),
        }
    )
    st.caption("Click a row for the neuron's card.")
    score = st.column_config.NumberColumn(format="%.4f", width=70)
    widths = {"neuron": 110, "sign": 45, "why": 380, "means": 300}
    columns = {name: st.column_config.TextColumn(width=width) for name, width in widths.items()}
    neuron_table(
        table, "hits", lambda row: (hits[row].neuron, hits[row].polarity), column_config={**columns, "score": score}
    )
    downloads("search", {"csv": lambda: table.to_csv(index=False), "json": lambda: table.to_json(orient="records")})


@st.cache_data(max_entries=2, show_spinner="Reading the statistics ...")
def _table(path: str, changed: int) -> pandas.DataFrame:
    with store() as opened:
        return opened.neurons.table()


def _statistics() -> None:
    if no_store_yet("Every neuron's statistics come"):
        return
    with store() as opened:
        changed, by = opened.changed(), opened.by
    table = _table(str(store_path()), changed)
    left, middle, right = st.columns(3)
    sites = left.multiselect(
        "Sites", sorted(set(table["site"])), key="sites", persist_state="session", placeholder="all"
    )
    kinds = middle.multiselect(
        "Class, either sign", sorted(set(table["class_plus"])), key="kinds", persist_state="session", placeholder="all"
    )
    sharpness = right.slider(
        "Sharpness at least",
        0.0,
        100.0,
        0.0,
        key="sharpness",
        persist_state="session",
        help="How many standard deviations its extreme is from its mean",
    )
    last = int(table["layer"].max())
    low, high = st.slider("Layers", 0, max(last, 1), (0, max(last, 1)), key="search_layers", persist_state="session")
    chosen = table["layer"].between(low, high) & (table["sharpness"] >= sharpness)
    if sites:
        chosen &= table["site"].isin(sites)
    if kinds:
        chosen &= table["class_plus"].isin(kinds) | table["class_minus"].isin(kinds)
    found = table[chosen].sort_values("sharpness", ascending=False)
    st.caption(
        f"{len(found):,} of {len(table):,} neurons; tick a row for its card, click a column's head to sort by it."
    )
    if by == "relevance":
        st.caption(plain(RELMAX))

    def opens(row: int) -> tuple[str, str]:
        name, high, low = found[["name", "max", "min"]].iloc[row]
        return name, "" if by == "relevance" else "+" if high > -low else "-"

    number = st.column_config.NumberColumn(format="%.3f")
    formats = dict.fromkeys(("mean", "std", "min", "max", "positive", "sharpness"), number)
    neuron_table(found, "statistics", opens, sorts=True, height=420, column_config=formats)
    downloads("neurons", {"csv": lambda: found.to_csv(index=False)})
