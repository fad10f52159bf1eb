"""Two prompts or two targets: the neurons they share and those that differ."""

from __future__ import annotations

import pandas
import streamlit as st

from icebear.app.cli.verbs.demo import PROMPT
from icebear.app.web import charts
from icebear.app.web.explain import explained
from icebear.app.web.state import downloads, heat, model, neuron_table, plain, token_label, typed
from icebear.concepts.attribution.result import Relevance


def show() -> None:
    sides: dict[str, Relevance] = {}
    model()
    for column, name, prompt_default in zip(st.columns(2), "AB", (PROMPT, "The camel lives in the"), strict=True):
        with column:
            key = "prompt" if name == "A" else "prompt_b"
            prompt = typed(st.text_area, f"Prompt {name}", key, value=prompt_default, height=80)
            target = typed(st.text_input, f"Target {name} (empty: the most probable)", f"target_{name.lower()}")
            relevance = explained(prompt, target or None, None, "attnlrp", None)
            st.markdown(f"Why {token_label(relevance.target_text)}?")
            heat(relevance)
            st.caption(plain(f"Conservation: {relevance.conservation()}"))
            sides[name] = relevance
    if not all(side.sites for side in sides.values()):
        st.info("Only tokens have relevance in a model of this family; docs/new-family.md adds its neurons.")
        return
    left, right = st.columns(2)
    site = typed(left.selectbox, "Site", "site", ["ffn and attn", "ffn", "attn", "head"])
    count = typed(right.number_input, "Neurons of each", "count", 1, 500, 50)
    table = _table(sides, None if site == "ffn and attn" else site, count)
    shared = table[table["in"] == "both"]
    st.markdown(f"#### {len(shared)} shared, {sum(table['in'] == 'A')} only in A, {sum(table['in'] == 'B')} only in B")
    number = st.column_config.NumberColumn(format="%+.3f")
    formats = {"A": number, "B": number}
    if site == "head":
        st.dataframe(table, hide_index=True, height=320, column_config=formats)
    else:
        st.caption("Click a row for the neuron's card.")
        pairs = list(zip(table["neuron"], table["sign"], strict=True))
        neuron_table(table, "compared", pairs.__getitem__, height=320, column_config=formats)
    chart = charts.shared(table)
    st.altair_chart(chart)
    downloads("compared", {"csv": lambda: table.to_csv(index=False), **charts.files(chart)})


def _table(sides: dict[str, Relevance], site: str | None, count: int) -> pandas.DataFrame:
    """The top neurons of both sides at the last token, with their relevance on each; shared ones first."""
    top = {name: {row.neuron: row.polarity for row in side.top(count, site)} for name, side in sides.items()}
    signs = top["B"] | top["A"]
    values = {neuron: {name: side.of_neuron(neuron) for name, side in sides.items()} for neuron in signs}
    where = {
        neuron: "both" if all(neuron in found for found in top.values()) else "A" if neuron in top["A"] else "B"
        for neuron in signs
    }
    order = sorted(signs, key=lambda neuron: (where[neuron] != "both", -max(values[neuron].values()), neuron))
    return pandas.DataFrame([{"neuron": str(n), "sign": signs[n], "in": where[n], **values[n]} for n in order])
