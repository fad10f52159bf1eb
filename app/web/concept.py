"""Concepts: found from texts, their neurons, a text measured by one, and what is written when it is turned."""

from __future__ import annotations

import pandas
import streamlit as st

from icebear.app.cli.terminal import DEVIATIONS, found_by
from icebear.app.cli.verbs.demo import PROMPT
from icebear.app.web.state import HEAT, WIDE, downloads, has_labels, known, model, neuron_table, plain, store, typed
from icebear.app.web.steer import side_by_side
from icebear.concepts.render import heatmap
from icebear.steering.comparison import Comparison, compare
from icebear.steering.concept.concept import Concept
from icebear.steering.concept.finding import find_concept

PRICES = (0.02, 0.05, 0.1, 0.25, 0.5, 1.0)


def show() -> None:
    _choose()
    record = st.session_state.get("concept")
    if record is None:
        return
    found = Concept.from_dict(record)
    found.check(model())
    _neurons(found)
    _measure(found)
    _turn(found)


def _choose() -> None:
    """Texts to find a concept from, a file, or one of the store."""
    kept = _stored()
    with st.expander("Find a concept", expanded="concept" not in st.session_state):
        left, right = st.columns(2)
        with_ = left.text_area("Texts with it, one a line", key="concept_with", height=160)
        without = right.text_area("Texts without it", key="concept_without", height=160)
        columns = st.columns([3, 2, 1], vertical_alignment="bottom")
        name = columns[0].text_input("Name", "my concept", key="concept_name")
        most = columns[1].number_input("Neurons at most", 1, 100, 20, key="concept_most")
        if columns[2].button("Find", type="primary", key="find_concept"):
            st.session_state["concept"] = _find(with_.splitlines(), without.splitlines(), name, most).to_dict()
        uploaded = st.file_uploader("Or a saved concept", "json", key="concept_file")
        if uploaded and st.button("Use it", key="use_concept"):
            read = uploaded.getvalue().decode("utf-8", errors="replace")
            st.session_state["concept"] = Concept.from_json(read).to_dict()
        if kept:
            st.pills("Or one of the store", kept, key="kept_concept", on_change=_take)


def _stored() -> list[str]:
    if not has_labels():
        return []
    with store() as opened:
        return list(opened.concepts.all())


def _take() -> None:
    if st.session_state["kept_concept"]:
        with store() as opened:
            st.session_state["concept"] = opened.concepts.get(st.session_state["kept_concept"])


def _find(with_: list[str], without: list[str], name: str, most: int) -> Concept:
    bar = st.progress(0.0, "Reading")

    def move(done: int, total: int) -> None:
        bar.progress(done / total, "Reading")

    found = find_concept(model(), with_, without, name, most=most, on_progress=move)
    bar.empty()
    return found


def _neurons(found: Concept) -> None:
    st.markdown(f"#### {plain(found.name)}: {len(found)} neuron{'' if len(found) == 1 else 's'}")
    st.caption(plain("; ".join(found_by(found)[:2])))
    pairs = [(part.neuron, part.polarity) for part in found.parts]
    table = pandas.DataFrame(
        {
            "neuron": [str(neuron) for neuron, _ in pairs],
            "sign": [polarity for _, polarity in pairs],
            "weight": [part.weight for part in found.parts],
            **known(pairs),
        }
    )
    number = st.column_config.NumberColumn(format="%.3f")
    neuron_table(table, "concept_neurons", lambda row: pairs[row], column_config={"weight": number, **WIDE})
    downloads("concept", {"json": found.to_json, "csv": lambda: table.to_csv(index=False)})
    path = found.provenance.get("path")
    if path:
        with st.expander("How many neurons"):
            st.dataframe(pandas.DataFrame(path).drop_duplicates(), hide_index=True)


def _measure(found: Concept) -> None:
    text = typed(st.text_area, "Measure a text", "measured", value=PROMPT, height=80)
    if text.strip():
        told = found.measure(model(), text)
        st.html(HEAT.format(heatmap(list(told.tokens), list(told.values), template=told.apart)))
        st.caption(plain(f"{told.value:+.2f}. {DEVIATIONS}"))


def _turn(found: Concept) -> None:
    columns = st.columns([3, 2, 1, 1], vertical_alignment="bottom")
    prompt = typed(columns[0].text_input, "Write on after", "prompt", value=PROMPT)
    price = columns[1].select_slider("Price in nats at held-out contexts", PRICES, 0.25, key="concept_price")
    suppress = columns[2].toggle("Suppress", key="concept_suppress")
    asked = (found.name, prompt, price, suppress)
    if columns[3].button("Generate", type="primary", key="turn_concept"):
        with st.spinner("Finding the strength, writing ..."):
            st.session_state["turned"] = (asked, _turned(found, prompt, price, suppress))
    done, told = st.session_state.get("turned", (None, None))
    if told:
        if done != asked:
            st.caption("The text below is of other settings; generate again.")
        result, line = told
        st.caption(plain(line))
        side_by_side(result)


def _turned(found: Concept, prompt: str, price: float, suppress: bool) -> tuple[Comparison, str]:
    loaded = model()
    recipe = found.recipe(loaded, kl=price, suppress=suppress)
    result = compare(loaded, prompt, recipe, 30)
    plain_value, steered = (found.measure(loaded, prompt + side.text).value for side in (result.plain, result.steered))
    line = (
        f"Strength {recipe.provenance['strength']:.3g}, {recipe.provenance['kl']:.3f} nats; the plain model measures "
        f"{plain_value:+.2f} in the plain text and {steered:+.2f} in the steered one."
    )
    return result, line
