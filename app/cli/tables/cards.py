"""The card of a neuron, and the words that its weights promote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from icebear.actmax.index.classes import class_name
from icebear.actmax.page import NOT_NEAR, RELMAX, WRITES, nearest_title, token_count_note, writes_about
from icebear.app.cli.tables.grid import grid
from icebear.app.cli.tables.labels import examples_table, label_report
from icebear.records import Projection, Promotion
from icebear.render import visible

if TYPE_CHECKING:
    import icebear
    from icebear.concepts.vocabulary.lens import MeanLens

PROJECTED_TOKENS = 10
"""Tokens of a projection on a card."""


def projections_report(projections: Sequence[Projection], rows: int | None = None) -> list[Table | Text]:
    """The first tokens by the better lens as a table, the other lens as one line, and how reliable the table is."""
    parts: list[Table | Text] = []
    for first in projections[:1]:
        shown = replace(first, promoted=first.promoted[:rows], suppressed=first.suppressed[:rows], reliability=None)
        parts.append(projection_table(shown) if first.has_words else Text(first.no_words, "dim"))
        parts += [Text(f"Reliability in this layer: {first.reliability}.", "dim")] if first.reliability else []
    return parts + [Text(visible(one.line), "dim") for one in projections[1:]]


def projection_table(projection: Projection) -> Table:
    by_std = projection.has_logits and projection.std is not None
    numbers = [*(["logit"] if projection.has_logits else []), *(["per std"] if by_std else []), "z"]
    columns = [f">{name}" for name in numbers]

    def cells(token: Promotion) -> list[str]:
        logit = token.logit or 0.0
        std = projection.std or 0.0
        values = {"logit": f"{logit:+.3f}", "per std": f"{logit * std:+.2f}", "z": f"{token.z:+.1f}"}
        return [repr(token.text), *(values[name] for name in numbers)]

    pairs = zip(projection.promoted, projection.suppressed, strict=True)
    rows = ([*cells(up), *cells(down)] for up, down in pairs)
    return grid("promotes (+)", *columns, "suppresses (-)", *columns, rows=rows, title=projection.about)


def reliability_table(lens: MeanLens) -> Table:
    """How well both lenses predict what one unit of an FFN neuron does, by layer."""
    layers = enumerate(zip(lens.direct, lens.reliability, strict=True))
    rows = [
        (str(layer), *(f"{number:.2f}" for number in (*direct[:2], *mean)))
        for layer, (direct, mean) in layers
        if direct and mean
    ]
    columns = (">logit lens", ">five words", ">averaged Jacobian", ">five words", ">mean of other texts")
    title = "Correlation with the effect of one unit in one text; effect on the first five words, of the largest five"
    return grid(">layer", *columns, rows=rows, title=title)


def card_report(card: icebear.Card) -> Group:
    statistics, largest = card.statistics, max(card.statistics.histogram) or 1
    bars = "".join(" ▁▂▃▄▅▆▇█"[-(-8 * count // largest)] for count in statistics.histogram)
    parts: list[Any] = [
        Text.assemble((str(card.neuron), "bold"), f"  {card.title}"),
        Text(
            f"mean {statistics.mean:+.3f}  std {statistics.std:.3f}  min {statistics.min:+.2f}  "
            f"max {statistics.max:+.2f}  positive {statistics.positive:.0%}{token_count_note(card)}",
            "dim",
        ),
        Text(f"{bars}  histogram of activations, -128 to 128, log2 bins", "dim"),
    ]
    words, written = (
        projections_report(card.projections, PROJECTED_TOKENS),
        ["", writes_table(card)] if card.writes else [],
    )
    parts += [*words, *written] if card.has_fixed_words else [*written, "", *words]
    if card.by == "relevance":
        parts.append(Text(RELMAX, "dim"))
    for polarity, examples in card.examples.items():
        parts.append(label_report(polarity, card.meanings.get(polarity), card.held_out.get(polarity, {})))
        places = card.writes[polarity].places if polarity in card.writes else ()
        title = f"class: {class_name(card.kind[polarity])}"
        parts.append(examples_table(f">{card.by}", "sentence", examples, title, places))
    for by, nearest in card.nearest.items():
        names = ", ".join(f"{hit} ({hit.score:.2f})" for hit in nearest)
        parts.append(Text(f"{nearest_title(by, card.nearest_by_chance[by])}: {names or NOT_NEAR}", "dim"))
    return Group(*parts)


def writes_table(card: icebear.Card) -> Table:
    """What the neuron writes at its sentences, by polarity."""
    rows = [
        (
            polarity,
            ", ".join(map(visible, one.raises)),
            ", ".join(map(visible, one.lowers)),
            *map(_correlation, numbers),
        )
        for polarity, one in card.writes.items()
        for numbers in [(one.correlation, one.random_correlation)]
    ]
    return grid("sign", "raises", "lowers", ">alike", ">random", rows=rows, title=WRITES, caption=writes_about(card))


def _correlation(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
