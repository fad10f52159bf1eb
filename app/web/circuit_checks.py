"""Is it true? What a circuit recovers, beside its controls, in a sentence, bars and tables."""

from __future__ import annotations

import pandas
import streamlit as st

from icebear.app.web.shared import jobs, tables
from icebear.app.web.shared.background import Job
from icebear.app.web.shared.bars import Bar, bars
from icebear.concepts.circuits.checks import faithfulness
from icebear.concepts.circuits.drawing import EDGES_AT_FIRST
from icebear.concepts.circuits.graph import Graph
from icebear.concepts.nodes.controls import Ablation

LITTLE = 0.2
"""Circuits of less sufficiency are called a small part of the computation."""


def show(graph: Graph, request: tuple) -> None:
    """Say what the nodes recover, with their control; the other checks run on a click, as they take seconds."""
    st.markdown("#### Is it true?")
    nodes = jobs.awaited(_ablation, request, graph)
    parts = "nodes" if graph.heads else "neurons"
    st.markdown(sentence(nodes, parts))
    st.html(bars(measures(nodes, parts), high=1.0))
    with st.expander("All checks"):
        if st.toggle("Also run the model along the edges alone", key="measure"):
            edges = jobs.awaited(_along_edges, request, graph)
            table = [(f"the {one.edges} strongest edges", one.sufficiency, one.random_sufficiency) for one in edges]
            _table(["along these edges alone", "recovered", "along random edges into the same targets"], table)
        rows = [
            (f"these {nodes.nodes} {parts}", nodes.sufficiency, nodes.necessity),
            (
                f"{nodes.nodes} random {parts} of the same layers and tokens",
                nodes.random_sufficiency,
                nodes.random_necessity,
            ),
            (
                f"the {nodes.nodes} {parts} that change most",
                nodes.most_changed_sufficiency,
                nodes.most_changed_necessity,
            ),
        ]
        _table(["", "sufficiency", "necessity"], rows)


def _table(columns: list[str], rows: list[tuple]) -> None:
    tables.data_table(pandas.DataFrame(rows, columns=columns), shares=columns[1:])


def percent(share: float) -> str:
    return f"{round(100 * share)}%"


def sentence(measured: Ablation, parts: str) -> str:
    """Say how much of the difference the nodes recover and how much is lost without them, beside random ones."""
    share, random = measured.sufficiency, measured.random_sufficiency
    these, others = f"These {measured.nodes} {parts}", f"{measured.nodes} random ones"
    if share <= random + 0.01:
        first = f"{these} alone recover no more of the difference than {others} ({percent(share)})"
    else:
        only = "only " if share < LITTLE else ""
        first = f"{these} recover {only}{percent(share)} of the difference; {others} {percent(random)}"
    little = ": most of the computation is not in this picture" if share < LITTLE else ""
    lost, lost_at_random = percent(measured.necessity), percent(measured.random_necessity)
    return f"**{first}{little}.** Without them {lost} is lost; without {others} {lost_at_random}."


def measures(measured: Ablation, parts: str) -> list[Bar]:
    """Return a bar for each measure, with that of random nodes below it."""
    rows = [
        (f"Recovered by these {parts} alone", measured.sufficiency, False),
        ("by random ones", measured.random_sufficiency, True),
        (f"Lost without these {parts}", measured.necessity, False),
        ("without random ones", measured.random_necessity, True),
    ]
    return [Bar(name, min(max(share, 0.0), 1.0), percent(share), is_control) for name, share, is_control in rows]


@st.cache_resource(max_entries=16, show_spinner=False)
def _ablation(request: tuple, _graph: Graph) -> Job:
    return Job("Measuring what these nodes recover", lambda job: _graph.ablation())


@st.cache_resource(max_entries=16, show_spinner=False)
def _along_edges(request: tuple, _graph: Graph) -> Job:
    """Return the job that measures the edges that the picture shows at first, and all that it can show."""
    most = len(_graph.edges)
    counts = sorted({min(EDGES_AT_FIRST, most), most})
    return Job("Running the model along the edges", lambda job: faithfulness(_graph, counts, 0))
