"""Change the answer: a flip of one's own."""

from __future__ import annotations

import streamlit as st

from icebear.app.cli.verbs.demo import PROMPT
from icebear.app.web import flips, ui
from icebear.concepts.attribution.counterfactuals import suggest_counterfactuals


def show() -> None:
    prompt = ui.typed(st.text_area, "Prompt", "prompt", value=PROMPT, height=80)
    left, right = st.columns(2)
    to = ui.typed(left.text_input, "The word it should say", "to", placeholder="desert")
    label = "Source prompt (optional): one that the model continues with this word"
    source = ui.typed(right.text_input, label, "source", placeholder="The camel lives in the")
    with st.container(horizontal=True):
        place = st.container(width="content")
        _suggestions(prompt)
        with st.popover("Advanced", icon=":material/tune:"):
            most = ui.typed(st.number_input, "Edits at most", "most", 1, 50, 10)
            unbounded = ui.typed(st.toggle, "Allow activations outside each neuron's usual range", "unbounded")
    wanted = (prompt, to, source or None, most, unbounded)
    pressed = place.button("Change the answer", type="primary", key="flip", disabled=not to.strip(), help=_help(to))
    if pressed:
        flips.forget(*wanted)
        ui.to_url(run="flip")
    if ui.from_url("run") == "flip" and to.strip():
        flips.show(ui.waited(flips.started(*wanted), stops=True))


def _help(to: str) -> str | None:
    return None if to.strip() else "Write the word that the model should say."


def _suggestions(prompt: str) -> None:
    """Suggest source prompts with their answers on a click; another click chooses one."""
    if not isinstance(ui.read_prompt(prompt), str):
        return
    if st.button("Suggest words and source prompts", key="suggest_sources", icon=":material/lightbulb:"):
        st.session_state["sources"] = (prompt, suggest_counterfactuals(ui.model(), prompt, 5))
    suggested_for, rows = st.session_state.get("sources", (None, []))
    if suggested_for != prompt:
        return
    if not rows:
        st.caption("No similar prompt has another answer; write one.")
    by_text = {row.text: row for row in rows}

    def take() -> None:
        row = by_text.get(st.session_state["chosen_source"])
        if row:
            st.session_state.update(source=row.text, to=row.answer)

    names = {row.text: f"{ui.plain(row.text)} → {ui.token_label(row.answer)}" for row in rows}
    st.pills("Say the answer of", list(names), format_func=names.__getitem__, key="chosen_source", on_change=take)
