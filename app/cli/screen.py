"""The one screen of `icebear explain`: predictions, tokens, three groups of neurons, and how far they carry."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.constrain import Constrain
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import icebear
from icebear.actmax.explanation import ExplainedGroup
from icebear.actmax.sentences import (
    effect_text,
    group_text,
    limits_sentence,
    reach_sentence,
    sum_text,
    together_sentence,
    tokens_sentence,
)
from icebear.app.cli.terminal import heatmap
from icebear.records import TokenScore

WIDTH = 100


def explanation_screen(explanation: icebear.Explanation, units: Table | None = None) -> Constrain:
    """At most 40 lines of 100 columns. units: a table in place of the tokens."""
    relevance = explanation.relevance
    tokens = units or heatmap(relevance.prompt.strings, relevance.tokens.tolist(), relevance.prompt.template)
    parts: list[Any] = [
        *_predictions(explanation),
        Padding(tokens, (1, 2)),
        Text(tokens_sentence(relevance)),
        Text(together_sentence(explanation)),
        Text(),
        Text.assemble(
            ("Groups of these nodes by what they do to the next word", "bold"), " [random nodes in brackets]"
        ),
        *(line for number, group in enumerate(explanation.groups, 1) for line in _group(number, group)),
        Text(),
        Text(reach_sentence(explanation)),
        Text(limits_sentence(explanation), "dim"),
    ]
    return Constrain(Group(*parts), WIDTH)


def _predictions(explanation: icebear.Explanation) -> list[Text]:
    relevance, compared = explanation.relevance, explanation.relevance.counterfactual
    head = Text.assemble("Why ", (repr(relevance.target_text), "bold"))
    if relevance.contrast_text:
        head.append(f", not {relevance.contrast_text!r}")
    head.append(f"?  method: {repr(relevance.method).removesuffix('()')}", "dim")
    lines = [head, Text(f"Predicted: {_listed(relevance.predictions)}")]
    if compared and compared.predictions:
        lines.append(Text(f"Counterfactual: {_listed(compared.predictions)}, after {''.join(compared.prompts[0])!r}"))
    return lines


def _listed(tokens: tuple[TokenScore, ...]) -> str:
    return ", ".join(f"{token.text!r} {token.number}" for token in tokens[:3])


def _group(number: int, group: ExplainedGroup) -> list[Text]:
    raises, lowers = group.group.words()
    lines = [
        Text.assemble((f"{number}. {effect_text(raises, lowers)}", "bold")),
        Text(f"   {group_text(group)}", "dim"),
        *([Text(f"   {sum_text(group)}", "dim", no_wrap=True, overflow="ellipsis")] if group.group.interacts else []),
    ]
    for node in group.strongest:
        label = f"  [{node.label}]" if node.label else ""
        here = f"   {node.ranked.neuron} at {node.token!r} {effect_text(node.raises[:3], node.lowers[:3])}{label}"
        lines.append(Text(here, no_wrap=True, overflow="ellipsis"))
    return lines
