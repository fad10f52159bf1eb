"""How is it computed? The circuit behind a difference between two prompts: picture, checks, groups."""

from __future__ import annotations

from functools import partial
from importlib.resources import files
from textwrap import shorten
from typing import Any

import pandas
import streamlit as st

from icebear.app.web.shared import (
    explanations,
    gallery,
    jobs,
    links,
    markdown,
    pictures,
    question,
    served,
    tables,
)
from icebear.app.web.shared.background_job import Job
from icebear.app.web.shared.bars import Bar, bars
from icebear.concepts.circuits.checks import faithfulness
from icebear.concepts.circuits.circuit import circuit
from icebear.concepts.circuits.circuit_records import Group, GroupAblation
from icebear.concepts.circuits.drawing import EDGES_AT_FIRST, fragment, whole_text
from icebear.concepts.circuits.graph import Graph
from icebear.concepts.nodes.controls import Ablation
from icebear.errors import need

PILL_LETTERS = 40
"""The letters of a group's name beside the picture."""
LITTLE = 0.2
"""Circuits of less sufficiency are called a small part of the computation."""
SCRIPT = files("icebear.concepts.circuits").joinpath("graph.js").read_text(encoding="utf-8")
SHOW = """
export default function ({ data, parentElement, setStateValue, setTriggerValue }) {
  const place = parentElement.querySelector(".place");
  if (place.dataset.graph === data.graph) return;
  place.dataset.graph = data.graph;
  place.style.setProperty("--panel-top", "4.5rem");
  place.innerHTML = data.html;
  const circuit = place.firstElementChild;
  circuit.dataset.picked = data.picked ?? "";
  watchCircuits(place);
  circuit.addEventListener("pick", (event) => setStateValue("picked", event.detail));
  circuit.addEventListener("act", (event) => setTriggerValue("act", event.detail));
}
"""
picture = st.components.v2.component("icebear_circuit", html='<div class="place"></div>', js=SCRIPT + SHOW)
ACTIONS = {"card": "Open its card", "steer": "Steer: set to the counterfactual"}
"""The buttons in the panel beside the picture."""


def show() -> None:
    prompt, counterfactual, slots = question.prompts()
    bar = st.container(horizontal=True)
    with bar:
        options = _settings()
    example = gallery.known(prompt, counterfactual)
    answers = question.answers(prompt, counterfactual) if counterfactual else None
    words = (question.target(slots[0], answers), question.contrast(slots[1], answers)) if answers else (None, None)
    request = (served.model_name(), prompt, counterfactual or "", *words, *options)
    if example and request[3:] == (None, None, None, True) and st.session_state.get("circuit_now") != request:
        _recorded(gallery.circuit(example), request)
        return
    need("circuits")
    jobs.model()
    if not counterfactual:
        st.info("A circuit explains a difference: write a counterfactual prompt.")
        return
    graph = jobs.wait_for_cached(_started, *request, stops=True)
    with bar:
        files = {"html": graph.to_html, "png": graph.to_png, "svg": graph.to_svg, "json": graph.to_json}
        pictures.downloads("circuit", files | {"csv": lambda: graph.to_frame().to_csv(index=False)})
    check = st.container()
    _picture(record_of(graph), request)
    _groups(graph, request)
    with check:
        _checks(graph, request)


def record_of(graph: Graph) -> dict[str, Any]:
    """Return the picture with what its buttons need, JSON-ready: id -> the node and its sign, and the edits that set
    the node or the group."""
    groups = [(f"group {number}", group) for number, group in enumerate(graph.groups)]
    actions = {
        id: [str(group.nodes[0].neuron), group.nodes[0].polarity, "\n".join(map(str, graph.recipe(group).edits))]
        for id, group in [*groups, *((node.id, Group(node.id, (node,))) for node in graph.nodes)]
    }
    return {"html": str(fragment(graph, ACTIONS)), "actions": actions}


def measured_record(graph: Graph) -> dict[str, Any]:
    """Return the record of a finished example, which has also what the check measures."""
    return {**record_of(graph), "ablation": vars(graph.ablation()), "parts": _parts(graph), "whole": whole_text(graph)}


def _parts(graph: Graph) -> str:
    return "heads and neurons" if graph.heads else "neurons"


def _recorded(record: dict[str, Any], request: tuple) -> None:
    """Show the circuit of a finished example, which needs no model."""
    _verdict(Ablation(**record["ablation"]), record["parts"], record["whole"])
    _picture(record, request)
    st.caption("These numbers were measured before, and come with icebear.")
    now = partial(st.session_state.update, circuit_now=request)
    st.button("Find it again, with groups to switch off, all checks and downloads", key="find_again", on_click=now)


def _settings() -> tuple[int | None, bool]:
    """Return the number of nodes, and whether heads are nodes."""
    with st.popover("Settings", icon=":material/tune:"):
        count = links.bound(
            st.number_input, "Nodes (empty: those of *Why this word?*)", "nodes", 1, 200, value=None, step=5
        )
        neurons = links.bound(st.toggle, "Without attention heads", "neurons")
    return count, not neurons


@st.cache_resource(max_entries=4, show_spinner=False)
def _started(
    name: str,
    prompt: str,
    counterfactual: str,
    target: str | None,
    contrast: str | None,
    nodes: int | None,
    heads: bool,
) -> Job:
    """Return the job that finds a circuit, or has found it, for all visitors."""
    loaded, read, compared = jobs.model(), markdown.read_prompt(prompt), markdown.read_prompt(counterfactual)

    def find(job: Job) -> Graph:
        words, step = explanations.completed(prompt, target, contrast), partial(job.step, doing=job.what)
        graph = circuit(loaded, read, *words, counterfactual=compared, nodes=nodes, heads=heads, on_progress=step)
        job.doing = "Naming its groups"
        assert graph.groups  # computed here, not while the page is drawn
        return graph

    return Job("Finding the circuit", find)


def _picture(record: dict[str, Any], request: tuple) -> None:
    """Draw a circuit with its panel, which opens cards and sends edits to the steering view."""

    def pick() -> None:
        links.to_url(node=st.session_state["picture"].picked)

    def act() -> None:
        if st.session_state["picture"].act:
            action, id = st.session_state["picture"].act
            neuron, sign, edits = record["actions"][id]
            if action == "card":
                links.open_card(neuron, sign)
            else:
                links.go("steer", section="edits", edits=edits)

    data = {"graph": repr(request), "html": record["html"], "picked": links.from_url("node")}
    picture(data=data, key="picture", on_picked_change=pick, on_act_change=act)


def _checks(graph: Graph, request: tuple) -> None:
    """Say what the nodes recover, with their control; the other checks run on a click, as they take seconds."""
    nodes, parts = jobs.wait_for_cached(_ablation, request, graph), _parts(graph)
    _verdict(nodes, parts, whole_text(graph))
    with st.expander("All checks"):
        if graph.edges and st.toggle("Also run the model along the edges alone", key="measure"):
            edges = jobs.wait_for_cached(_along_edges, request, graph)
            table = [
                (f"the {row.edges} strongest edges", row.sufficiency, row.random_sufficiency, row.matched_sufficiency)
                for row in edges
            ]
            controls = ["along as many random edges", "along random edges into the same targets"]
            _table(["along these edges alone", "recovered", *controls], table)
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


def _verdict(measured: Ablation, parts: str, recomputed: str) -> None:
    st.markdown("## Is it true?")
    st.markdown(sentence(measured, parts, recomputed))
    st.html(bars(measures(measured, parts), high=1.0))


def _table(columns: list[str], rows: list[tuple]) -> None:
    tables.data_table(pandas.DataFrame(rows, columns=columns), shares=columns[1:])


def percent(share: float) -> str:
    return f"{round(100 * share)}%"


def sentence(measured: Ablation, parts: str, recomputed: str = "") -> str:
    """Say how much of the difference the nodes recover, with whole parts, and how much is lost without them, with a
    random control."""
    share, random = measured.sufficiency, measured.random_sufficiency
    these, others = f"These {measured.nodes} {parts}", f"{measured.nodes} random ones"
    if share <= random + 0.01:
        recovered = f"{these} alone recover no more of the difference than {others} ({percent(share)})"
    else:
        only = "only " if share < LITTLE else ""
        beside = f", with all of {markdown.plain(recomputed)}," if recomputed else ""
        recovered = f"{these}{beside} recover {only}{percent(share)} of the difference; {others} {percent(random)}"
    little = ": most of the computation is not in this picture" if share < LITTLE else ""
    lost, lost_at_random = percent(measured.necessity), percent(measured.random_necessity)
    return f"**{recovered}{little}.** Without them {lost} is lost; without {others} {lost_at_random}."


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


def _groups(graph: Graph, request: tuple) -> None:
    st.markdown("## Groups")
    st.caption(
        "The nodes of a group get input from the same tokens, have the same effects and write similar vectors. A "
        "group is named by the likely next words that its nodes raise and lower together, measured in this prompt."
    )
    short = [shorten(group.name, PILL_LETTERS, placeholder=" …") for group in graph.groups]  # a phone cuts longer ones
    names = [f"{number + 1}: {short[number]} ({len(group.nodes)})" for number, group in enumerate(graph.groups)]
    chosen = st.pills("Switch off a group", names, format_func=markdown.plain, key="without")
    if chosen not in names:
        return
    number = names.index(chosen)
    group, result = graph.groups[number], _without(request, number, graph)
    answers = ", ".join(f"{markdown.token_label(token.text)} {token.number}" for token in result.predictions[:3])
    st.markdown(
        f"Without this group the model continues with {answers}, and {percent(result.necessity)} of the "
        f"difference is lost; without as many random nodes of the same layers and tokens "
        f"{percent(result.random_necessity)}."
    )
    tables.neuron_pills("Cards", [(node.neuron, node.polarity) for node in group.nodes], f"cards_{number}")
    edits = "\n".join(map(str, graph.recipe(group).edits))
    label, values = f"Set this group in {links.VIEWS['steer'].title}", {"section": "edits", "edits": edits}
    st.button(label, key="steer_group", on_click=links.go, args=("steer",), kwargs=values)


@st.cache_data(max_entries=64, show_spinner="Switching it off ...")
def _without(request: tuple, number: int, _graph: Graph) -> GroupAblation:
    return _graph.without(_graph.groups[number])
