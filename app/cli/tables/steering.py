"""Recipes and concepts: both texts, how edits were found, their side effects, and values in texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from icebear.actmax.labels import significance
from icebear.app.cli.tables.grid import grid, heatmap
from icebear.edits import Edit
from icebear.models.text.prompts import prompt_line
from icebear.records import TokenScore
from icebear.render import percent, visible
from icebear.steering.provenance import FlipRecord, Outcome, chosen_by_words, score_of
from icebear.values import plural

if TYPE_CHECKING:
    import icebear
    from icebear.steering.comparison import Comparison
    from icebear.steering.concept.concept import Measured
    from icebear.steering.concept.detectors import ConceptVector
    from icebear.steering.monitor.monitor import Monitor, Passage, Verdict

DEVIATIONS = "Standard deviations over the texts without the concept; a text's value is the mean over its tokens."
EDITS = (
    "alone: the probability of the wanted token with this edit alone. raises, lowers: the likely next words that this "
    "edit alone makes more and less likely."
)
NEURON_EDITS = (
    " before: the activation without the edit. share of range: the new activation divided by the end of the neuron's "
    "activation range. relevance: the neuron's contribution to the logit margin of the flip, without edits (negative: "
    "it works against the flip)."
)
EDIT_COLUMNS = (">alone", "raises", "lowers")
NEURON_COLUMNS = (">before", ">share of range", ">relevance")


def comparison_table(comparison: Comparison) -> Table:
    """Plain and steered text side by side, with the most probable first tokens."""
    sides = (comparison.plain, comparison.steered)
    end = "\n" if not isinstance(comparison.prompt, str) else "" if comparison.task == "causal" else " → "
    begin = prompt_line(comparison.prompt) + end
    table = Table(box=box.ROUNDED, expand=True)
    for name in ("plain", "steered"):
        table.add_column(name, ratio=1, overflow="fold")
    table.add_row(*(Text.assemble((begin, "dim"), side.text) for side in sides), end_section=True)
    table.add_row(*(Text("\n".join(map(_bar, side.next))) for side in sides))
    return table


def _bar(token: TokenScore) -> str:
    share = token.probability  # None where a number is predicted
    number = f"{token.logit:+.3f}" if share is None else f"{share:.3f} {'█' * round(20 * share)}"
    return f"{token.text!r:<14} {number}"


def recipe_report(recipe: icebear.Recipe) -> Group:
    """A recipe's edits with their neurons, side effects and provenance.

    Raises `RecipeError` where its provenance is not as icebear writes it.
    """
    records, outcome = FlipRecord.all_of(recipe), Outcome.of(recipe)
    facts = {key: value for key, value in recipe.provenance.items() if isinstance(value, str | int | float)}
    names = {"found_by": "made by", "suppress": "weakens the concept"}
    shown = {True: "yes", False: "no"}
    lines = [f"model: {recipe.model_name} ({recipe.model_fingerprint})"]
    lines += [
        f"{names.get(key, key.replace('_', ' '))}: {shown[value] if isinstance(value, bool) else value}"
        for key, value in facts.items()
    ]
    lines += [line for record in records for line in _flip_lines(record)]
    parts: list[Any] = [*_edits_tables(recipe, records), *(outcome_lines(outcome) if outcome else [])]
    return Group(*parts, *(Text(line, "dim") for line in lines))


def _flip_lines(record: FlipRecord) -> list[str]:
    """What a flip had to do, and how it was searched."""
    goal = "wanted next" if record.top_k is None else f"suppressed below the {record.top_k} most probable tokens"
    lines = [f"prompt: {prompt_line(record.prompt)!r}", f"{goal}: {record.text!r}"]
    aim = "zero"
    if record.source is not None:
        lines.append(f"source prompt: {prompt_line(record.source)!r}")
        aim = "their values in the source prompt"
    if record.neurons and all(row.activation is None for row in record.neurons):
        return [*lines, "Each head takes its output after the source prompt."]
    directed = not record.left_source and (record.source is not None or record.top_k is not None)
    if record.left_source:
        moves = f"Moves towards {aim} did not suffice, so activations move in both directions."
    else:
        moves = f"Activations move towards {aim}." if directed else "Activations move in both directions."
    limits = "They may leave" if record.unbounded else "They stay inside"
    return [*lines, f"{moves} {limits} their activation range."]


def _edits_tables(recipe: icebear.Recipe, records: Sequence[FlipRecord]) -> list[Table]:
    """The edits, and the sentences of the edited neurons if there was an index."""
    neurons = {row.neuron: row for record in records for row in record.neurons}
    sets_neurons = any(row.activation is not None for row in neurons.values())
    names = ("edit", *(EDIT_COLUMNS if neurons else ()), *(NEURON_COLUMNS if sets_neurons else ()))
    rows: list[list[str]] = []
    for edit in recipe:
        rows.append([str(edit)])
        if isinstance(edit, Edit) and (row := neurons.get(edit.neuron)):
            words = (", ".join(map(visible, side)) for side in (row.raises, row.lowers))
            rows[-1] += [f"{row.alone:.3f}", *words]
            if row.activation is not None:
                share = "outside" if row.range_share is None else f"{row.range_share:.2f} x"
                rows[-1] += [f"{row.activation:+.2f}", share, f"{row.relevance:+.3f}"]
    caption = EDITS * bool(neurons) + NEURON_EDITS * sets_neurons
    table = grid(*names, rows=rows, title=recipe.name, caption=caption)
    table.columns[0].no_wrap = all(isinstance(edit, Edit) and edit.source is None for edit in recipe)
    examples = [(str(row.neuron), text) for row in neurons.values() for text in row.examples]
    title = "\nSentences with large activations of the sign that each neuron is set to"
    return [table, *([grid("neuron", "sentence", rows=examples, title=title)] if examples else [])]


def outcome_lines(outcome: Outcome) -> list[Text]:
    """What the edits do beside what random edits do, and a warning where that is no evidence."""
    warning = [Text(f"Warning: {outcome.warning}", "yellow")] if outcome.warning else []
    lines = filter(None, [outcome.control_text, outcome.side_effects_text, outcome.dose_text])
    return [*map(Text, lines), *warning]


def concept_report(
    concept: icebear.Concept, labels: Mapping[Any, str | None], similar: Sequence[tuple[str, float]] = ()
) -> Group:
    rows = []
    for part in concept.parts:
        label = labels.get((part.neuron, part.polarity))
        meaning = Text(label) if label else Text(significance.NOT_SCORED, "dim")
        rows.append((str(part.neuron), part.polarity, f"{part.weight:.3f}", meaning))
    title = f"{concept.name}: {plural(len(concept), 'neuron')} of {concept.model_name}"
    return Group(
        grid("neuron", "sign", ">weight", "label", rows=rows, title=title),
        *(Text(line, "dim") for line in provenance_lines(concept)),
        *(Text(_vector_line(vector), "dim") for vector in concept.vectors),
        *(Text(f"shares {share:.0%} of the neurons with {name}") for name, share in similar),
    )


def _vector_line(vector: ConceptVector) -> str:
    name = {"means": "difference of means", "logistic": "logistic model"}[vector.fit]
    return f"residual stream after layer {vector.layer}, {name}: AUROC {vector.auroc:.3f} on the same test texts"


def monitor_report(monitor: Monitor) -> Group:
    """The rates of a monitor, beside the controls; what is a reason for doubt is said first."""
    from icebear.steering.monitor.monitor import CONTROLS_TEXT  # which needs torch

    rows = [
        (
            "" if row.texts == before else row.texts,
            row.detector,
            percent(row.true_positive_rate),
            percent(row.false_positive_rate),
            f"{row.auroc:.2f}",
            f"{row.positives}, {row.negatives}",
        )
        for row, before in zip(monitor.rates, ["", *(row.texts for row in monitor.rates)], strict=False)
    ]
    names = ("texts", "detector", ">true positives", ">false positives", ">AUROC", ">texts with, without")
    table = grid(*names, rows=rows, caption=CONTROLS_TEXT)
    return Group(*map(Text, monitor.about), *([table] if rows else []))


def verdicts_report(verdicts: Sequence[Verdict]) -> Group:
    """Texts with the value of a monitor at each token, and what it flags."""
    parts: list[Any] = []
    for verdict in verdicts:
        excluded = [number for number, value in enumerate(verdict.values) if not value]
        title = Text.assemble(
            (f"{verdict.monitor} ", "bold"), f"{verdict.value:+.2f}", f" (flagged above {verdict.threshold:.2f})"
        )
        parts += [title, Padding(heatmap(verdict.tokens, list(verdict.values), excluded), (0, 2))]
        parts += [Text(flag_line(verdict.monitor, flag), "yellow") for flag in verdict.flags]
    return Group(*parts)


def flag_line(name: str, flag: Passage) -> str:
    """What a monitor flags, and by which neurons."""
    by = ", ".join(f"{neuron} ({value:+.1f})" for neuron, value in flag.neurons)
    words = visible(" ".join(flag.text.split()))
    return f"flagged by {name}, {flag.value:+.2f}: {words!r}{f' by {by}' if by else ''}"


def provenance_lines(concept: icebear.Concept) -> list[str]:
    record, score = concept.provenance, score_of(concept.provenance)
    by = str(record.get("found_by", "hand"))
    if score is None:
        return [f"made by {by}"]
    lines = [
        f"AUROC {score.auroc:.3f} ± {score.error:.3f} on {score.positive} positive / {score.negative} negative "
        f"test texts (chance 0.5)",
    ]
    lines += filter(None, [chosen_by_words(record)])
    match record:
        case {"examples": int() as examples, "others": int() as others, "path": [*path], "universal": [*universal]}:
            tried = filter(None, map(_tried, path))
            ranked_by = "difference of means" if by == "means" else by
            lines += [
                f"ranked by {ranked_by}, {examples} positive / {others} negative texts",
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
        provenance = record["provenance"]
        tested = score_of(provenance)
        score = f"{tested.auroc:.3f} ± {tested.error:.3f}" if tested else "-"
        method = str(provenance.get("found_by", ""))
        rows.append((record["name"], str(len(record["parts"])), score, method, record["model_name"]))
    return grid("concept", ">neurons", ">AUROC", "found by", "model", rows=rows)


def measured_report(rows: Sequence[Measured]) -> Group:
    maps = [heatmap(row.tokens, list(row.values), row.excluded) for row in rows]
    measured = rows[0]
    if len(rows) > 1:
        values = ((f"{row.value:+.2f}", text) for row, text in zip(rows, maps, strict=True))
        return Group(grid(f">{measured.concept}", "text", rows=values), Text(DEVIATIONS, "dim"))
    title = Text.assemble((measured.concept, "bold"), f" {measured.value:+.2f}")
    return Group(title, Padding(maps[0], (1, 2)), Text(DEVIATIONS, "dim"))


def steered_line(concept: icebear.Concept, recipe: icebear.Recipe) -> Text:
    record = recipe.provenance
    return Text(f"{concept.name}{' suppressed' * record['suppress']} at strength {record['strength']:.3g}.", "dim")
