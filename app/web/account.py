"""Below a conversation: why the model wrote the selected words."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pandas
import streamlit as st

from icebear.app.web import ui
from icebear.app.web.details import BLUE, RED
from icebear.app.web.relevances import answered, explained_words
from icebear.concepts.attribution.ranking import Ranking
from icebear.concepts.attribution.result import Relevance
from icebear.concepts.attribution.sources import SourceBreakdown, source_breakdown
from icebear.concepts.attribution.units import units
from icebear.concepts.models.answer import Answer
from icebear.concepts.models.chat import Chat

WORD, ALTERNATIVE = "word", "alternative"


def selects_alternative() -> bool:
    """Return whether a click selects the alternative, not the word to explain."""
    return st.session_state.get("clicks") == ALTERNATIVE


def show(chat: Chat, turn: int, span: tuple[int, int]) -> None:
    text = Chat(chat.messages[: turn + 1]).to_json(None)
    answer = answered(ui.model_name(), text, turn)
    start, stop = answer.token_range(span)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.segmented_control("Select", [WORD, ALTERNATIVE], default=WORD, required=True, key="clicks")
        contrast = ui.typed(st.text_input, "Rather than (another phrase, optional)", "rather", width=260)
    relevance = explained_words(text, turn, (start, stop), contrast.strip() or None)
    _tokens(relevance, answer.probabilities[start:stop])
    _parts(relevance, origins_of(ui.model_name(), text, turn, (start, stop)))
    explanation = ui.explanation_of(relevance, Ranking(10, position="last"))
    before = Chat(chat.messages[:turn])
    if explanation.nodes:
        st.markdown(f"#### The neurons that contribute most to {ui.target_label(relevance)}")
        ui.node_table(explanation, "chat", ("neuron", "token", "relevance"), prompt=before.to_json(None))
    _circuit(before, answer, start, relevance)


@st.cache_data(max_entries=64, show_spinner="Explaining ...")
def origins_of(name: str, chat: str, turn: int, span: tuple[int, int]) -> SourceBreakdown:
    return source_breakdown(ui.model(), answered(name, chat, turn), span)


def _tokens(relevance: Relevance, probabilities: Sequence[float]) -> None:
    st.markdown(f"#### Why {ui.target_label(relevance)}?")
    ui.heat(relevance, answer=True)
    chances = ", ".join(f"{chance:.0%}" for chance in probabilities[:12])
    more = ", ..." if len(probabilities) > 12 else ""
    st.caption(ui.plain(f"Probability: {chances}{more}"))
    st.caption("Red supports it, blue opposes it; dotted: attention sinks, ignored; gray: the chat template.")


def _parts(relevance: Relevance, sources: SourceBreakdown) -> None:
    left, right = st.columns(2)
    with left:
        st.markdown("#### What each message contributes")
        parts = sorted(units(relevance, "turn"), key=lambda part: part[0].template)  # messages first
        rows = [
            {"turn": unit.turn, "relevance": value, "text": "(template)" if unit.template else unit.text.strip()}
            for unit, value in parts
        ]
        st.dataframe(pandas.DataFrame(rows), hide_index=True, column_config={"relevance": ui.SIGNED})
    with right:
        st.markdown("#### Where the answer comes from")
        bars = {part.name: (part.positive, part.negative) for part in sources.parts}
        bars["biases"] = (max(sources.biases, 0.0), min(sources.biases, 0.0))
        table = pandas.DataFrame.from_dict(bars, orient="index", columns=["supports", "opposes"])
        st.bar_chart(table, color=[RED, BLUE], horizontal=True, sort=False, x_label="", y_label="logits")
        st.caption(f"{sources.through_ffn:.0%} passes through MLP neurons (overlaps with the bars).")
    with st.expander("Method check"):
        bars_line = (
            f"The logits of {sources.text!r} by CP-LRP: {sources.target:.2f} = the bars {sources.remainder:+.1e}."
        )
        st.caption(ui.plain(f"{relevance.conservation_text()}. {bars_line}"))


def _circuit(before: Chat, answer: Answer, start: int, relevance: Relevance) -> None:
    """Offer the circuit behind the difference to the same conversation with another last message of the user."""
    users = [place for place, message in enumerate(before.messages) if message["role"] == "user"]
    if not users or relevance.target is None:
        return
    with st.expander("The circuit behind it"):
        message = before.messages[users[-1]]["content"]
        label = "Compared with another message of the same number of tokens"
        other = st.text_input(label, message, key=f"other {message}")
        changed = [*before.messages]
        changed[users[-1]] = {"role": "user", "content": other}
        values = {
            "prompt": _up_to(before.messages, answer, start),
            "counterfactual": _up_to(changed, answer, start),
            "target": relevance.target.text,
            "contrast": relevance.contrast_text,
        }
        go = partial(ui.go, "circuit", **values)
        st.button("Open its circuit", key="open_circuit", on_click=go, disabled=other == message)


def _up_to(messages: Any, answer: Answer, start: int) -> str:
    """Return the messages and the beginning of the answer as JSON, for the field for a prompt."""
    chat, begun = Chat(messages), "".join(answer.token_strings[:start])
    return (chat.then("assistant", begun, answer.ids[:start]) if start else chat).to_json(None)
