"""An answer of several tokens: where its words come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from icebear.app.cli.tables.grid import grid, shade
from icebear.render import normalized

if TYPE_CHECKING:
    import icebear
    from icebear.concepts.answers.matrix import Matrix
    from icebear.concepts.answers.sources import SourceBreakdown


def probabilities(answer: icebear.Answer) -> Text:
    """The answer with its less probable tokens on darker colors."""
    parts = zip(answer.token_strings, answer.probabilities, strict=True)
    return Text.assemble(*((token, shade(probability - 1)) for token, probability in parts))


def origins_report(origins: SourceBreakdown) -> Group:
    parts = [(part.name, part.positive, part.negative) for part in origins.parts]
    parts.append(("biases", max(origins.biases, 0), min(origins.biases, 0)))
    rows = [
        (name, f"{positive:+.2f}", f"{negative:+.2f}", f"{(positive + negative) / origins.target:.0%}")
        for name, positive, negative in parts
    ]
    drop = "" if origins.drop is None else f"; {origins.drop:.0%} is lost at their counterfactual values"
    return Group(
        Text(
            f"Sources of the answer's {origins.target:.2f} logits (CP-LRP; remainder {origins.remainder:.1e})", "bold"
        ),
        grid("from", ">positive", ">negative", ">share", rows=rows),
        Text(f"{origins.through_ffn:.0%} of it passes through FFN neurons{drop}.", "dim"),
    )


def matrix_report(matrix: Matrix) -> Group:
    parts: list[Any] = []
    for row, values in zip(matrix.rows, matrix.values.tolist(), strict=True):
        table = Table(box=None, pad_edge=False, show_header=False)
        read = [
            (value, unit) for value, unit in zip(values, matrix.columns, strict=True) if value and not unit.template
        ]
        scale = normalized([value for value, _ in read])
        for share, (value, unit) in sorted(zip(scale, read, strict=True), key=lambda pair: -pair[0])[:5]:
            number = Text(f" {value:+.2f} ", shade(share))
            table.add_row(number, Text(unit.turn, "dim"), Text(" ".join(unit.text.split())))
        parts += [Text(row.text.strip(), "bold"), table]
    return Group(*parts)
