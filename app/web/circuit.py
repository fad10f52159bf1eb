"""The circuit behind a difference between two prompts: its picture, its groups, and what happens without them."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pandas
import streamlit as st

from icebear.app.cli.verbs.demo import OTHER, PROMPT
from icebear.app.web.background import Job
from icebear.app.web.state import (
    downloads,
    forget_other,
    go,
    model,
    model_name,
    neuron_pills,
    other_prompt,
    plain,
    read_prompt,
    token_label,
    typed,
)
from icebear.concepts.circuits.circuit import circuit
from icebear.concepts.circuits.drawing import fragment
from icebear.concepts.circuits.graph import Graph
from icebear.concepts.circuits.records import Group, GroupAblation, Node
from icebear.errors import IcebearError
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
    prompt = typed(st.text_area, "Prompt", "prompt", value=PROMPT, height=80, on_change=forget_other)
    counterfactual = other_prompt(prompt, OTHER if prompt == PROMPT else "")
    left, middle, right = st.columns(3)
    target = typed(left.text_input, "Target token (empty: the most probable)", "target")
    contrast = typed(middle.text_input, "Contrast token (empty: the other prompt's answer)", "contrast")
    count = typed(right.slider, "Nodes", "nodes", 5, 150, 60, step=5)
    heads = typed(st.toggle, "Attention heads too", "heads")
    need("circuits")
    model()
    if not counterfactual:
        st.info("A circuit is of a difference: give another prompt of as many tokens.")
        return
    asked = (model_name(), prompt, target or None, contrast or None, counterfactual, count, heads)
    graph = _found(*asked)
    picked = picture(
        data={"graph": repr(asked), "html": fragment(graph)}, key="picture", on_picked_change=lambda: None
    ).picked
    downloads(
        "circuit",
        {
            "html": graph.to_html,
            "png": graph.to_png,
            "svg": graph.to_svg,
            "json": graph.to_json,
            "csv": lambda: graph.to_frame().to_csv(index=False),
            "neuronpedia.json": graph.to_neuronpedia,
        },
    )
    chosen = next((node for node in graph.nodes if node.id == picked), None)
    if chosen and chosen.neuron.site != "head":
        neuron_pills("The node's card", [(chosen.neuron, _sign(chosen))], "picked_card")
    _groups(graph, asked)
    _measured(graph, asked)


def _found(*asked: Any) -> Graph:
    """Kept for all visitors; it is found beside them, and while somebody waits they see how far it is."""
    job = _begun(*asked)
    place = st.empty()
    if job.is_alive():
        with place.container():
            moved = st.progress(0.0)
            st.button("Stop", key="stop_circuit", on_click=_stop, args=(job,))
        while job.is_alive():
            moved.progress(job.share, f"{job.doing} ...")  # any click ends this run here
            job.join(0.2)
        place.empty()
    if job.error:
        _begun.clear(*asked)  # to try again
        raise job.error
    return job.result


@st.cache_resource(max_entries=4, show_spinner=False)
def _begun(
    name: str, prompt: str, target: str | None, contrast: str | None, counterfactual: str, nodes: int, heads: bool
) -> Job:
    loaded = model()

    def find(job: Job) -> Graph:
        def told(done: int, total: int) -> None:
            job.share = done / total
            if job.stopped:
                raise IcebearError("Stopped. Change what you asked for, or ask again.")

        here, there = read_prompt(prompt), read_prompt(counterfactual)
        return circuit(loaded, here, target, contrast, counterfactual=there, nodes=nodes, heads=heads, on_progress=told)

    return Job("Finding the circuit", find)


def _stop(job: Job) -> None:
    job.stopped = True


def _sign(node: Node) -> str:
    return "+" if node.activation >= node.counterfactual else "-"


def _groups(graph: Graph, asked: tuple) -> None:
    st.markdown("#### Groups")
    st.caption("Fed by the same tokens, moving the same things, writing the same words. Choose one to switch it off.")
    names = [f"{number + 1}: {group.name} ({len(group.nodes)})" for number, group in enumerate(graph.groups)]
    chosen = st.pills("Without", names, format_func=plain, key="without")
    if chosen not in names:
        return
    number = names.index(chosen)
    group, found = graph.groups[number], _without(asked, number, graph)
    answers = ", ".join(f"{token_label(token.text)} {token.number}" for token in found.predictions[:3])
    st.markdown(
        f"Without this group the answer is {answers}. The necessity of the group is {found.necessity:.0%}, that of as "
        f"many random nodes of the same layers and tokens {found.random_necessity:.0%}."
    )
    with st.container(horizontal=True):
        neuron_pills("Cards", [(node.neuron, _sign(node)) for node in group.nodes if node.words], f"cards_{number}")
    if all(node.neuron.site != "head" for node in group.nodes):
        st.button("Send this group to Steer", on_click=_steer, args=(graph, group))


@st.cache_data(max_entries=64, show_spinner="Switching it off ...")
def _without(asked: tuple, number: int, _graph: Graph) -> GroupAblation:
    return _graph.without(_graph.groups[number])


def _steer(graph: Graph, group: Group) -> None:
    go("steer", edits="\n".join(map(str, graph.recipe(group).edits)))


def _measured(graph: Graph, asked: tuple) -> None:
    """The checks, when they are asked for: they take a minute."""
    st.markdown("#### Is it true?")
    if not st.toggle("Measure this circuit", key="measure"):
        st.caption("Its nodes exchanged, and all of it run by its own edges, beside controls; takes about a minute.")
        return
    carried, faithful = _checked(asked, graph)
    kept, left = ("kept alone", "left without")
    rows = [
        {"": f"the {carried.nodes} nodes", kept: carried.kept, left: carried.left},
        {"": "as many at the same layers and tokens", kept: carried.matched_kept, left: carried.matched_left},
        {"": "as many that change most", kept: carried.changed_kept, left: carried.changed_left},
        {"": f"along {faithful.edges} edges alone", kept: faithful.sufficiency},
        {"": "along as many others into the same targets", kept: faithful.random_sufficiency},
        {"": "along all edges between the nodes", kept: faithful.all_edges},
    ]
    number = st.column_config.NumberColumn(format="percent")
    st.dataframe(pandas.DataFrame(rows), hide_index=True, column_config={kept: number, left: number})


@st.cache_data(max_entries=16, show_spinner="Measuring ...")
def _checked(asked: tuple, _graph: Graph) -> tuple[Any, Any]:
    return _graph.ablation(), _graph.faithfulness()
