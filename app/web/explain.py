"""Which tokens and neurons carried a prediction."""

from __future__ import annotations

import threading
from typing import Any

import pandas
import streamlit as st

from icebear.app.cli.demo import PROMPT
from icebear.app.web import charts
from icebear.app.web.state import (
    WIDE,
    downloads,
    forget_other,
    known,
    model,
    model_name,
    neuron_table,
    other_prompt,
    plain,
    read_prompt,
    to_steer,
    token_label,
    typed,
    vocabularies,
)
from icebear.concepts.attribution.again import answer_of
from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.attribution.result import Relevance
from icebear.concepts.methods.registry import METHODS
from icebear.concepts.models.answer import Answer
from icebear.concepts.models.chat import Chat
from icebear.concepts.render import heatmap
from icebear.records import TokenScore

USUAL = "as usual"
"""AttnLRP, or compared with another prompt difference rules."""
ROOM = 1 << 30
"""Bytes of explanations that are kept, but always the last one; one of 4,096 tokens has 2 GB."""
_sizes: dict[tuple, int] = {}  # of those that are kept, oldest first; by the function and what it was asked
_counting = threading.Lock()


@st.cache_resource(show_spinner="Explaining ...")
def explained(
    name: str, prompt: str, target: str | None, contrast: str | None, method: str, counterfactual: str | None
) -> Relevance:
    """Shared by all visitors; a result is never changed."""
    other = read_prompt(counterfactual) if counterfactual else None
    found = attribute(model(), read_prompt(prompt), target, contrast, counterfactual=other, method=METHODS.get(method))
    _make_room(explained, (name, prompt, target, contrast, method, counterfactual), found)
    return found


@st.cache_resource(max_entries=64, show_spinner=False)
def answered(name: str, chat: str, turn: int) -> Answer:
    return answer_of(model(), Chat.from_json(chat), turn)


@st.cache_resource(show_spinner="Explaining ...")
def explained_words(name: str, chat: str, turn: int, span: tuple[int, int], contrast: str | None) -> Relevance:
    """The same of words of an answer; neurons where they were said."""
    answer = answered(name, chat, turn)
    found = attribute(model(), answer, contrast=contrast, span=span, record="last")
    _make_room(explained_words, (name, chat, turn, span, contrast), found)
    return found


def _make_room(cached: Any, asked: tuple, found: Relevance) -> None:
    """Forget the oldest explanations until the others and the one `asked` for have room."""
    size = sum(part.nbytes for site in found.sites.values() for part in site)
    size += sum(part.nbytes for part in found.counterfactual.activation.values()) if found.counterfactual else 0
    with _counting:
        _sizes.pop((cached, asked), None)
        _sizes[cached, asked] = size
        while len(_sizes) > 1 and sum(_sizes.values()) > ROOM:
            function, oldest = next(iter(_sizes))
            del _sizes[function, oldest]
            function.clear(*oldest)


@st.cache_data(max_entries=64, show_spinner=False)
def predicted(name: str, prompt: str) -> list[TokenScore]:
    return model().predict(read_prompt(prompt), 10)


def show() -> None:
    prompt = typed(st.text_area, "Prompt", "prompt", value=PROMPT, height=80, on_change=forget_other)
    model()
    tokens = predicted(model_name(), prompt)
    _pick("Why this token? (click one)", "target", tokens)
    _pick("Rather than (optional)", "contrast", tokens)
    counterfactual = other_prompt()
    with st.expander("Another token, another method"):
        left, middle, right = st.columns(3)
        target = typed(left.text_input, "Target token (empty: the most probable)", "target")
        contrast = typed(middle.text_input, "Contrast token", "contrast")
        usable = (name for name, one in METHODS.items() if one.scores_neurons)
        names = [name for name in usable if counterfactual or not METHODS[name].needs_counterfactual]
        method = typed(right.selectbox, "Method", "method", [USUAL, *names])
    method = "attnlrp" if method == USUAL and not counterfactual else method
    relevance = explained(model_name(), prompt, target or None, contrast or None, method, counterfactual)
    against = f" rather than {token_label(relevance.contrast_text)}" if relevance.contrast_text else ""
    st.markdown(f"#### Why {token_label(relevance.target_text)}{against}?")
    tokens_html = heatmap(list(relevance.token_strings), relevance.tokens.tolist(), relevance.sinks, relevance.template)
    st.html(f'<div class="heat">{tokens_html}</div>')
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
            format_func=lambda p: p if isinstance(p, str) else f"{p} {relevance.token_strings[p]}",
            width=160,
        )
        sign = typed(st.selectbox, "Speaks", "speaks", ["for it", "against it"], width=160)
        polarity = typed(st.selectbox, "Activation", "sign", ["any", "+", "-"], width=160)
        include = typed(st.selectbox, "Sinks", "sinks", ["apart", "included"], width=160)
    last = max(1, max(len(relevance.of(name)) for name in relevance.sites) - 1)
    low, high = st.slider("Layers", 0, last, (0, last), key="layers", persist_state="session")
    ranked = relevance.top(
        50,
        None if site == "ffn and attn" else site,
        None if polarity == "any" else polarity,
        position,
        include == "included",
        "+" if sign == "for it" else "-",
        range(low, high + 1),
    )
    if not ranked:
        st.info("No neuron is left; widen the filters.")
        return
    heads = site == "head"
    words = {} if heads else vocabularies([row.neuron for row in ranked], 5)
    table = pandas.DataFrame(
        {
            "neuron": [str(row.neuron) for row in ranked],
            "relevance": [row.relevance for row in ranked],
            "activation": [None if heads else row.activation for row in ranked],
            **({"there": [row.counterfactual for row in ranked]} if relevance.counterfactual and not heads else {}),
            "token": [relevance.token_strings[row.position] for row in ranked],
            "promotes here": ["" if heads else words[row.neuron].words(row.polarity) for row in ranked],
            **known([(row.neuron, row.polarity) for row in ranked]),
        }
    )
    number = st.column_config.NumberColumn(format="%+.3f")
    formats = {"relevance": number, "activation": number, "there": number, **WIDE}
    if heads:
        st.dataframe(table, hide_index=True, height=388, column_config=formats)
    else:
        st.caption("Click a row for the neuron's card.")
        neuron_table(
            table, "ranked", lambda row: (ranked[row].neuron, ranked[row].polarity), height=388, column_config=formats
        )
    best = ranked[0].neuron
    with st.container(horizontal=True):
        downloads(
            "neurons",
            {
                "html": relevance.to_html,
                "json": relevance.to_json,
                "csv": lambda: table.to_csv(index=False),
            },
        )
        st.button(f"Send {best} to Steer", on_click=to_steer, args=(best,))


def _maps(relevance: Relevance) -> None:
    if len(relevance.sinks) == len(relevance.tokens):
        return
    site = st.segmented_control(
        "Map", ["ffn", "attn", "heads"], default="ffn", required=True, key="map", persist_state="session"
    )
    chart = charts.head_map(relevance) if site == "heads" else charts.layer_map(relevance, site)
    st.altair_chart(chart)
    downloads(f"map-{site}", charts.files(chart))
