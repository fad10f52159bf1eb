"""Below an explanation: all ranked neurons with filters, and maps by layer."""

from __future__ import annotations

import altair as alt
import streamlit as st

from icebear.app.web.shared import explanations, links, pictures, tables
from icebear.concepts.results.ranking import Ranking
from icebear.concepts.results.result import Relevance
from icebear.explanation.relevance_map import relevance_map
from icebear.render import NEGATIVE, POSITIVE, hexadecimal

SITES = {"MLP and attention": None, "MLP": "ffn", "attention": "attn", "attention heads": "head"}
"""As they are named in links -> the site that is ranked."""
COLORS = [hexadecimal(NEGATIVE), "#ffffff", hexadecimal(POSITIVE)]
"""From the most negative number to the most positive one."""
LEVEL = 12
"""As many names of columns have room beside each other."""


def show(relevance: Relevance, prompt: str) -> None:
    _neurons(relevance, prompt)
    _map(relevance)


def _neurons(relevance: Relevance, prompt: str) -> None:
    """Show the ranked nodes, with filters."""
    st.markdown("## The neurons behind the difference" if relevance.counterfactual else "## The neurons behind it")
    with st.container(horizontal=True):
        site = SITES[links.bound(st.selectbox, "Component", "site", list(SITES), width=180)]
        position = st.selectbox(
            "At token",
            [*(("all", "last") if relevance.counterfactual else ("last", "all")), *range(len(relevance.tokens))],
            key="position",
            format_func=lambda p: p if isinstance(p, str) else f"{p} {relevance.prompt.strings[p]}",
            width=160,
        )
        sign = links.bound(st.selectbox, "Effect", "effect", ["supports", "opposes"], width=160)
        polarity = links.bound(st.selectbox, "Activation", "sign", ["any", "+", "-"], width=160)
        include = links.bound(st.selectbox, "Attention sinks", "sinks", ["ignored", "included"], width=160)
    last = max(1, max(len(relevance.of(name)) for name in relevance.sites) - 1)
    low, high = st.slider("Layers", 0, last, (0, last), key="layers", persist_state="session")
    ranking = Ranking(
        50,
        site,
        None if polarity == "any" else polarity,
        position,
        include == "included",
        "positive" if sign == "supports" else "negative",
        range(low, high + 1),
    )
    explanation = explanations.explanation_of(relevance, ranking)
    if explanation.nodes:
        columns = ("neuron", "relevance", "activation", "counterfactual", "token")
        tables.node_table(explanation, "neurons", columns, prompt=prompt)
    else:
        st.info("No neuron passes these filters; widen them.")


def _map(relevance: Relevance) -> None:
    """Show the relevance of each layer, by token or by attention head, as a heatmap."""
    sites = ["ffn", "attn", "heads"]
    site = links.bound(st.segmented_control, "Map", "map", sites, default="ffn", required=True)
    across, title = ("head", "attention heads") if site == "heads" else ("token", f"{site} by layer and token")
    table = relevance_map(relevance, site)
    if table.empty:
        return
    names = list(map(str, table.columns))
    rows = table.rename_axis("layer").reset_index().melt("layer", var_name=across, value_name="relevance")
    largest = rows["relevance"].abs().max() or 1.0
    scale = alt.Scale(domain=[-largest, 0, largest], range=COLORS, interpolate="rgb")
    axis = alt.Axis(labelAngle=0) if len(names) <= LEVEL else alt.Axis()
    chart = alt.Chart(rows, title=f"{title} (attention sinks ignored)", height=330).mark_rect()
    pictures.chart(
        chart.encode(
            x=alt.X(f"{across}:N", sort=names, title=None if across == "token" else across, axis=axis),
            y=alt.Y("layer:O", sort="descending", title="layer", axis=alt.Axis(labelOverlap=True)),
            color=alt.Color("relevance:Q", scale=scale, legend=alt.Legend(orient="bottom", format="+.2f", title=None)),
            tooltip=["layer", across, alt.Tooltip("relevance:Q", format="+.4f")],
        ),
        "map",
    )
