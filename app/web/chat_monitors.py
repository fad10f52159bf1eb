"""Monitors in the chat: which of them read it, and a strip below each message with what they say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import shorten
from typing import Any

import streamlit as st

from icebear.app.web.shared import jobs, markdown, tables
from icebear.errors import IcebearError
from icebear.models.model import Model
from icebear.models.text.chat import Chat
from icebear.render import heatmap
from icebear.steering.monitor.monitor import Monitor, Verdict
from icebear.steering.monitor.watching import read_message, watching

PASSAGES_SHOWN = 5
"""Flagged passages of a message, the largest values."""
QUOTED = 80
"""The longest passage that is quoted, in characters."""


def add(monitor: Monitor) -> None:
    """Let a monitor read the conversation, instead of one of the same name; for callbacks."""
    names = [*(st.session_state.get("chosen_monitors") or ()), monitor.name]
    st.session_state.setdefault("monitors", {})[monitor.name] = monitor
    st.session_state["chosen_monitors"] = list(dict.fromkeys(names))


def chosen() -> list[Monitor]:
    known = st.session_state.get("monitors", {})
    return [known[name] for name in st.session_state.get("chosen_monitors") or () if name in known]


def choose() -> None:
    """Draw the choice of the monitors that read the conversation."""
    with st.popover("Monitor", icon=":material/visibility:"):
        known = list(st.session_state.get("monitors", {}))
        if known:
            options: dict[str, Any] = {"selection_mode": "multi", "format_func": markdown.plain}
            st.pills("Read by", known, key="chosen_monitors", persist_state="session", **options)
            st.toggle("Stop when flagged", key="stop_when_flagged", persist_state="session")
        else:
            st.caption("Make a monitor of a concept in Concepts & steering, or take a saved one.")
        st.file_uploader("A saved monitor", "json", key="monitor_file", on_change=_upload)
    if names := [monitor.name for monitor in chosen()]:
        st.caption(markdown.plain(f"Read by {', '.join(names)}."))


def _upload() -> None:
    uploaded = st.session_state["monitor_file"]
    if uploaded is None:
        return
    try:
        monitor = Monitor.from_json(uploaded.getvalue().decode("utf-8", errors="replace"))
        monitor.check(jobs.loading().outcome())
    except IcebearError as error:
        st.session_state["trouble"] = str(error)
        return
    add(monitor)


@contextmanager
def reading(model: Model, chat: Chat) -> Iterator[dict[str, Any]]:
    """Let the chosen monitors read the answer to a conversation. Yields options of the generation."""
    monitors = chosen()
    if not monitors:
        yield {}
        return
    with watching(model, monitors) as log:
        try:
            yield {"stopping_criteria": [log]} if st.session_state.get("stop_when_flagged") else {}
        finally:  # also of an answer that a click ends
            for verdicts in log.texts:
                _known("assistant", chat).update(verdicts)


def strip(chat: Chat, turn: int) -> None:
    """Show what the chosen monitors say about a message of the user, or about an answer that they read."""
    try:
        verdicts = _verdicts(chat, turn)
    except IcebearError as error:
        st.error(markdown.message(error))
        return
    for verdict in verdicts:
        _show(verdict, f"flagged {turn} {verdict.monitor}")


def _known(role: str, chat: Chat) -> dict[str, Verdict]:
    """Return monitor -> verdict of the last message of a conversation by the user, or of the answer to it."""
    return st.session_state.setdefault("verdicts", {}).setdefault((role, chat.to_json(None)), {})


def _verdicts(chat: Chat, turn: int) -> list[Verdict]:
    monitors, (role, content) = chosen(), (chat.messages[turn]["role"], chat.messages[turn]["content"])
    asks = role == "user" and isinstance(content, str)
    if not monitors or not (asks or role == "assistant") or not turn + asks:
        return []
    known = _known(role, chat.of(chat.messages[: turn + asks]))
    if asks:
        missing = [monitor for monitor in monitors if monitor.name not in known]
        known.update({verdict.monitor: verdict for verdict in read_message(jobs.model(), missing, content)})
    return [known[monitor.name] for monitor in monitors if monitor.name in known]


def _show(verdict: Verdict, key: str) -> None:
    uncounted = [position for position, value in enumerate(verdict.values) if not value]
    values = list(verdict.values)
    tokens = heatmap(list(verdict.tokens), values, template=uncounted, full_color=verdict.threshold)
    st.html(markdown.HEAT.format(tokens))
    name, limit = markdown.plain(verdict.monitor), f"threshold {verdict.threshold:.2f}"
    if not verdict.flagged:
        st.caption(f"{name}: {verdict.value:+.2f}, {limit}")
        return
    flags = sorted(verdict.flags, key=lambda flag: -flag.value)
    quotes = [f"\u201c{shorten(flag.text, QUOTED, placeholder=' ...')}\u201d {flag.value:+.2f}" for flag in flags]
    more = f" and {len(quotes) - PASSAGES_SHOWN} more" if len(quotes) > PASSAGES_SHOWN else ""
    st.markdown(f"**Flagged by {name}** ({limit}): {markdown.plain(', '.join(quotes[:PASSAGES_SHOWN]) + more)}")
    sign = {part.neuron: part.polarity for part in st.session_state["monitors"][verdict.monitor].neurons}
    pairs = [(neuron, sign.get(neuron, "")) for flag in flags for neuron, _ in flag.neurons]
    if pairs:
        tables.neuron_pills("Neurons that contribute most", pairs, key)
