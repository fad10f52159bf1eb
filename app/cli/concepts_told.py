"""Concepts as rich renderables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from icebear.actmax.labels.score_text import NOT_SCORED
from icebear.app.cli.terminal import coloured, grid

if TYPE_CHECKING:
    from icebear.recipe import Recipe
    from icebear.steering.concept.concept import Concept
    from icebear.steering.concept.likeness import Likeness
    from icebear.steering.concept.measured import Measured, Through


def concept_table(found: Concept, labels: Mapping[Any, str | None], alike: Sequence[tuple[str, float]] = ()) -> Group:
    """A concept: its neurons with their labels, how it was found, and those that share neurons with it."""
    table = grid("neuron", "sign", ">weight", "what it means")
    table.title = f"{found.name}: {len(found)} neuron{'s' * (len(found) != 1)} of {found.model_name}"
    for part in found.parts:
        label = labels.get((part.neuron, part.polarity))
        table.add_row(
            str(part.neuron), part.polarity, f"{part.weight:.3f}", Text(label or NOT_SCORED, "" if label else "dim")
        )
    return Group(table, *(Text(line, "dim") for line in found_by(found)), *(Text(line) for line in _alike(alike)))


RANKED_BY = {
    "means": "difference of means",
    "cna": "difference of means at the last token",
    "relevance": "relevance for the words",
    "w2": "W2 rows on the words",
    "search": "search for the words",
}


def found_by(found: Concept) -> list[str]:
    """How a concept was found, and how well it detects, in words."""
    told = found.provenance
    if "auroc" not in told:
        return [f"made by {told.get('found_by', 'hand')}"]
    way = RANKED_BY.get(told["found_by"], told["found_by"])
    positive, negative = told["tested on"]
    tried = ", ".join(dict.fromkeys(f"{row['neurons']} by {row['way']} {row['auroc']:.2f}" for row in told["path"]))
    lines = [
        f"AUROC {told['auroc']:.3f} ± {told['error']:.3f} on {positive} texts with it and {negative} without that "
        f"nothing was chosen on (chance 0.5)",
        f"ranked by {way}, {told['examples']} positive / {told['others']} negative texts",
        f"tried, on a quarter of the texts: {tried}",
    ]
    universal = told["universal"]
    few = ", ".join(universal[:5]) + (" ..." if len(universal) > 5 else "")
    return lines + ([f"left out because they are large in every text: {few}"] if universal else [])


def _alike(alike: Sequence[tuple[str, float]]) -> list[str]:
    return [f"shares {share:.0%} of the neurons with {name}" for name, share in alike]


def concepts_table(records: Sequence[dict[str, Any]]) -> Table:
    table = grid("concept", ">neurons", ">AUROC", "found by", "model")
    for record in records:
        told = record["provenance"]
        score = f"{told['auroc']:.3f} ± {told['error']:.3f}" if "auroc" in told else "-"
        row = (record["name"], str(len(record["parts"])), score, told.get("found_by", ""), record["model_name"])
        table.add_row(*map(Text, row))
    return table


def likeness_table(found: Likeness, texts: int) -> Table:
    table = grid("by", ">alike", "what that is")
    for name, value, about in (
        ("neurons", found.neurons, "share of (neuron, sign) that both have"),
        ("directions", found.directions, "cosine of what they write"),
        ("measures", found.measures, f"correlation of their values of {texts} texts"),
    ):
        table.add_row(name, "two models" if value is None else f"{value:.2f}", about)
    return table


def measured_table(rows: Sequence[Measured], passing: Through | None = None) -> Group:
    """Texts by a concept: of one the tokens, coloured; of several the values."""
    if len(rows) > 1:
        table = grid(f">{rows[0].concept}", "text")
        for row in rows:
            table.add_row(f"{row.value:+.2f}", coloured(row.tokens, list(row.values), row.apart))
        return Group(table, Text(DEVIATIONS, "dim"))
    (row,) = rows
    parts: list[Any] = [
        Text.assemble((row.concept, "bold"), f" {row.value:+.2f}"),
        Padding(coloured(row.tokens, list(row.values), row.apart), (1, 2)),
        Text(DEVIATIONS, "dim"),
    ]
    if passing:
        said = f"Of the logit {passing.logit:.2f} of {passing.target!r} {passing.relevance:+.1%} passes through it"
        parts.append(Text(f"{said} by CP-LRP; {passing.drop:+.1%} is lost when its neurons take their means."))
    return Group(*parts)


DEVIATIONS = "Standard deviations over the texts without it; a text's value is the mean of its tokens'."


def turned_line(found: Concept, recipe: Recipe, values: Sequence[float]) -> Text:
    """What was turned how far, and what the concept measures in both texts."""
    told = recipe.provenance
    price = f", {told['kl']:.3f} nats at held-out contexts" if "kl" in told else ""
    plain, steered = values
    return Text(
        f"{found.name}{' suppressed' * told['suppress']} at strength {told['strength']:.3g}{price}; measured by the "
        f"plain model in what was written: {plain:+.2f} plain, {steered:+.2f} steered.",
        "dim",
    )
