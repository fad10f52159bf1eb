"""Neurons: a search by words, by similarity to another neuron or by statistics; and the card of one neuron."""

from __future__ import annotations

import random
import re
from typing import Any

import pandas
import streamlit as st
from markupsafe import Markup

from icebear.actmax import page
from icebear.actmax.card import LARGE, SILENT
from icebear.actmax.searching import search
from icebear.app.web import neuron_card
from icebear.app.web.shared import links, markdown, served, tables
from icebear.app.web.shared.header import no_store_yet
from icebear.db.search import BY, NEAR, NO_NEURON, absence, absent, comparisons, nearest, nearest_by_chance
from icebear.db.store import Store
from icebear.records import Example, Hit, Neuron

HOW = ("words", "similar to a neuron", "statistics")
HITS = 50
"""The results of a search."""
PAGE_HITS = 10
"""The results that the page shows, and then adds on each click."""
SENTENCES = 2
"""The sentences of each polarity of a result."""
SIMILAR = 3
"""The similar neurons of a result."""


def show() -> None:
    name = links.from_url("neuron")
    left, right = st.columns([3, 1], vertical_alignment="bottom")
    right.text_input("Go to a neuron", placeholder=served.a_neuron(), key="jump", on_change=_jump)
    results = st.empty() if name else st.container()  # empty: else old results would stay below a card that is measured
    if name:
        left.button(_back(), icon=":material/arrow_back:", key="back", on_click=_go_back)
        other = _shelf(Neuron.parse(name))
        if other:
            _beside(Neuron.parse(name), Neuron.parse(other))
        else:
            neuron_card.show(name)
        return
    st.session_state["card_from"] = None
    with left:
        how = links.bound(st.segmented_control, "Search by", "how", HOW, default=HOW[0], required=True)
    with results:
        {"words": _words, "similar to a neuron": _similar, "statistics": _statistics}[how]()


def _jump() -> None:
    name = st.session_state["jump"].strip()
    if name:
        links.open_card(name, "+")
    st.session_state["jump"] = ""


def _back() -> str:
    """Return the name of the view or search that a card came from."""
    if st.session_state.get("card_from"):
        return links.VIEWS[st.session_state["card_from"][0]].title
    by, words = st.session_state.get("how"), st.session_state.get("text")
    return f"Search: {markdown.plain(words)}" if words and by in (None, HOW[0]) else "Search"


def _go_back() -> None:
    if st.session_state.get("card_from"):
        links.go(st.session_state["card_from"][0])
    else:
        links.to_url(neuron=None)


def _shelf(neuron: Neuron) -> str | None:
    """Draw the ways from a card to others, and the pinned neurons; return the neuron to show beside this one."""
    pins, name = st.session_state.setdefault("pins", []), str(neuron)

    def pin() -> None:
        st.session_state["pins"] = [pinned for pinned in pins if pinned != name] + [name] * (name not in pins)

    with st.container(horizontal=True, vertical_alignment="bottom"):
        if served.has_store(neuron.site):
            with served.store(neuron.site) as opened:
                layers, width = opened.neurons.sizes()[neuron.site]
            layer, index = divmod((neuron.layer * width + neuron.index + 1) % (layers * width), width)
            drawn = random.randrange(layers), neuron.site, random.randrange(width)
            for label, parts in (("Next", (layer, neuron.site, index)), ("Random", drawn)):
                st.button(f"{label} neuron", key=label, on_click=_open, args=(str(Neuron(*parts)),))
        st.button("Unpin" if name in pins else "Pin", icon=":material/keep:", key="pin", on_click=pin)
        others = [pinned for pinned in pins if pinned != name]
        hint: dict[str, Any] = {"placeholder": "a pinned neuron, or its name", "accept_new_options": True, "width": 260}
        other = links.bound(st.selectbox, "Compare with", "beside", others, index=None, **hint)
    if others:
        tables.neuron_pills("Pinned", [(Neuron.parse(pinned), "") for pinned in others], "pinned")
    return other


def _open(name: str) -> None:
    st.session_state["beside"] = None
    links.open_card(name)


def _beside(*neurons: Neuron) -> None:
    """Show two neurons side by side: words, sentences of both sides, statistics."""
    for column, neuron in zip(st.columns(2), neurons, strict=True):
        with column, served.store(neuron.site) as opened:
            neuron_card.check(opened, neuron)
            statistics, name = opened.neurons.statistics(neuron), str(neuron)
            st.button(f"**{name}**", key=f"open {name}", type="tertiary", on_click=_open, args=(name,))
            html, _ = _content(str(opened.path), opened.changed(), name, "+")
            st.html(html)
            neuron_card.histogram(statistics)


def _words() -> None:
    text = links.bound(st.text_input, "Words", "text", value="water")
    if no_store_yet("A search by words needs"):
        return
    with served.store() as opened:
        lacking, hits = absent(opened, text), search(opened, text, HITS)
        if lacking:
            st.info(f"{markdown.plain(absence(lacking))} It holds {markdown.plain(opened.sample)}.")
        elif not hits:
            st.info(NO_NEURON)
        for by, heading in BY.items():
            by_kind = [hit for hit in hits if hit.by == by]
            if by_kind:
                st.markdown(f"## {heading}")
                _show(opened, by_kind, f"{by} {text}")


def _similar() -> None:
    left, middle, right = st.columns(3)
    name = links.bound(left.text_input, "Neuron", "near", value=served.a_neuron())
    by = links.bound(middle.selectbox, "By output (writes), input (reads) or sentences (examples)", "by", list(NEAR))
    polarity = links.bound(right.segmented_control, "At", "near_polarity", ["+", "-"], default="+", required=True)
    if no_store_yet("Similar neurons need"):
        return
    neuron = Neuron.parse(name)
    with served.store(neuron.site) as opened:
        neuron_card.check(opened, neuron)
        if by not in comparisons(opened):
            st.caption("The index that comes with icebear does not compare sentences; a larger index does.")
            return
        median, largest = nearest_by_chance(opened, by)
        st.caption(
            f"In brackets: the cosine. The most similar to a random neuron has {median:.2f}, at most {largest:.2f}."
        )
        hits = nearest(opened, neuron, HITS, by, polarity)
        if not hits:
            st.caption("No neuron is more similar than that.")
        _show(opened, hits, f"{by} {neuron} {polarity}")


def _show(opened: Store, hits: list[Hit], search: str) -> None:
    """Show the first results as cards, and more of them on a click."""
    shown = st.session_state.get("shown", {}).get(search, PAGE_HITS)
    for hit in hits[:shown]:
        _result(opened, hit)
    if shown < len(hits):
        more = {"shown": {search: shown + PAGE_HITS}}
        st.button(
            "More", key=f"more {search}", icon=":material/expand_more:", on_click=st.session_state.update, args=(more,)
        )


def _result(opened: Store, hit: Hit) -> None:
    """Show a neuron as a card, the side of the hit first."""
    name, side = str(hit.neuron), hit.polarity or "+"
    label = opened.labels.name(hit.neuron, side)
    with st.container(border=True, key=f"result {hit}"):
        with st.container(horizontal=True, vertical_alignment="center", gap="small"):
            st.button(
                f"**{name}**"
                if hit.neuron.site == "head" or not hit.polarity
                else f"**{name}** at {neuron_card.SIDES[side]}",
                key=f"open {hit}",
                type="tertiary",
                on_click=links.open_card,
                args=(name, hit.polarity),
            )
            if label:
                st.markdown(f"**{markdown.plain(label)}**", width="content")
            st.caption(markdown.plain(_reasons(hit)), width="content")
        words = st.session_state.get("text", "") if hit.by == "sentences" else ""
        html, similar = _content(str(opened.path), opened.changed(), name, side, words)
        st.html(html)
        if similar:
            tables.neuron_pills(
                "Similar output (+ at positive, - at negative activation)",
                [(Neuron.parse(name), sign) for name, sign in similar],
                f"similar {hit}",
            )


def _reasons(hit: Hit) -> str:
    """Return why a neuron was found, in words."""
    reasons = [re.sub(r"\bexamples\b", "sentences", reason) for reason in hit.why]
    if len(reasons) > 1 or not reasons[0].startswith("similar"):
        reasons = [re.sub(r" \(-?[\d.]+\)$", "", reason) for reason in reasons]  # cosines of different things
    return "; ".join(reasons)


@st.cache_data(max_entries=500, show_spinner=False)
def _content(path: str, changed: int, name: str, side: str, text: str = "") -> tuple[str, list[tuple[str, str]]]:
    """Return words and sentences of a neuron, a side first, as HTML; and similar neurons with their polarity. Sentences
    with a word of the text come before stronger ones."""
    neuron, words = Neuron.parse(name), {*re.findall(r"\w+", text.lower())}

    def strongest(polarity: str) -> list[Example]:
        rows = opened.examples(neuron, polarity, None if words else SENTENCES)
        return sorted(rows, key=lambda row: words.isdisjoint(re.findall(r"\w+", row.sentence.text.lower())))[:SENTENCES]

    with served.store(neuron.site) as opened:
        projection, similar = None, []
        if neuron.site not in SILENT["writes"] and opened.vectors.size() < LARGE:
            worded = neuron_card.words(opened, neuron, 15)
            projection = worded and worded.at(side)
            hits = nearest(opened, neuron, SIMILAR, "writes", side)
            similar = [(str(hit.neuron), hit.polarity) for hit in hits]
        order = (side, "-" if side == "+" else "+")
        sides = [(f"Sentences with {neuron_card.SIDES[s]}", strongest(s)) for s in order]
        if neuron.site == "head":
            sides = [("Sentences in which it writes most", strongest("+"))]
    return str(neuron_card.STYLED.format(Markup(page.STYLE), page.result_html(projection, sides))), similar


@st.cache_data(max_entries=2, show_spinner="Reading the statistics ...")
def _table(path: str, changed: int) -> pandas.DataFrame:
    with served.store() as opened:
        table = opened.neurons.table().rename(columns={"name": "neuron"})
        table["sign"] = "" if opened.by == "relevance" else (table["max"] > -table["min"]).map({True: "+", False: "-"})
        return table


def _statistics() -> None:
    if no_store_yet("The neurons' statistics need"):
        return
    with served.store() as opened:
        changed, by = opened.changed(), opened.by
    table = _table(str(served.store_path()), changed)
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
        st.caption(markdown.plain(page.RELMAX))
    number = st.column_config.NumberColumn(format="%.3f")
    formats = dict.fromkeys(("mean", "std", "min", "max", "positive"), number)
    formats["sharpness"] = st.column_config.NumberColumn("peak (std. dev.)", format="%.3f")
    shown = ("neuron", "layer", "site", "sharpness", "mean", "std", "min", "max", "positive", "label")
    tables.neuron_table(rows, "statistics", sorts=True, column_order=shown, column_config=formats)
