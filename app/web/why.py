"""Below a conversation: why the model said the words that are marked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas
import streamlit as st

from icebear.app.web import charts
from icebear.app.web.explain import answered, explained_words
from icebear.app.web.start import neurons_of
from icebear.app.web.state import (
    downloads,
    go,
    heat,
    investigation,
    model,
    model_name,
    plain,
    to_steer,
    typed,
    why_heading,
)
from icebear.concepts.attribution.ranking import Ranking
from icebear.concepts.attribution.result import Relevance
from icebear.concepts.attribution.sources import Origins, origins
from icebear.concepts.attribution.units import units
from icebear.concepts.models.answer import Answer
from icebear.concepts.models.chat import Chat

EXPLAINED, AGAINST = "what is explained", "what it is explained against"


def against_wanted() -> bool:
    """Whether a click names the other phrase."""
    return st.session_state.get("clicks") == AGAINST


def show(chat: Chat, turn: int, span: tuple[int, int]) -> None:
    text = Chat(chat.messages[: turn + 1]).to_json(None)
    answer = answered(model_name(), text, turn)
    start, stop = answer.places(span)
    rather = _other_phrase()
    relevance = explained_words(text, turn, (start, stop), rather.strip() or None)
    _tokens(relevance, answer.probabilities[start:stop])
    _parts(relevance, origins_of(model_name(), text, turn, (start, stop)))
    explanation = investigation(relevance, Ranking(10, position="last"))
    before = Chat(chat.messages[:turn])
    if explanation.nodes:
        neurons_of(explanation)
        with st.container(horizontal=True):
            best = explanation.nodes[0].ranked.neuron
            values = {"prompt": before.to_json(None)}
            st.button(f"Send {best} to Steer", key="talk_steer", on_click=to_steer, args=(best,), kwargs=values)
            downloads("why", {"html": explanation.to_html, "json": explanation.to_json})
    _circuit(before, answer, start, relevance)


def _other_phrase() -> str:
    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.segmented_control("A click marks", [EXPLAINED, AGAINST], default=EXPLAINED, required=True, key="clicks")
        return typed(st.text_input, "Rather than (another phrase, optional)", "rather", width=260)


@st.cache_data(max_entries=64, show_spinner="Explaining ...")
def origins_of(name: str, chat: str, turn: int, span: tuple[int, int]) -> Origins:
    return origins(model(), answered(name, chat, turn), span)


def _tokens(relevance: Relevance, probabilities: Sequence[float]) -> None:
    why_heading(relevance)
    heat(relevance, answer=True)
    chances = ", ".join(f"{chance:.0%}" for chance in probabilities[:12])
    more = ", ..." if len(probabilities) > 12 else ""
    st.caption(plain(f"Probability: {chances}{more}. {relevance.account()}."))
    st.caption("Red speaks for it, blue against; dotted: sinks; grey: what the template wrote.")


def _parts(relevance: Relevance, found: Origins) -> None:
    left, right = st.columns(2)
    with left:
        st.markdown("#### What each turn gave")
        parts = sorted(units(relevance, "turn"), key=lambda part: part[0].template)  # messages first
        rows = [
            {"turn": unit.turn, "relevance": value, "text": "(template)" if unit.template else unit.text.strip()}
            for unit, value in parts
        ]
        number = st.column_config.NumberColumn(format="%+.3f")
        st.dataframe(pandas.DataFrame(rows), hide_index=True, column_config={"relevance": number})
    with right:
        st.markdown("#### Where it came from")
        chart = charts.origins(found)
        st.altair_chart(chart)
        st.caption(
            plain(f"The logits of {found.text!r} by CP-LRP: {found.target:.2f} = these bars + rest {found.rest:.1e}")
        )
        st.markdown(f"Through FFN neurons go {found.through_ffn:.0%} of it: a second account, no part of the first.")


def _circuit(before: Chat, answer: Answer, start: int, relevance: Relevance) -> None:
    """The circuit is of a difference to the same conversation with another last message of the user."""
    asked = [place for place, message in enumerate(before.messages) if message["role"] == "user"]
    if not asked or relevance.target is None:
        return
    with st.expander("The circuit behind it"):
        said = before.messages[asked[-1]]["content"]
        other = st.text_input("Compared with another message, of as many tokens", said, key=f"other {said}")
        changed = [*before.messages]
        changed[asked[-1]] = {"role": "user", "content": other}
        values = {
            "prompt": _up_to(before.messages, answer, start),
            "counterfactual": _up_to(changed, answer, start),
            "target": relevance.target.text,
            "contrast": relevance.contrast_text,
        }
        st.button(
            "Open its circuit",
            key="open_circuit",
            on_click=go,
            args=("circuit",),
            kwargs=values,
            disabled=other == said,
        )


def _up_to(messages: Any, answer: Answer, start: int) -> str:
    """The messages and the beginning of the answer, as they stand in a field for a prompt."""
    chat, begun = Chat(messages), "".join(answer.token_strings[:start])
    return (chat.then("assistant", begun, answer.ids[:start]) if start else chat).to_json(None)
