"""Why this word? The tokens, groups of neurons and neurons that contribute to a prediction."""

from __future__ import annotations

from statistics import fmean

import streamlit as st

from icebear.app.web import details, ui
from icebear.app.web.relevances import DEFAULT, explained, predicted
from icebear.concepts.attribution.ranking import Ranking
from icebear.concepts.attribution.result import Relevance
from icebear.concepts.methods.registry import METHODS
from icebear.records import TokenScore


def show() -> None:
    prompt, counterfactual = ui.prompts()
    ui.model()
    tokens = predicted(ui.model_name(), prompt)
    _pick("Why this token? (click one)", "target", tokens)
    _pick("Rather than (optional)", "contrast", tokens)
    with st.expander("Advanced"):
        left, middle, right = st.columns(3)
        target = ui.typed(left.text_input, "Target token (empty: the most probable)", "target")
        contrast = ui.typed(middle.text_input, "Contrast token", "contrast")
        usable = (name for name, one in METHODS.items() if one.scores_neurons)
        names = [name for name in usable if counterfactual or not METHODS[name].needs_counterfactual]
        method = ui.typed(right.selectbox, "Method", "method", [DEFAULT, *names])
    method = "attnlrp" if method == DEFAULT and not counterfactual else method
    relevance = explained(prompt, target or None, contrast or None, method, counterfactual)
    st.markdown(f"#### Why {ui.target_label(relevance)}?")
    ui.heat(relevance)
    st.caption("Red supports the target, blue opposes it; dotted: attention sinks, ignored.")
    st.caption(ui.plain(relevance.comparison_text() + _margins(relevance)))
    with st.expander("Method check"):
        st.caption(ui.plain(relevance.conservation_text()))
    if not relevance.sites:
        st.info("For this model family only tokens have relevance; docs/new-family.md shows how to add its neurons.")
        return
    ui.group_cards(ui.explanation_of(relevance, Ranking(10)))
    details.show(relevance, prompt, target)


def _margins(relevance: Relevance) -> str:
    """Return by how much the target leads the contrast, in the prompt and in the counterfactual, as a sentence."""
    if not relevance.counterfactual or not relevance.contrast_text:
        return ""
    there = fmean(relevance.counterfactual.numbers)
    here = relevance.sums.target + there
    by = [f"{'leads' if margin > 0 else 'trails'} by {abs(margin):.1f} logits" for margin in (here, there)]
    target, contrast = relevance.target_text, relevance.contrast_text
    return f". Against {contrast!r}, {target!r} {by[0]} here and {by[1]} in the counterfactual."


def _pick(label: str, key: str, tokens: list[TokenScore]) -> None:
    """Show the most probable tokens; a click on one fills the text field `key`."""
    texts = {token.text: f"{ui.token_label(token.text)} {token.number}" for token in tokens}
    chosen = st.session_state.get(key) or st.query_params.get(key)
    picked = f"_{key}"
    st.session_state[picked] = chosen if chosen in texts else None

    def fill() -> None:
        st.session_state[key] = st.session_state[picked] or ""

    st.pills(label, list(texts), format_func=texts.__getitem__, key=picked, on_change=fill)
