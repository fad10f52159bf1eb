"""The one screen of `icebear explain`: the lines of an explanation, and the tokens in colors."""

from __future__ import annotations

from rich.console import Group
from rich.constrain import Constrain
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import icebear
from icebear.app.cli.tables.grid import heatmap
from icebear.explanation.screen import WIDTH, Line, lines


def explanation_screen(explanation: icebear.Explanation, units: Table | None = None) -> Constrain:
    """At most 40 lines of 100 columns. units: a table in place of the tokens."""
    prompt, (before, after) = explanation.relevance.prompt, lines(explanation)
    tokens = units or heatmap(prompt.strings, explanation.relevance.tokens.tolist(), prompt.template)
    return Constrain(Group(*map(_shown, before), Padding(tokens, (1, 2)), *map(_shown, after)), WIDTH)


def _shown(line: Line) -> Text:
    cut = {} if line.wraps else {"no_wrap": True, "overflow": "ellipsis"}
    return Text(line.text, line.style, **cut)  # type: ignore[arg-type]
