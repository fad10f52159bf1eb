"""How is it computed? The circuit behind a difference between two prompts: picture, groups, checks."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pandas
import streamlit as st

from icebear.app.web import ui
from icebear.app.web.background import Job
from icebear.concepts.circuits.circuit import circuit
from icebear.concepts.circuits.drawing import fragment
from icebear.concepts.circuits.graph import Graph
from icebear.concepts.circuits.records import Group, GroupAblation, Node
from icebear.extras import need

SCRIPT = files("icebear.concepts.circuits").joinpath("graph.js").read_text(encoding="utf-8")
SHOW = """
export default function ({ data, parentElement, setStateValue }) {
  const place = parentElement.querySelector(".place");
  if (place.dataset.graph !== data.graph) {
    place.dataset.graph = data.graph;
    place.innerHTML = data.html;
    watchCircuits(place);
    place.firstElementChild.addEventListener("pick", (event) => setStateValue("picked", event.detail));
  }
}
"""
picture = st.components.v2.component("icebear_circuit", html='<div class="place"></div>', js=SCRIPT + SHOW)


def show() -> None:
    prompt, counterfactual = ui.prompts()
    left, middle, right = st.columns(3)
    target = ui.typed(left.text_input, "Target token (empty: the most probable)", "target")
    contrast = ui.typed(middle.text_input, "Contrast token (empty: the counterfactual's answer)", "contrast")
    count = ui.typed(right.slider, "Nodes", "nodes", 5, 150, 60, step=5)
    heads = ui.typed(st.toggle, "Include attention heads", "heads")
    need("circuits")
    ui.model()
    if not counterfactual:
        st.info("A circuit explains a difference: give another prompt with the same number of tokens.")
        return
    request = (ui.model_name(), prompt, target or None, contrast or None, counterfactual, count, heads)
    job = _started(*request)
    try:
        graph = ui.waited(job, stops=True)
    finally:
        if job.error:
            _started.clear(*request)  # to try again
    picked = picture(
        data={"graph": repr(request), "html": fragment(graph)}, key="picture", on_picked_change=lambda: None
    ).picked
    files = {"html": graph.to_html, "png": graph.to_png, "svg": graph.to_svg, "json": graph.to_json}
    table = {"csv": lambda: graph.to_frame().to_csv(index=False), "neuronpedia.json": graph.to_neuronpedia}
    ui.downloads("circuit", files | table)
    chosen = next((node for node in graph.nodes if node.id == picked), None)
    if chosen and chosen.neuron.site != "head":
        ui.neuron_pills("The node's card", [(chosen.neuron, _sign(chosen))], "picked_card")
    _groups(graph, request)
    _measured(graph, request)


@st.cache_resource(max_entries=4, show_spinner=False)
def _started(
    name: str, prompt: str, target: str | None, contrast: str | None, counterfactual: str, nodes: int, heads: bool
) -> Job:
    """Return the job that finds a circuit, or has found it, for all visitors."""
    loaded, here, there = ui.model(), ui.read_prompt(prompt), ui.read_prompt(counterfactual)
    return Job(
        "Finding the circuit",
        lambda job: circuit(
            loaded, here, target, contrast, counterfactual=there, nodes=nodes, heads=heads, on_progress=job.step
        ),
    )


def _sign(node: Node) -> str:
    return "+" if node.activation >= node.counterfactual else "-"


def _groups(graph: Graph, request: tuple) -> None:
    st.markdown("#### Groups")
    st.caption(
        "The neurons of a group get input from the same tokens, have the same effects and write similar vectors. A "
        "group is named by the likely next words that its neurons raise and lower together."
    )
    names = [f"{number + 1}: {group.name} ({len(group.nodes)})" for number, group in enumerate(graph.groups)]
    chosen = st.pills("Switch off group", names, format_func=ui.plain, key="without")
    if chosen not in names:
        return
    number = names.index(chosen)
    group, result = graph.groups[number], _without(request, number, graph)
    answers = ", ".join(f"{ui.token_label(token.text)} {token.number}" for token in result.predictions[:3])
    st.markdown(
        f"Without this group the answer is {answers}. The necessity of the group is {result.necessity:.0%}; that of as "
        f"many random nodes of the same layers and tokens is {result.random_necessity:.0%}."
    )
    with st.container(horizontal=True):
        ui.neuron_pills(
            "Cards",
            [(node.neuron, _sign(node)) for node in group.nodes if node.neuron.site != "head"],
            f"cards_{number}",
        )
    if all(node.neuron.site != "head" for node in group.nodes):
        st.button("Send this group to Steer", on_click=_steer, args=(graph, group))


@st.cache_data(max_entries=64, show_spinner="Switching it off ...")
def _without(request: tuple, number: int, _graph: Graph) -> GroupAblation:
    return _graph.without(_graph.groups[number])


def _steer(graph: Graph, group: Group) -> None:
    ui.go("steer", section="edits", edits="\n".join(map(str, graph.recipe(group).edits)))


def _measured(graph: Graph, request: tuple) -> None:
    """Show the checks, on demand because they take a few seconds."""
    st.markdown("#### Is it true?")
    if not st.toggle("Measure this circuit", key="measure"):
        st.caption("Patch its nodes, and run the model along its edges alone, with controls. It takes a few seconds.")
        return
    nodes, edges = _checked(request, graph)
    sufficiency, necessity = "sufficiency", "necessity"
    rows = [
        (f"the {nodes.nodes} nodes", nodes.sufficiency, nodes.necessity),
        ("layer- and token-matched random nodes", nodes.random_sufficiency, nodes.random_necessity),
        ("the nodes that change most", nodes.most_changed_sufficiency, nodes.most_changed_necessity),
        (f"along {edges.edges} edges alone", edges.sufficiency, None),
        ("along random edges into the same targets", edges.random_sufficiency, None),
        ("along all edges between the nodes", edges.all_edges, None),
    ]
    percent = st.column_config.NumberColumn(format="percent")
    table = pandas.DataFrame(rows, columns=["", sufficiency, necessity])
    st.dataframe(table, hide_index=True, column_config={sufficiency: percent, necessity: percent})


@st.cache_data(max_entries=16, show_spinner="Measuring ...")
def _checked(request: tuple, _graph: Graph) -> tuple[Any, Any]:
    return _graph.ablation(), _graph.faithfulness()
