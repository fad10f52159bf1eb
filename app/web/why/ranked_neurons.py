"""Below an explanation: all ranked neurons with filters."""

from __future__ import annotations

import streamlit as st

from icebear.app.web.shared import explanations, links, tables
from icebear.concepts.results.ranking import Ranking
from icebear.concepts.results.result import Relevance

SITE_FILTERS = {"FFN and attention": None, "FFN": "ffn", "attention": "attn", "attention heads": "head"}
"""As they are named in links -> the site that is ranked."""


def show(relevance: Relevance, prompt: str) -> None:
    """Show the ranked nodes, with filters."""
    st.markdown("## The neurons behind the difference" if relevance.counterfactual else "## The neurons behind it")
    with st.container(horizontal=True):
        site = SITE_FILTERS[links.bound(st.selectbox, "Component", "site", list(SITE_FILTERS), width=180)]
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
