"""Monitors in the chat: which of them read it, and a strip below each message with what they say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import shorten
from typing import Any

import streamlit as st
from markupsafe import Markup

from icebear.app.web.shared import jobs, markdown, tables
from icebear.errors import IcebearError
from icebear.models.model import Model
from icebear.models.text.chat import Chat
from icebear.render import heatmap
from icebear.steering.monitor.monitor import Monitor, Verdict
from icebear.steering.monitor.watching import read_message, watching

PASSAGES_SHOWN = 3
"""Flagged passages of a message, the largest values."""
QUOTED = 80
"""The longest passage that is quoted, in characters."""
STRIP = Markup('<div class="heat" style="font-size:.8rem;max-height:8rem;overflow-y:auto">{}</div>')


def add(monitor: Monitor) -> None:
    """Let a monitor read the conversation, instead of one of the same name; for callbacks."""
    st.session_state.setdefault("monitors", {})[monitor.name] = monitor
    names = {row.name: None for row in (*_chosen(), monitor)}
    st.session_state["chosen_monitors"] = list(names)


def _chosen() -> list[Monitor]:
    known = st.session_state.get("monitors", {})
    return [known[name] for name in st.session_state.get("chosen_monitors") or ()]


def choose() -> None:
    """Draw the choice of the monitors that read the conversation."""
    names = ", ".join(monitor.name for monitor in _chosen())
    label = f"Monitor: {markdown.plain(shorten(names, QUOTED))}" if names else "Monitor"
    with st.popover(label, icon=":material/visibility:"):
        if known := list(st.session_state.get("monitors", {})):
            options: dict[str, Any] = {"selection_mode": "multi", "format_func": markdown.plain}
            st.pills("Read by", known, key="chosen_monitors", persist_state="session", **options)
            st.toggle("Stop when flagged", key="stop_when_flagged", persist_state="session")
        else:
            st.caption("Make a monitor of a concept in Concepts & steering, or take a saved one.")
        st.file_uploader("A saved monitor", "json", key="monitor_file", on_change=_upload)


def _upload() -> None:
    if uploaded := st.session_state["monitor_file"]:
        try:
            monitor = Monitor.from_json(uploaded.getvalue().decode("utf-8", errors="replace"))
            monitor.check(jobs.model_job().outcome())
            add(monitor)
        except IcebearError as error:
            st.session_state["trouble"] = str(error)


@contextmanager
def reading(model: Model, chat: Chat) -> Iterator[dict[str, Any]]:
    """Let the chosen monitors read the answer to a conversation. Yields options of the generation."""
    monitors = _chosen()
    if not monitors:
        yield {}
        return
    with watching(model, monitors) as log:
        try:
            yield {"stopping_criteria": [log]} if st.session_state.get("stop_when_flagged") else {}
        finally:  # also of an answer that a click ends
            for verdicts in log.texts:
                _known("assistant", chat).update(verdicts)


def _known(role: str, chat: Chat) -> dict[str, Verdict]:
    """Return monitor -> verdict of the last message of a conversation by the user, or of the answer to it."""
    return st.session_state.setdefault("verdicts", {}).setdefault((role, chat.to_json(None)), {})


def show_verdicts(chat: Chat, turn: int) -> None:
    """Show what the chosen monitors say about a message of the user, or about an answer that they read."""
    monitors, (role, content) = _chosen(), (chat.messages[turn]["role"], chat.messages[turn]["content"])
    asks = role == "user" and isinstance(content, str)
    if not monitors or not (asks or role == "assistant") or not turn + asks:
        return
    known = _known(role, chat.of(chat.messages[: turn + asks]))
    if asks:
        missing = [monitor for monitor in monitors if monitor.name not in known]
        try:
            known.update({verdict.monitor: verdict for verdict in read_message(jobs.model(), missing, content)})
        except IcebearError as error:  # such as for a vector of another size
            st.error(markdown.message(error))
    if asks and chat.messages[turn].get("image"):
        st.caption("Monitors read the text of this message, not its image.")
    for monitor in monitors:
        if monitor.name in known:
            _show(monitor, known[monitor.name], f"flagged {turn} {monitor.name}")


def _show(monitor: Monitor, verdict: Verdict, key: str) -> None:
    name, limit = markdown.plain(verdict.monitor), f"threshold {verdict.threshold:.2f}"
    if verdict.flagged:
        flags = sorted(verdict.flags, key=lambda flag: -flag.value)
        quotes = [f"{markdown.in_quotes(flag.text, QUOTED)} {flag.value:+.2f}" for flag in flags]
        more = f" and {len(quotes) - PASSAGES_SHOWN} more" * (len(quotes) > PASSAGES_SHOWN)
        st.markdown(f"**Flagged by {name}** ({limit}): {markdown.plain(', '.join(quotes[:PASSAGES_SHOWN]) + more)}")
        sign = {part.neuron: part.polarity for part in monitor.neurons}
        if pairs := [(neuron, sign.get(neuron, "")) for flag in flags for neuron, _ in flag.neurons]:
            tables.neuron_pills("Neurons that contribute most", pairs, key)
    else:
        st.caption(f"{name}: {verdict.value:+.2f}, {limit}")
    values = list(verdict.values)
    full_color = 2 * max([verdict.threshold, *map(abs, values)])  # at half of it any text has a contrast of 4.5
    tokens = heatmap(list(verdict.tokens), values, full_color=full_color)
    st.html(STRIP.format(tokens))
