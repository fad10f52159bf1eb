"""Draw a saved explanation: heatmap, sentences, and the cards of its groups."""

from __future__ import annotations

import re
from collections.abc import Callable

import streamlit as st
from markupsafe import Markup

from icebear.actmax.page import excerpt
from icebear.app.web.shared import markdown, served
from icebear.concepts.results.effect_words import IN_PROMPT
from icebear.explanation.saved import SavedExplanation, SavedGroup, SavedNode
from icebear.records import Example
from icebear.render import heatmap, render

SHARES = (
    "Groups of neurons with similar effects. Sufficiency: the share of the difference that a group recovers alone; "
    "below zero if it moves the other way. Necessity: the share that is lost when only its nodes take their other "
    "values. In brackets: as many random nodes of the same layers and tokens."
)
OTHER_WORDS = (
    "The card of a neuron has other words: those that it raises at its strongest sentences, and those of a lens."
)
AROUND = 10
"""Tokens of a sentence that are shown on each side of its peak."""
DrawPart = Callable[[int, SavedGroup], None]
"""Draws a part of the card of a group, by its number."""
ANSWER = Markup('<div class="heat answer">{}<b>&rarr; {}</b>{}</div>')
RATHER = Markup("<span>not <i>{}</i></span>")


def head(explanation: SavedExplanation) -> None:
    """Show the sentence with its answer, and what it depends on in words."""
    rather = RATHER.format(explanation.contrast.strip() or explanation.contrast) if explanation.contrast else ""
    tokens = heatmap(list(explanation.tokens), list(explanation.relevance), explanation.sinks, explanation.template)
    st.html(ANSWER.format(tokens, explanation.target.strip() or explanation.target, rather))
    st.markdown(markdown.plain(quoted(f"{explanation.tokens_sentence} {explanation.margins_sentence}")))


def quoted(text: str) -> str:
    """Return a text whose quoted tokens have no space at their beginning."""
    return re.sub(r"' (?=[^' ]+')", "'", text)


def cards(explanation: SavedExplanation, switch: DrawPart, foot: DrawPart) -> None:
    """Show the cards of the groups side by side. switch, foot: draw a part of each card."""
    if not explanation.groups:
        return
    st.caption(SHARES)
    for number, (column, group) in enumerate(zip(st.columns(len(explanation.groups)), explanation.groups, strict=True)):
        with column.container(border=True, height="stretch"):
            node = group.strongest[0]
            st.html(render("icebear.app.web.why/group.html", group=group, measured=IN_PROMPT))
            switch(number, group)
            compared = explanation.counterfactual is not None
            values = {"node": node, "compared": compared, "measured": IN_PROMPT, "sentences": _sentences(node)}
            st.html(render("icebear.app.web.why/strongest.html", **values))
            foot(number, group)
    st.caption(markdown.plain(f"{explanation.together_sentence} {explanation.reach_sentence} {OTHER_WORDS}"))


def _sentences(node: SavedNode) -> list[tuple[str, float, Markup]]:
    """Return the sentence with the highest and the one with the lowest activation, if there is an index."""
    neuron = node.ranked.neuron
    if not node.ranked.polarity or not served.has_labels():
        return []
    with served.store() as opened:
        if neuron.site not in opened.facts.get("sites"):
            return []
        sides = [(name, opened.examples(neuron, sign, 1)) for name, sign in (("high", "+"), ("low", "-"))]
    return [(name, rows[0].value, cropped(rows[0])) for name, rows in sides if rows]


def cropped(example: Example) -> Markup:
    """Return the tokens around the peak of a sentence, the peak marked."""
    cut = excerpt(example, AROUND, AROUND)
    tokens, place = cut.sentence.tokens, cut.token
    return Markup("{}<mark>{}</mark>{}").format("".join(tokens[:place]), tokens[place], "".join(tokens[place + 1 :]))
