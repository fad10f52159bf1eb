"""An explained prediction or answer: tokens, nodes, controls, sources, and what changed weights caused."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.constrain import Constrain
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from icebear.app.cli.tables.grid import grid, heatmap, listed, shade
from icebear.app.cli.tables.nodes import Words, ablation_table, nodes_table
from icebear.explanation.sentences import image_head_lines, lines, through_text
from icebear.lines import WIDTH, Line
from icebear.render import normalized, quoted, visible

if TYPE_CHECKING:
    import icebear
    from icebear.concepts.answers.breakdown import SourceBreakdown
    from icebear.concepts.answers.restoring import ExplainedChanges
    from icebear.concepts.answers.units import Matrix, Unit

UNCUT_CHARACTERS = 240
"""Characters of a text in a table before it is cut."""


def explanation_report(explanation: icebear.Explanation, units: Table | None = None, words: Words = "effects") -> Group:
    """The prediction, the tokens (or `units`), the nodes with their labels, and the controls that were measured."""
    relevance = explanation.relevance
    parts: list[Any] = [relevance_report(relevance, units)]
    if explanation.changes:
        parts += changes_tables(explanation.changes)
    if explanation.nodes:
        parts.append(nodes_table(explanation, words=words))
    if explanation.meanings:
        from icebear.app.cli.tables.cards import labels_table

        parts.append(labels_table(explanation.meanings))
    if explanation.nodes and not relevance.counterfactual:
        parts.append(Text(relevance.comparison_text(), "dim"))
    if explanation.ablations:
        parts.append(ablation_table(explanation.ablations))
    controls = (explanation.removal_control, *explanation.patch_controls, explanation.image_shares)
    parts += [Text(str(control), "dim") for control in controls if control]
    heads = image_head_lines(explanation)
    parts += [screen([Line(""), *heads])] if heads else []
    return Group(*parts)


def changes_tables(changes: ExplainedChanges) -> list[Any]:
    """What changed weights caused, and what restoring them undoes."""
    causes = [(str(change), f"{change.caused:+.3f}") for change in changes.changes]
    shares = [(f"{row.changes:,}", f"{row.undone:z.0%}", f"{row.largest:z.0%}") for row in changes.restorations]
    title = "Share of the difference that is undone when the first changes take the base model's weights"
    return [
        grid("change", ">caused", rows=causes, title="Changed rows that caused most"),
        grid(">restored", ">undone", ">largest changes", rows=shares, title=title),
    ]


def relevance_report(
    relevance: icebear.Relevance, units: Table | None = None, positions: Collection[int] | None = None
) -> Group:
    """The prediction and its relevance by token, by `units` or by image patch. positions: of the tokens in the picture;
    by default all."""
    head = Text.assemble("Why ", (quoted(relevance.target_text), "bold"))
    if relevance.contrast_text:
        head.append(f", not {quoted(relevance.contrast_text)}")
    head.append(f"?  method: {repr(relevance.method).removesuffix('()')}", "dim")
    tokens, compared = relevance.predictions[:5], relevance.counterfactual
    if compared and compared.model and not relevance.tokens.any():
        lines = [f"Predicted: {listed(tokens)}", f"Predicted by {compared.model}: {listed(compared.predictions)}"]
        return Group(*map(Text, lines), head, Text(relevance.conservation_text(), "dim"))
    return Group(
        Text(f"Predicted: {listed(tokens)}"),
        head,
        Padding(_picture(relevance, positions), (1, 2)),
        *([] if relevance.prompt.is_image else [units or tokens_table(relevance)]),
        Text(relevance.conservation_text(), "dim"),
        *([Text(relevance.comparison_text(), "dim")] if relevance.counterfactual else []),
        *([Text(f"No rule for: {', '.join(relevance.missing_rules)}", "yellow")] if relevance.missing_rules else []),
    )


def _picture(relevance: icebear.Relevance, positions: Collection[int] | None = None) -> Text:
    """The tokens on the colors of their relevance; of an image, its patches with a number from -9 to +9."""
    if positions is not None:
        return _messages(relevance, positions)
    words = None if relevance.prompt.is_image else _words(relevance)
    if relevance.image is None:
        return words or Text()
    patches = relevance.image.patches
    text = Text.assemble(words, "\n\n") if words else Text()
    for number, share in enumerate(normalized(patches.flatten().tolist())):
        if number and number % patches.shape[1] == 0:
            text.append("\n")
        text.append(f"{9 * share:+.0f}" if abs(9 * share) >= 0.5 else " .", shade(share))
    return text


def _words(relevance: icebear.Relevance) -> Text:
    """The tokens on the colors of their relevance, without those of an image."""
    prompt, values = relevance.prompt, relevance.tokens.tolist()
    shown = [position for position in range(len(values)) if position not in {*prompt.image_positions}]
    template = [number for number, position in enumerate(shown) if position in {*prompt.template}]
    return heatmap([prompt.strings[p] for p in shown], [values[p] for p in shown], template)


def _messages(relevance: icebear.Relevance, positions: Collection[int]) -> Text:
    """The tokens at these positions, on the colors of their relevance, each message in a line of its own."""
    strings, values = relevance.prompt.strings, relevance.tokens.tolist()
    begins = [at for at in positions if at - 1 not in positions]
    bounds = [(at, next(end for end in range(at, len(strings) + 1) if end not in positions)) for at in sorted(begins)]
    hidden = [at for at in range(len(strings)) if at not in positions]
    shares = normalized(values, set(hidden))
    lines = (
        Text.assemble(*((visible(strings[at]), shade(shares[at])) for at in range(start, end))) for start, end in bounds
    )
    return Text("\n").join(lines)


def message_units(
    relevance: icebear.Relevance, units: Sequence[Unit], positions: Collection[int]
) -> list[tuple[Unit, float]]:
    """The units at these positions with their relevance, and all other tokens together as the chat template."""
    strings, values = relevance.prompt.strings, relevance.tokens.tolist()
    parts = []
    for unit in units:
        shown = [at for at in range(unit.start, unit.stop) if at in positions]
        text = "".join(strings[at] for at in shown)
        parts += [(replace(unit, text=text, template=False), sum(values[at] for at in shown))] if shown else []
    hidden = [at for at in range(len(strings)) if at not in positions]
    template = replace(units[0], text=f"chat template ({len(hidden)} tokens)", turn="", template=True)
    return [*parts, (template, sum(values[at] for at in hidden))]


def tokens_table(relevance: icebear.Relevance) -> Table:
    prompt, template, of_image = relevance.prompt, set(relevance.prompt.template), relevance.prompt.image_positions
    positions = None if relevance.positions is None else relevance.positions.sum(0).tolist()
    table = grid(">position", "token", ">relevance", *([">of position"] if positions else []), "")
    for at, (token, value) in enumerate(zip(prompt.strings, relevance.tokens.tolist(), strict=True)):
        notes = ["sink"] * (at in prompt.sinks) + ["decoder"] * (at >= prompt.encoder_length)
        of_position = [f"{positions[at]:+.3f}"] if positions else []
        if at not in template and at not in of_image:
            table.add_row(str(at), Text(repr(token)), f"{value:+.3f}", *of_position, ", ".join(notes))
    if of_image:
        rest = relevance.tokens[list(of_image)].sum().item()
        table.add_row("", f"image ({len(of_image)} tokens)", f"{rest:+.3f}", style="dim")
    if template:
        rest = relevance.tokens[list(prompt.template)].sum().item()
        table.add_row("", f"chat template ({len(template)} tokens)", f"{rest:+.3f}", style="dim")
    return table


def units_table(parts: Sequence[tuple[Unit, float]]) -> Table:
    table = grid("part", ">relevance", "text")
    for unit, value in parts:
        text = visible(unit.text.strip())
        cut = (
            text
            if len(text) <= UNCUT_CHARACTERS
            else f"{text[: UNCUT_CHARACTERS // 2]} ... {text[-UNCUT_CHARACTERS // 2 :]}"
        )
        table.add_row(unit.turn, f"{value:+.3f}", Text(cut), style="dim" if unit.template else None)
    return table


def explanation_screen(
    explanation: icebear.Explanation, units: Table | None = None, positions: Collection[int] | None = None
) -> Constrain:
    """Lines of at most 100 columns. units: a table in place of the tokens. positions: see `relevance_report`."""
    relevance, (before, after) = explanation.relevance, lines(explanation)
    tokens: list[Any] = [Padding(units, (1, 2))] if units else []
    if after and not units:
        tokens = [Padding(_picture(relevance, positions), (1, 2))]
    return Constrain(Group(*map(_shown, before), *tokens, *map(_shown, after)), WIDTH)


def screen(lines: Sequence[Line]) -> Constrain:
    """Lines that are at most 100 columns wide."""
    return Constrain(Group(*map(_shown, lines)), WIDTH)


def _shown(line: Line) -> Text:
    cut = {} if line.wraps else {"no_wrap": True, "overflow": "ellipsis"}
    return Text(str(line) if line.indent else line.text, line.style, **cut)  # type: ignore[arg-type]


def probabilities(answer: icebear.Answer) -> Text:
    """The answer with its less probable tokens on darker colors."""
    parts = zip(answer.token_strings, answer.probabilities, strict=True)
    return Text.assemble(*((token, shade(probability - 1)) for token, probability in parts))


def breakdown_report(breakdown: SourceBreakdown) -> Group:
    parts = [(part.name, part.positive, part.negative) for part in breakdown.parts]
    parts.append(("biases", max(breakdown.biases, 0), min(breakdown.biases, 0)))
    rows = [
        (name, f"{positive:+.2f}", f"{negative:+.2f}", f"{(positive + negative) / breakdown.target:.0%}")
        for name, positive, negative in parts
    ]
    drop = "" if breakdown.drop is None else f"; {breakdown.drop:.0%} is lost at their counterfactual values"
    return Group(
        Text(
            f"Sources of the answer's {breakdown.target:.2f} logits (CP-LRP; remainder {breakdown.remainder:.1e})",
            "bold",
        ),
        grid("from", ">positive", ">negative", ">share", rows=rows),
        Text(f"{through_text(breakdown)}{drop}.", "dim"),
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
