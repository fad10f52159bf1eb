"""Before a conversation begins: an example prompt, what can be done with it, and what is on this machine."""

from __future__ import annotations

from pathlib import Path

import pandas
import streamlit as st

from icebear.actmax.labels.scores import most_significant
from icebear.app.web import ui
from icebear.app.web.explain import DEFAULT, explained
from icebear.cache import cache_folder, cached
from icebear.concepts.attribution.ranking import Ranking
from icebear.concepts.attribution.result import Relevance
from icebear.concepts.models.presets import PRESETS
from icebear.errors import IcebearError


def show() -> None:
    st.markdown("#### Which word does the model predict next, and which of its neurons contribute to it?")
    prompt, counterfactual = ui.prompts()
    place = st.container()
    _on_this_machine()  # before the page waits for the model
    with place:
        try:
            ui.model()
            method = DEFAULT if counterfactual else "attnlrp"
            relevance = explained(prompt, None, None, method, counterfactual)
        except IcebearError as error:  # such as of a prompt without a mask
            st.info(ui.plain(str(error)))
            return
        _example(relevance)


def _example(relevance: Relevance) -> None:
    ui.heat(relevance, answer=True)
    st.caption(ui.plain(relevance.comparison_text()))
    explanation = ui.explanation_of(relevance, Ranking(10))
    word = relevance.target_text
    why, search, switch = (column.container(border=True) for column in st.columns(3))
    with why:
        st.markdown("**Why this word?**")
        st.caption("See the tokens and neurons that contribute to it, or to it rather than another word.")
        st.button("Explain it", key="try_explain", on_click=ui.go, args=("explain",))
    with search:
        st.markdown("**Find related neurons**")
        st.caption("See which neurons of the whole model are related to the word.")
        text = {"text": word.strip()}
        st.button(f"Search for {ui.token_label(word)}", key="try_search", on_click=ui.go, args=("search",), kwargs=text)
    if not explanation.nodes:
        return
    with switch:
        first = explanation.nodes[0].ranked.neuron
        st.markdown("**Does it depend on one neuron?**")
        st.caption("Switch off the neuron that contributes most, and read what the model then writes.")
        st.button(f"Switch {first} off", key="try_steer", on_click=ui.to_steer, args=(first,))
    cards = st.container()
    st.markdown(f"#### The neurons that contribute most to {ui.target_label(relevance)}")
    ui.node_table(explanation, "tried", ("neuron", "token", "relevance"))
    _significant_labels()
    with cards:
        ui.group_cards(explanation)


def _significant_labels() -> None:
    """Show the neurons of the index with significant labels."""
    if not ui.has_labels():
        return
    with ui.store() as opened:
        meanings = most_significant(opened.labels.all_meanings())
    if not meanings:
        return
    st.markdown("#### The neurons with the best labels")
    rows = [
        {
            "neuron": str(m.neuron),
            "sign": m.polarity,
            "layer": m.neuron.layer,
            "label": m.text,
            "score": m.score,
            "by": m.by,
        }
        for m in meanings
    ]
    st.caption("The scores are of documents that the labels were not made from.")
    score = {"score": st.column_config.NumberColumn("AUROC", format="%.2f")}
    ui.neuron_table(pandas.DataFrame(rows), "most_significant", sorts=True, height=280, column_config=score)


def _on_this_machine() -> None:
    """List the models and indexes that need no download."""
    st.markdown("#### On this machine")
    left, right = st.columns(2)
    models = [name for name, preset in PRESETS.items() if cached(preset.folder)]
    left.caption("Models that need no download: " + (", ".join(map(ui.plain, models)) or "none yet"))
    stores = [*sorted(Path.cwd().glob("*.db")), *sorted(cache_folder().glob("*.db"))]
    named = ", ".join(f"{ui.plain(path.name)} ({path.stat().st_size / 1e6:.0f} MB)" for path in stores)
    right.caption(f"Indexes here and in {ui.plain(str(cache_folder()))}: {named or 'none yet'}")
