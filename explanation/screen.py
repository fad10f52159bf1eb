"""The lines of an explanation, for a terminal and for `print`: predictions, groups, how far they carry."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from icebear.explanation.sentences import (
    effect_text,
    group_text,
    limits_sentence,
    reach_sentence,
    sum_text,
    together_sentence,
    tokens_sentence,
)

if TYPE_CHECKING:
    from icebear.explanation.record import ExplainedGroup, ExplainedNode, ExplainedPrediction
    from icebear.records import TokenScore

WIDTH = 100


@dataclass(frozen=True)
class Line:
    text: str
    style: str = ""
    """``bold``, ``dim`` or nothing."""
    wraps: bool = True
    """Else it is cut at the end of the line."""


def lines(explanation: ExplainedPrediction) -> tuple[list[Line], list[Line]]:
    """Return the lines before and after the tokens of the prompt."""
    title = "Groups of these nodes by what they do to the next word [random nodes in brackets]"
    groups = [line for number, group in enumerate(explanation.groups, 1) for line in _group(number, group)]
    nodes = [] if explanation.groups else [_node(node) for node in explanation.nodes]
    after = [
        Line(tokens_sentence(explanation.relevance)),
        Line(together_sentence(explanation)),
        *([Line(""), Line(title, "bold"), *groups] if groups else [Line(""), *nodes]),
        Line(""),
        Line(reach_sentence(explanation)),
        Line(limits_sentence(explanation), "dim"),
    ]
    return _predictions(explanation), after


def text(explanation: ExplainedPrediction) -> str:
    """Return the lines as plain text of at most `WIDTH` columns."""
    before, after = lines(explanation)
    prompt = [] if explanation.relevance.image else ["", f"  {explanation.relevance.prompt.text}", ""]
    return "\n".join([*map(_plain, before), *prompt, *map(_plain, after)])


def _plain(line: Line) -> str:
    return textwrap.fill(line.text, WIDTH) if line.wraps else line.text[:WIDTH]


def _predictions(explanation: ExplainedPrediction) -> list[Line]:
    relevance, compared = explanation.relevance, explanation.relevance.counterfactual
    against = f", not {relevance.contrast_text!r}" if relevance.contrast_text else ""
    method = repr(relevance.method).removesuffix("()")
    head = Line(f"Why {relevance.target_text!r}{against}?  method: {method}", "bold")
    predicted = [head, Line(f"Predicted: {_listed(relevance.predictions)}")]
    if compared and compared.predictions:
        after = "".join(compared.prompts[0])
        predicted.append(Line(f"Counterfactual: {_listed(compared.predictions)}, after {after!r}"))
    return predicted


def _listed(tokens: tuple[TokenScore, ...]) -> str:
    return ", ".join(f"{token.text!r} {token.number}" for token in tokens[:3])


def _group(number: int, group: ExplainedGroup) -> list[Line]:
    interaction = [Line(f"   {sum_text(group)}", "dim", wraps=False)] if group.group.interacts else []
    head = Line(f"{number}. {effect_text(*group.group.words())}", "bold")
    return [head, Line(f"   {group_text(group)}", "dim"), *interaction, *map(_node, group.strongest)]


def _node(node: ExplainedNode) -> Line:
    label = f"  [{node.label}]" if node.label else ""
    effect = effect_text(node.raises[:3], node.lowers[:3])
    return Line(f"   {node.ranked.neuron} at {node.token!r} {effect}{label}", wraps=False)
