"""A conversation in a terminal: what the model answers, and where it came from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.style import Style
from rich.table import Table
from rich.text import Text

from icebear.app.cli.terminal import grid, nodes_table, token_relevance, units_table
from icebear.concepts.render import color, hexadecimal, ink, shares

if TYPE_CHECKING:
    from icebear.concepts.attribution.matrix import Matrix
    from icebear.concepts.attribution.sources import Origins
    from icebear.concepts.models.answer import Answer
    from icebear.concepts.models.model import Model

HELP = """/why WORDS [rather than WORDS]  which words and neurons made the last answer say so
/from                           how much of it came from the context, the question, its own start
/save FILE                      the conversation as JSON, for --messages
/quit                           end"""


def stream(console: Console, model: Model, prompt: Any, **options: Any) -> Answer:
    """The answer, printed as it comes."""
    shown = ""

    def show(ids: list[int]) -> None:
        nonlocal shown
        text = "".join(model.pieces(ids))
        if not text.endswith("\ufffd"):  # a character that the next token completes
            new = "".join(sign for sign in text[len(shown) :] if sign.isprintable() or sign in "\n\t")
            console.print(Text(new), end="", soft_wrap=True)
            shown = text

    answer = model.answer(prompt, on_token=show, **options)
    console.print()
    return answer


def probabilities(answer: Answer) -> Text:
    """The answer, the less probable a token was the darker."""
    text = Text()
    for token, probability in zip(answer.token_strings, answer.probabilities, strict=True):
        rgb = color(probability - 1)
        text.append(token, Style(color=ink(rgb), bgcolor=hexadecimal(rgb)))
    return text


def origins_table(found: Origins) -> Group:
    """Parts of the number explained, positive and negative apart; what goes through FFN neurons below it."""
    table = grid("from", ">positive", ">negative", ">share")
    rows = [(part.name, part.positive, part.negative) for part in found.parts]
    for name, positive, negative in [*rows, ("biases", max(found.biases, 0), min(found.biases, 0))]:
        table.add_row(name, f"{positive:+.2f}", f"{negative:+.2f}", f"{(positive + negative) / found.target:.0%}")
    said = f"{found.through_ffn:.0%} of it goes through FFN neurons, wherever it came from"
    drop = "" if found.drop is None else f"; {found.drop:.0%} is lost with theirs of the other prompt"
    return Group(
        Text(f"Where the answer's {found.target:.2f} logits come from (CP-LRP; rest {found.rest:.1e})", "bold"),
        table,
        Text(f"{said}{drop}.", "dim"),
    )


def matrix_table(found: Matrix) -> Group:
    """Each sentence of the answer with the sentences that it rests on, the largest first."""
    parts: list[Any] = []
    for row, values in zip(found.rows, found.values.tolist(), strict=True):
        parts.append(Text(row.text.strip(), "bold"))
        table = Table(box=None, pad_edge=False, show_header=False)
        read = [pair for pair in zip(found.columns, values, strict=True) if not pair[0].template and pair[1]]
        scale = shares([value for _, value in read])
        for share, (unit, value) in sorted(zip(scale, read, strict=True), key=lambda one: -one[1][1])[:5]:
            rgb = color(share)
            number = Text(f" {value:+.2f} ", Style(color=ink(rgb), bgcolor=hexadecimal(rgb)))
            table.add_row(number, Text(unit.turn, "dim"), Text(" ".join(unit.text.split())))
        parts.append(table)
    return Group(*parts)


def why(model: Model, answer: Answer, words: str, contrast: str) -> Group:
    """Which words and neurons made an answer say so."""
    from icebear.actmax.explanation import Explanation
    from icebear.concepts.attribution.attribute import attribute
    from icebear.concepts.attribution.ranking import Ranking
    from icebear.concepts.attribution.units import units

    relevance = attribute(model, answer, contrast=contrast or None, span=words, record="last")
    explanation = Explanation.of(model, relevance, Ranking(8, "ffn"))
    words_table = units_table(units(relevance, "word"))
    return Group(token_relevance(relevance, words_table), nodes_table(explanation, "FFN neurons where it was said"))
