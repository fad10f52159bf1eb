"""Concepts: found from texts, their neurons, a text measured by one, and texts steered by one."""

from __future__ import annotations

import pandas
import streamlit as st

from icebear.app.cli.terminal import DEVIATIONS, provenance_lines
from icebear.app.cli.verbs.demo import PROMPT
from icebear.app.web import ui
from icebear.app.web.editing import last_result, side_by_side
from icebear.concepts.render import heatmap
from icebear.steering.comparison import Comparison, compare
from icebear.steering.concept.concept import Concept
from icebear.steering.concept.finding import find_concept

LIMITS = (0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
"""Nats of KL divergence in held-out contexts."""


def show() -> None:
    _choose()
    record = st.session_state.get("concept")
    if record is None:
        return
    concept = Concept.from_dict(record)
    concept.check(ui.model())
    _neurons(concept)
    _measure(concept)
    _steer(concept)


def _choose() -> None:
    """Choose a concept: found from texts, in a file, or of the index."""
    names: list[str] = []
    if ui.has_labels():
        with ui.store() as opened:
            names = list(opened.concepts.all())
    with st.expander("Find a concept", expanded="concept" not in st.session_state):
        left, right = st.columns(2)
        positive = left.text_area("Positive examples, one a line (at least 16)", key="concept_with", height=160)
        negative = right.text_area("Negative examples (at least 16)", key="concept_without", height=160)
        columns = st.columns([3, 2, 1], vertical_alignment="bottom")
        name = columns[0].text_input("Name", "my concept", key="concept_name")
        most = columns[1].number_input("Neurons at most", 1, 100, 20, key="concept_most")
        if columns[2].button("Find", type="primary", key="find_concept"):
            with ui.progress("Reading") as step:
                concept = find_concept(
                    ui.model(), positive.splitlines(), negative.splitlines(), name, max_neurons=most, on_progress=step
                )
            st.session_state["concept"] = concept.to_dict()
        uploaded = st.file_uploader("Or a saved concept", "json", key="concept_file")
        if uploaded and st.button("Use it", key="use_concept"):
            read = uploaded.getvalue().decode("utf-8", errors="replace")
            st.session_state["concept"] = Concept.from_json(read).to_dict()
        if names:
            st.pills("Or one of the index", names, key="stored_concept", on_change=_take)


def _take() -> None:
    if st.session_state["stored_concept"]:
        with ui.store() as opened:
            st.session_state["concept"] = opened.concepts.get(st.session_state["stored_concept"])


def _neurons(concept: Concept) -> None:
    st.markdown(f"#### {ui.plain(concept.name)}: {len(concept)} neuron{'' if len(concept) == 1 else 's'}")
    st.caption(ui.plain("; ".join(provenance_lines(concept)[:2])))
    rows = [{"neuron": str(part.neuron), "sign": part.polarity, "weight": part.weight} for part in concept.parts]
    weight = {"weight": st.column_config.NumberColumn(format="%.3f")}
    ui.neuron_table(pandas.DataFrame(rows), "concept_neurons", labels=True, column_config=weight)
    ui.downloads("concept", {"json": concept.to_json})
    path = concept.provenance.get("path")
    if path:
        with st.expander("How many neurons"):
            st.dataframe(pandas.DataFrame(path).drop_duplicates(), hide_index=True)


def _measure(concept: Concept) -> None:
    text = ui.typed(st.text_area, "Measure a text", "measured", value=PROMPT, height=80)
    if text.strip():
        result = concept.measure(ui.model(), text)
        st.html(ui.HEAT.format(heatmap(list(result.tokens), list(result.values), template=result.excluded)))
        st.caption(ui.plain(f"{result.value:+.2f}. {DEVIATIONS}"))


def _steer(concept: Concept) -> None:
    columns = st.columns([3, 2, 1, 1], vertical_alignment="bottom")
    prompt = ui.typed(columns[0].text_input, "Continue this text", "prompt", value=PROMPT)
    kl = columns[1].select_slider(
        "Side effects allowed (KL in nats, held-out contexts)", LIMITS, 0.25, key="concept_kl"
    )
    suppress = columns[2].toggle("Suppress instead", key="concept_suppress")
    settings = (concept.name, prompt, kl, suppress)
    pressed = columns[3].button("Generate", type="primary", key="steer_concept")
    result = last_result("steered", settings, pressed, lambda: _steered(concept, prompt, kl, suppress))
    if result:
        comparison, line = result
        st.caption(ui.plain(line))
        side_by_side(comparison)


def _steered(concept: Concept, prompt: str, kl: float, suppress: bool) -> tuple[Comparison, str]:
    loaded = ui.model()
    with st.spinner("Finding the strength, writing ..."):
        recipe = concept.recipe(loaded, kl=kl, suppress=suppress)
        result = compare(loaded, prompt, recipe, 30)
    plain_value, steered = (
        concept.measure(loaded, prompt + side.text).value for side in (result.plain, result.steered)
    )
    strength, kl = recipe.provenance["strength"], recipe.provenance["off_target_kl"]
    line = (
        f"Strength {strength:.3g}, {kl:.3f} nats; the concept measures {plain_value:+.2f} in the plain text and "
        f"{steered:+.2f} in the steered text."
    )
    return result, line
