"""Labels with their scores, and sentences with large activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.style import Style
from rich.table import Table
from rich.text import Text

from icebear.actmax.labels import meanings
from icebear.app.cli.tables.grid import grid, shade
from icebear.db.search import BY, NO_NEURON, absence
from icebear.records import Example, Hit, Meaning, Place
from icebear.render import normalized, visible

if TYPE_CHECKING:
    pass

LABELS_TITLE = "Significant labels with their AUROC; icebear neuron shows the details"


def label_report(polarity: str, meaning: Meaning | None, held_out: dict[str, list[Example]]) -> Group:
    parts: list[Any] = [Text(f"\nPolarity {polarity}: {meanings.label_title(meaning)}", "bold")]
    if meaning:
        parts += [Text(line, "dim") for line in meanings.measured(meaning)]
    if meaning and meaning.significant:
        parts += [examples_table(">", meanings.HELD_OUT[name], rows[:2]) for name, rows in held_out.items() if rows]
    return Group(*parts)


def examples_table(
    value: str, heading: str, examples: Sequence[Example], title: str = "", places: Sequence[Place] = ()
) -> Table:
    """Sentences, and at places what the neuron writes there."""
    rows = []
    for example, place in zip_longest(examples, places[: len(examples)]):
        text = _highlighted(example)
        if place:
            words = (", ".join(map(visible, side)) for side in (place.raises, place.lowers))
            text.append("\nraises {}; lowers {}".format(*words), "dim")
        rows.append((f"{example.value:+.2f}", text))
    return grid(value, heading, rows=rows, title=title)


def _highlighted(example: Example) -> Text:
    """The tokens around the extreme one, which stands out."""
    tokens, extreme = example.sentence.tokens, example.token
    text = Text("..." if extreme > 25 else "")
    parts = normalized(list(example.relevance)) if example.relevance else None
    for at in range(max(0, extreme - 25), min(len(tokens), extreme + 8)):
        style = shade(parts[at]) if parts else Style()
        if tokens[at]:  # empty: part of a character that a later token completes
            text.append(visible(tokens[at]), style + Style(bold=True, underline=True) if at == extreme else style)
    return text.append("..." if extreme + 8 < len(tokens) else "")


def labels_table(labels: Sequence[Meaning], title: str = LABELS_TITLE) -> Table:
    """Automatic labels with their meanings. Labels that are not significant are dim."""
    rows = []
    for row in labels:
        text = (
            Text(row.text) if row.significant else Text.assemble("not significant; best candidate: ", (row.text, "dim"))
        )
        rows.append((str(row.neuron), row.polarity, text, row.by, f"{row.score:.2f}", f"{row.p:.3f}"))
    return grid("neuron", "sign", "label", "by", ">score", ">p", rows=rows, title=title)


def hits_report(
    hits: Sequence[Hit], labels: dict[Any, str | None], absent: Sequence[str], sample: str
) -> Iterator[Table | Text]:
    """The results of a search by kind, the words that no sentence has, and which sentences there are."""
    if absent:
        yield Text(absence(absent))
    for by, title in BY.items():
        own = [hit for hit in hits if hit.by == by]
        rows = [(str(hit.neuron), hit.polarity, "; ".join(hit.why), labels.get(hit) or "") for hit in own]
        if rows:
            yield grid("neuron", "sign", "why", "label", rows=rows, title=title)
    if not hits and not absent:
        yield Text(NO_NEURON)
    yield Text(f"The index holds {sample}.", "dim")
