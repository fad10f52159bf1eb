"""Beside a conversation: the source breakdown of the selected words of an answer, by relevance."""

from __future__ import annotations

from functools import partial
from typing import Any

import streamlit as st

from icebear.actmax.labels.significance import label_title
from icebear.app.web import chat_clicks
from icebear.app.web.shared import explanations, jobs, links, markdown, served, tables, words
from icebear.app.web.shared.background_job import Job
from icebear.app.web.shared.bars import Bar, bars
from icebear.app.web.shared.explanations import answer_at, conversation_answer, explained_words
from icebear.concepts.answers.breakdown import SourceBreakdown, SourcePart, part_names, source_breakdown
from icebear.concepts.results.ranking import Ranking
from icebear.errors import InputError
from icebear.explanation.node_meanings import STRONGEST, node_meanings
from icebear.explanation.sentences import through_text
from icebear.models.text.answer import Answer
from icebear.models.text.chat import Chat

UNWRITTEN = {"template": "Chat template", "sinks": "Attention sinks"}
"""Parts that nobody wrote."""
NAMES = UNWRITTEN | {
    "the answer's own start": "The answer so far",
    "the contrast's own start": "The alternative so far",
    "system": "System message",
}
"""Parts that are named on this page; others are quoted."""
SHOWN_MEANINGS = 6
"""Labels beside a word."""
QUOTED = 42
"""The longest quote of a part, in characters."""


def show(chat: Chat, turn: int, span: tuple[int, int]) -> SourceBreakdown:
    """Say in a sentence and in bars what the words come from. Return the breakdown."""
    above = st.container()
    contrast = chat_clicks.choose_with_contrast()
    text, answer = conversation_answer(chat, turn)
    with above:
        request = (served.model_name(), text, turn, answer.token_range(span), contrast)
        breakdown = jobs.wait_for_cached(_breakdown_of, *request, stops=True)
        st.markdown(f"## Why {markdown.target_label(breakdown.relevance)}?")
        st.markdown(sentence(breakdown))
        st.html(bars(parts(breakdown)))
        st.caption(f"Red supports it, blue opposes it, in logits. {through_text(breakdown)} (overlaps with the bars).")
        _meanings(text, turn, answer.token_range(span), contrast)
    return breakdown


def _meanings(text: str, turn: int, span: tuple[int, int], contrast: str | None) -> None:
    """Show the labels of the strongest neurons and heads behind the words, if there is an index with labels."""
    if not served.has_readable_store():
        return
    relevance = explained_words(text, turn, span, contrast)
    if relevance.sums.target <= 0:  # it has no shares
        return
    with served.store() as opened:
        rows = node_meanings(relevance, opened)
    if not rows:
        st.caption(f"None of the {STRONGEST} strongest neurons and heads has a label that passed in this index.")
        return
    st.markdown("## What its strongest neurons and heads mean")
    lines = (f"{row.share:.0%} {row.node.neuron}: {label_title(row.meaning)}" for row in rows[:SHOWN_MEANINGS])
    st.markdown("\n".join(f"- {markdown.plain(line)}" for line in lines))
    st.caption(
        f"{len(rows)} of the {STRONGEST} strongest have a label that passed its test. Percent: relevance, as a share "
        "of the explained logits; neurons of several layers pass the same relevance on, so that shares do not add up."
    )
    pairs = [(row.node.neuron, row.meaning.polarity) for row in rows[:SHOWN_MEANINGS]]
    tables.neuron_pills("Open a card", pairs, "meanings")


def colors(chat: Chat, turn: int, span: tuple[int, int]) -> list[words.Colored] | None:
    """Return the tokens of each message with what they contributed; none of a message that is not read. None until it
    is known."""
    try:
        text, answer = conversation_answer(chat, turn)
    except InputError:  # of a broken link, which `show` says
        return None
    contrast = (st.session_state.get("rather") or "").strip() or None
    request = (served.model_name(), text, turn, answer.token_range(span), contrast)
    breakdown = jobs.cached_job(_breakdown_of, *request).result
    if breakdown is None:
        return None
    prompt, values = breakdown.relevance.prompt, breakdown.relevance.tokens.tolist()
    parts: list[words.Colored] = [()] * len(chat.messages)
    for number, part in enumerate(prompt.turns[-turn - 1 :]):  # a template may add a message before them
        inside = range(part.text_start, part.text_stop)
        tokens = [(prompt.strings[at], 0.0 if at in prompt.sinks else values[at]) for at in inside]
        if str(chat.messages[number]["content"]).startswith("".join(piece for piece, _ in tokens)):
            parts[number] = tokens
    return parts


def details(chat: Chat, turn: int, span: tuple[int, int], breakdown: SourceBreakdown) -> None:
    """Show, if this is opened, the tokens behind the bars, the neurons and the circuit."""
    opened = st.expander("Details: tokens, neurons, circuit", key="details", on_change="rerun")
    if not opened.open:
        return
    text, answer = conversation_answer(chat, turn)
    start, stop = answer.token_range(span)
    with opened:
        st.markdown("## The tokens behind the bars")
        st.html(markdown.tokens_and_answer(breakdown.relevance.heatmap(), breakdown.relevance.target_text))
        chances = ", ".join(f"{chance:.0%}" for chance in answer.probabilities[start : min(stop, start + 12)])
        more = ", ..." if stop - start > 12 else ""
        st.caption(
            "Red supports it, blue opposes it; dotted: attention sinks; gray: the chat template. "
            + markdown.plain(f"Probability of the selected words: {chances}{more}")
        )
        relevance = explained_words(text, turn, (start, stop), breakdown.relevance.contrast_text or None)
        explanation = explanations.explanation_of(relevance, Ranking(10, position="last"))
        before = chat.of(chat.messages[:turn])
        if explanation.nodes:
            st.markdown(f"## The neurons that contribute most to {markdown.target_label(relevance)}")
            tables.node_table(explanation, "account", ("neuron", "token", "relevance"), prompt=before.to_json(None))
        _compared(before, answer, start, breakdown)
        bars_line = f"The bars (CP-LRP) sum to {breakdown.target:.2f} logits, remainder {breakdown.remainder:+.1e}."
        st.caption(markdown.plain(f"Method check. {bars_line} Neurons: {relevance.conservation_text()}."))


@st.cache_resource(max_entries=64, show_spinner=False)
def _breakdown_of(name: str, chat: str, turn: int, span: tuple[int, int], contrast: str | None) -> Job:
    """Return the job that finds what the words come from, or has found it, for all visitors."""
    model, answer = jobs.model(), answer_at(name, chat, turn)
    options: dict[str, Any] = {"contrast": contrast} if contrast else {"number": "log-odds"}
    return Job("Explaining", lambda job: source_breakdown(model, answer, span, **options))


def part_name(part: SourcePart) -> str:
    """Return the name of a part, or its text in quotes."""
    return NAMES.get(part.name) or markdown.in_quotes(part.text, QUOTED)


def parts(breakdown: SourceBreakdown) -> list[Bar]:
    """Return a bar for each part, what was written first."""
    rows = [(part_name(part), part.total, part.name in UNWRITTEN) for part in breakdown.parts]
    if abs(breakdown.biases) > 1e-3 * abs(breakdown.target):
        rows.append(("Biases of the model", breakdown.biases, True))
    rows.sort(key=lambda row: (row[2], -row[1]))
    return [Bar(name, value, f"{value:+.2f}", unwritten) for name, value, unwritten in rows]


def sentence(breakdown: SourceBreakdown) -> str:
    """Say which part of the conversation contributed most, and the token in it that did, as Markdown; first if most of
    it belongs to no message."""
    relevance, contrast = breakdown.relevance, breakdown.relevance.contrast_text
    best = max((part for part in breakdown.parts if part.name not in UNWRITTEN), key=lambda part: part.total)
    nobody = max((bar for bar in parts(breakdown) if bar.is_control), key=lambda bar: bar.value, default=None)
    most = f"Most of it ({nobody.number}) belongs to no word: {nobody.name.lower()}. " if nobody else ""
    most = most if nobody and nobody.value > max(best.total, breakdown.target / 2) else ""
    if best.total <= 0:
        return f"{most}No message supports it."
    values = {
        position: value
        for position, (name, value) in enumerate(zip(part_names(relevance), relevance.tokens.tolist(), strict=True))
        if name == best.name
    }
    others = markdown.plain(contrast.strip()) or "the other likely words"
    name = part_name(best)
    behind = "" if breakdown.target > 0 else f" But the model prefers {others} here."
    name = markdown.plain(name[0].lower() + name[1:])
    text = (
        f"{most}**Of the messages, {name} contributed most: {best.total:+.1f}** of the {breakdown.target:.1f} logits "
        f"by which it leads {others}."
    )
    if values:  # not of the alternative's own start
        top = max(values, key=lambda position: values[position])
        word = markdown.token_label(relevance.prompt.strings[top].strip())
        text += f" The strongest word in it is **{word}** ({values[top]:+.1f})."
    return text + behind


def _compared(before: Chat, answer: Answer, start: int, breakdown: SourceBreakdown) -> None:
    """Offer the stages of the difference to the same conversation with another last message of the user, and its
    circuit."""
    messages = [message["content"] for message in before.messages if message["role"] == "user"]
    if not messages or breakdown.relevance.target is None:
        return
    st.markdown("## How is it computed?")
    message = messages[-1]
    label = "Compared with another message of the same number of tokens"
    other = st.text_input(label, message, key=f"other {message}")
    values = {
        "prompt": _up_to(before, answer, start),
        "counterfactual": _up_to(before.asking(other), answer, start),
        "target": breakdown.relevance.target.text,
        "contrast": breakdown.relevance.contrast_text,
    }
    with st.container(horizontal=True):
        for view, label in (("why", "Show its stages"), ("circuit", "Open its circuit")):
            go = partial(links.go, view, **values)
            st.button(label, key=f"open_{view}", on_click=go, disabled=other == message)


def _up_to(chat: Chat, answer: Answer, start: int) -> str:
    """Return the chat and the beginning of the answer as JSON, for the field for a prompt."""
    begun = "".join(answer.token_strings[:start])
    return (chat.then("assistant", begun, answer.ids[:start]) if start else chat).to_json(None)
