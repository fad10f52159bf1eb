"""Before a conversation begins: a prompt of one's own, what to do with it, and what is here."""

from __future__ import annotations

from pathlib import Path

import pandas
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from icebear.actmax.explanation import Explanation
from icebear.actmax.labels.scores import clearest
from icebear.app.cli.verbs.demo import OTHER, PROMPT
from icebear.app.web.explain import USUAL, explained
from icebear.app.web.state import (
    forget_other,
    go,
    has_labels,
    heat,
    investigation,
    model,
    neuron_table,
    node_table,
    other_prompt,
    plain,
    store,
    to_steer,
    token_label,
    typed,
)
from icebear.cache import cache_folder, cached
from icebear.concepts.attribution.ranking import Ranking
from icebear.concepts.attribution.result import Relevance
from icebear.concepts.models.presets import PRESETS
from icebear.errors import IcebearError

THINGS = (
    ("Why this word?", "The tokens and neurons that carried it, or carried it rather than another word."),
    ("Who else knows it?", "The neurons of the whole model that have to do with the word."),
    (
        "Does it depend on one neuron?",
        "Switch the neuron off that spoke most for it, and read what comes then.",
    ),
)


def show() -> None:
    st.markdown("#### What does the model say next, and which of its neurons made it say so?")
    prompt = typed(st.text_area, "A prompt of your own", "prompt", value=PROMPT, height=80, on_change=forget_other)
    counterfactual = other_prompt(prompt, OTHER if prompt == PROMPT else "")
    answer = st.container()
    buttons = _things()
    neurons = st.container()
    _here()  # before the model is waited for
    with answer:
        relevance = _explained(prompt, counterfactual)
    if relevance is None:
        return
    buttons[0].button("Explain it", key="try_explain", on_click=go, args=("explain",))
    word = relevance.target_text
    buttons[1].button(
        f"Search for {token_label(word)}",
        key="try_search",
        on_click=go,
        args=("search",),
        kwargs={"text": word.strip()},
    )
    explanation = investigation(relevance, Ranking(10))
    if explanation.nodes:
        strongest = explanation.nodes[0].ranked.neuron
        buttons[2].button(f"Switch {strongest} off", key="try_steer", on_click=to_steer, args=(strongest,))
        with neurons:
            neurons_of(explanation)
            _clearest()


def _things() -> list[DeltaGenerator]:
    """What to try; returns the places of the buttons, which come when the prompt is explained."""
    places = []
    for column, (title, sentence) in zip(st.columns(3), THINGS, strict=True):
        with column.container(border=True):
            st.markdown(f"**{title}**")
            st.caption(sentence)
            places.append(st.empty())
    return places


def _explained(prompt: str, counterfactual: str | None) -> Relevance | None:
    try:
        model()
        found = explained(prompt, None, None, USUAL if counterfactual else "attnlrp", counterfactual)
    except IcebearError as error:  # such as of a prompt without a mask
        st.info(plain(str(error)))
        return None
    heat(found, answer=True)
    st.caption(plain(found.meaning()))
    return found


def neurons_of(explanation: Explanation) -> None:
    """Those of a ranking, with what they write."""
    relevance = explanation.relevance
    against = f" rather than {token_label(relevance.contrast_text)}" if relevance.contrast_text else ""
    st.markdown(f"#### The neurons that spoke most for {token_label(relevance.target_text)}{against}")
    node_table(explanation, "tried", ("neuron", "token", "relevance", "promotes"))


def _clearest() -> None:
    """The neurons of the store whose labels hold."""
    if not has_labels():
        return
    with store() as opened:
        found = clearest(opened.labels.all_meanings())
    if not found:
        return
    st.markdown("#### The neurons that mean something clear")
    table = pandas.DataFrame(
        {
            "neuron": [str(meaning.neuron) for meaning in found],
            "sign": [meaning.polarity for meaning in found],
            "layer": [meaning.neuron.layer for meaning in found],
            "label": [meaning.text for meaning in found],
            "score": [meaning.score for meaning in found],
            "by": [meaning.by for meaning in found],
        }
    )
    st.caption("On documents that the labels were not made from; tick a row for the card, click a head to sort by it.")
    score = {"score": st.column_config.NumberColumn("AUROC", format="%.2f")}
    opens = [(meaning.neuron, meaning.polarity) for meaning in found]
    neuron_table(table, "clearest", opens.__getitem__, sorts=True, height=280, column_config=score)


def _here() -> None:
    """Models and stores on this machine."""
    st.markdown("#### On this machine")
    left, right = st.columns(2)
    models = [name for name, preset in PRESETS.items() if cached(preset.folder)]
    left.caption("Models that need no download: " + (", ".join(map(plain, models)) or "none yet"))
    stores = [*sorted(Path.cwd().glob("*.db")), *sorted(cache_folder().glob("*.db"))]
    named = ", ".join(f"{plain(path.name)} ({path.stat().st_size / 1e6:.0f} MB)" for path in stores)
    right.caption(f"Stores here and in {plain(str(cache_folder()))}: {named or 'none yet'}")
