"""Concepts: their neurons, scores, similarity, and values in texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from icebear.actmax.labels import meanings
from icebear.app.cli.tables.grid import grid, heatmap
from icebear.steering.records import score_of

if TYPE_CHECKING:
    import icebear
    from icebear.steering.concept.concept import ConceptSimilarity, Measured, PassThrough

DEVIATIONS = "Standard deviations over the texts without the concept; a text's value is the mean over its tokens."


RANKED_BY = {
    "means": "difference of means",
    "cna": "difference of means at the last token",
    "relevance": "relevance for the words",
    "w_out": "W_out rows on the words",
    "search": "search for the words",
}


def concept_report(
    concept: icebear.Concept, labels: Mapping[Any, str | None], similar: Sequence[tuple[str, float]] = ()
) -> Group:
    rows = []
    for part in concept.parts:
        label = labels.get((part.neuron, part.polarity))
        meaning = Text(label) if label else Text(meanings.NOT_SCORED, "dim")
        rows.append((str(part.neuron), part.polarity, f"{part.weight:.3f}", meaning))
    title = f"{concept.name}: {len(concept)} neuron{'s' * (len(concept) != 1)} of {concept.model_name}"
    return Group(
        grid("neuron", "sign", ">weight", "label", rows=rows, title=title),
        *(Text(line, "dim") for line in provenance_lines(concept)),
        *(Text(f"shares {share:.0%} of the neurons with {name}") for name, share in similar),
    )


def provenance_lines(concept: icebear.Concept) -> list[str]:
    record, score = concept.provenance, score_of(concept.provenance)
    by = str(record.get("found_by", "hand"))
    if score is None:
        return [f"made by {by}"]
    lines = [
        f"AUROC {score.auroc:.3f} ± {score.error:.3f} on {score.positive} positive / {score.negative} negative "
        f"test texts (chance 0.5)",
    ]
    match record:
        case {"examples": int() as examples, "others": int() as others, "path": [*path], "universal": [*universal]}:
            tried = filter(None, map(_tried, path))
            lines += [
                f"ranked by {RANKED_BY.get(by, by)}, {examples} positive / {others} negative texts",
                f"validation AUROC by number of neurons: {', '.join(dict.fromkeys(tried))}",
            ]
        case _:
            return lines
    few = ", ".join(map(str, universal[:5])) + (" ..." if len(universal) > 5 else "")
    return lines + ([f"excluded because they are large in every text: {few}"] if universal else [])


def _tried(row: Any) -> str:
    match row:
        case {"neurons": neurons, "detector": detector, "auroc": int() | float() as auroc}:
            return f"{neurons} by {detector} {auroc:.2f}"
    return ""


def concepts_table(records: Sequence[dict[str, Any]]) -> Table:
    rows = []
    for record in records:
        made = record["provenance"]
        tested = score_of(made)
        score = f"{tested.auroc:.3f} ± {tested.error:.3f}" if tested else "-"
        row = (record["name"], str(len(record["parts"])), score, str(made.get("found_by", "")), record["model_name"])
        rows.append(row)
    return grid("concept", ">neurons", ">AUROC", "found by", "model", rows=rows)


def similarity_table(similarity: ConceptSimilarity, texts: int) -> Table:
    values = (
        ("neurons", similarity.neurons, "share of (neuron, sign) pairs in both"),
        ("directions", similarity.directions, "cosine of their directions in the residual stream"),
        ("measures", similarity.measures, f"correlation of their values on {texts} texts"),
    )
    rows = ((by, "two models" if value is None else f"{value:.2f}", about) for by, value, about in values)
    return grid("by", ">similarity", "definition", rows=rows)


def measured_report(rows: Sequence[Measured], passing: PassThrough | None = None) -> Group:
    maps = [heatmap(row.tokens, list(row.values), row.excluded) for row in rows]
    first = rows[0]
    if len(rows) > 1:
        values = ((f"{row.value:+.2f}", text) for row, text in zip(rows, maps, strict=True))
        return Group(grid(f">{first.concept}", "text", rows=values), Text(DEVIATIONS, "dim"))
    title = Text.assemble((first.concept, "bold"), f" {first.value:+.2f}")
    parts: list[RenderableType] = [title, Padding(maps[0], (1, 2)), Text(DEVIATIONS, "dim")]
    if passing:
        share = f"{passing.relevance:+.1%} of the logit {passing.logit:.2f} of {passing.target!r}"
        drop = f"mean ablation of its neurons removes {passing.drop:+.1%}"
        parts.append(Text(f"{share} passes through the concept (CP-LRP); {drop}."))
    return Group(*parts)


def steered_line(concept: icebear.Concept, recipe: icebear.Recipe) -> Text:
    record = recipe.provenance
    return Text(f"{concept.name}{' suppressed' * record['suppress']} at strength {record['strength']:.3g}.", "dim")
