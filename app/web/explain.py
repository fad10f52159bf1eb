"""Which tokens and neurons carried a prediction."""

from __future__ import annotations

import streamlit as st

from icebear.app.cli.verbs.demo import PROMPT
from icebear.app.web import charts
from icebear.app.web.shared import shared
from icebear.app.web.state import (
    downloads,
    forget_other,
    heat,
    investigation,
    model,
    model_name,
    node_table,
    other_prompt,
    plain,
    read_prompt,
    to_steer,
    token_label,
    typed,
    why_heading,
)
from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.attribution.ranking import Ranking
from icebear.concepts.attribution.result import Relevance
from icebear.concepts.methods.registry import METHODS
from icebear.concepts.models.answer import Answer, answer_of
from icebear.concepts.models.chat import Chat
from icebear.records import TokenScore

USUAL = "as usual"
"""AttnLRP, or compared with another prompt difference rules."""
COLUMNS = ("neuron", "relevance", "activation", "counterfactual", "token", "promotes")


def explained(
    prompt: str, target: str | None, contrast: str | None, method: str, counterfactual: str | None
) -> Relevance:
    """Kept for all visitors."""

    def make() -> Relevance:
        other = read_prompt(counterfactual) if counterfactual else None
        known = METHODS.get(method)
        return attribute(model(), read_prompt(prompt), target, contrast, counterfactual=other, method=known)

    with st.spinner("Explaining ..."):
        return shared().relevance((model(), prompt, target, contrast, method, counterfactual), make)


@st.cache_resource(max_entries=64, show_spinner=False)
def answered(name: str, chat: str, turn: int) -> Answer:
    return answer_of(model(), Chat.from_json(chat), turn)


def explained_words(chat: str, turn: int, span: tuple[int, int], contrast: str | None) -> Relevance:
    """The same of words of an answer; neurons where they were said."""

    def make() -> Relevance:
        answer = answered(model_name(), chat, turn)
        return attribute(model(), answer, contrast=contrast, span=span, record="last")

    with st.spinner("Explaining ..."):
        return shared().relevance((model(), chat, turn, span, contrast), make)


@st.cache_data(max_entries=64, show_spinner=False)
def predicted(name: str, prompt: str) -> list[TokenScore]:
    return model().predict(read_prompt(prompt), 10)


def show() -> None:
    prompt = typed(st.text_area, "Prompt", "prompt", value=PROMPT, height=80, on_change=forget_other)
    model()
    tokens = predicted(model_name(), prompt)
    _pick("Why this token? (click one)", "target", tokens)
    _pick("Rather than (optional)", "contrast", tokens)
    counterfactual = other_prompt(prompt)
    with st.expander("Another token, another method"):
        left, middle, right = st.columns(3)
        target = typed(left.text_input, "Target token (empty: the most probable)", "target")
        contrast = typed(middle.text_input, "Contrast token", "contrast")
        usable = (name for name, one in METHODS.items() if one.scores_neurons)
        names = [name for name in usable if counterfactual or not METHODS[name].needs_counterfactual]
        method = typed(right.selectbox, "Method", "method", [USUAL, *names])
    method = "attnlrp" if method == USUAL and not counterfactual else method
    relevance = explained(prompt, target or None, contrast or None, method, counterfactual)
    why_heading(relevance)
    heat(relevance)
    st.caption(plain(f"{relevance.account()}. Red speaks for the token, blue against; dotted: sinks."))
    st.caption(plain(relevance.meaning()))
    if not relevance.sites:
        st.info("Only tokens have relevance in a model of this family; docs/new-family.md adds its neurons.")
        return
    _neurons(relevance)
    _maps(relevance)


def _pick(label: str, key: str, tokens: list[TokenScore]) -> None:
    """The most probable tokens to click on, which fills the text field `key`."""
    texts = {token.text: f"{token_label(token.text)} {token.number}" for token in tokens}
    chosen = st.session_state.get(key) or st.query_params.get(key)
    picked = f"_{key}"
    st.session_state[picked] = chosen if chosen in texts else None

    def fill() -> None:
        st.session_state[key] = st.session_state[picked] or ""

    st.pills(label, list(texts), format_func=texts.__getitem__, key=picked, on_change=fill)


def _neurons(relevance: Relevance) -> None:
    st.markdown("#### The neurons behind the difference" if relevance.counterfactual else "#### The neurons behind it")
    with st.container(horizontal=True):
        site = typed(st.selectbox, "Site", "site", ["ffn and attn", "ffn", "attn", "head"], width=160)
        position = st.selectbox(
            "At token",
            [*(("all", "last") if relevance.counterfactual else ("last", "all")), *range(len(relevance.tokens))],
            key="position",
            format_func=lambda p: p if isinstance(p, str) else f"{p} {relevance.prompt.strings[p]}",
            width=160,
        )
        sign = typed(st.selectbox, "Speaks", "speaks", ["for it", "against it"], width=160)
        polarity = typed(st.selectbox, "Activation", "sign", ["any", "+", "-"], width=160)
        include = typed(st.selectbox, "Sinks", "sinks", ["apart", "included"], width=160)
    last = max(1, max(len(relevance.of(name)) for name in relevance.sites) - 1)
    low, high = st.slider("Layers", 0, last, (0, last), key="layers", persist_state="session")
    ranking = Ranking(
        50,
        None if site == "ffn and attn" else site,
        None if polarity == "any" else polarity,
        position,
        include == "included",
        "+" if sign == "for it" else "-",
        layers=range(low, high + 1),
    )
    explanation = investigation(relevance, ranking)
    if not explanation.nodes:
        st.info("No neuron is left; widen the filters.")
        return
    table = node_table(explanation, "ranked", COLUMNS, height=388)
    best = explanation.nodes[0].ranked.neuron
    with st.container(horizontal=True):
        downloads(
            "neurons",
            {
                "html": explanation.to_html,
                "json": explanation.to_json,
                "csv": lambda: table.to_csv(index=False),
            },
        )
        st.button(f"Send {best} to Steer", on_click=to_steer, args=(best,))


def _maps(relevance: Relevance) -> None:
    if len(relevance.prompt.sinks) == len(relevance.tokens):
        return
    site = st.segmented_control(
        "Map", ["ffn", "attn", "heads"], default="ffn", required=True, key="map", persist_state="session"
    )
    chart = charts.head_map(relevance) if site == "heads" else charts.layer_map(relevance, site)
    st.altair_chart(chart)
    downloads(f"map-{site}", charts.files(chart))
