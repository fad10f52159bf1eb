"""Results as rich renderables: a `..._table` each, or a `..._report` of tables and lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from icebear.actmax.index.classes import class_name
from icebear.actmax.labels import meanings
from icebear.actmax.page import NOT_NEAR, RELMAX, WRITES, nearest_title, token_count_note, writes_about
from icebear.concepts.circuits.drawing import summary, top_sources
from icebear.concepts.results.effect_words import effect_text
from icebear.db.search import BY, NO_NEURON, absence
from icebear.explanation.sentences import empty_shares, hardly_differs
from icebear.models.text.prompts import prompt_line
from icebear.records import Example, Hit, Meaning, Place, Projection, Promotion, TokenScore
from icebear.render import color, hexadecimal, ink, normalized, visible
from icebear.steering.records import FlipRecord, SideEffects, score_of

if TYPE_CHECKING:
    import icebear
    from icebear.claims.check import CheckedClaims
    from icebear.concepts.answers.behaviour import BehaviourNeuron
    from icebear.concepts.answers.matrix import Matrix
    from icebear.concepts.answers.restoring import ExplainedChanges
    from icebear.concepts.answers.sources import SourceBreakdown
    from icebear.concepts.answers.units import Unit
    from icebear.concepts.circuits.records import EdgeFaithfulness, GroupAblation
    from icebear.concepts.nodes.controls import Ablation
    from icebear.concepts.vocabulary.lens import MeanLens
    from icebear.steering.comparison import Comparison
    from icebear.steering.concept.concept import ConceptSimilarity, Measured, PassThrough

LONG = 240  # characters of a text in a table
TOKENS = 10  # of a projection on a card
LABELS_TITLE = "Significant labels with their AUROC; icebear neuron shows the details"
DEVIATIONS = "Standard deviations over the texts without the concept; a text's value is the mean over its tokens."
EDITS = (
    "edit: neuron = new activation @ token. before: the activation without the edit. share of range: the new "
    "activation divided by the end of the neuron's activation range. relevance: the neuron's contribution to the "
    "logit margin of the flip, without edits (negative: it works against the flip). raises, lowers: the likely next "
    "words that this edit alone makes more and less likely."
)
Words = Literal["effects", "direct"]
RANKED_BY = {
    "means": "difference of means",
    "cna": "difference of means at the last token",
    "relevance": "relevance for the words",
    "w_out": "W_out rows on the words",
    "search": "search for the words",
}


def grid(*columns: str, rows: Iterable[Sequence[str | Text]] = (), title: str = "", caption: str = "") -> Table:
    """A table of literal texts. A column whose name begins with > is right-aligned."""
    table = Table(box=box.SIMPLE_HEAD, title=Text(title, "bold") if title else None, title_justify="left")
    table.pad_edge, table.caption, table.caption_justify = False, caption or None, "left"
    for name in columns:
        table.add_column(name.removeprefix(">"), justify="right" if name[:1] == ">" else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def shade(share: float) -> Style:
    """The color of a signed share of the largest value, with an ink that is legible on it."""
    rgb = color(share)
    return Style(color=ink(rgb), bgcolor=hexadecimal(rgb))


def heatmap(tokens: Sequence[str], values: list[float], gray: Sequence[int] = ()) -> Text:
    """Tokens on the colors of their values, those at `gray` positions without one."""
    parts = enumerate(zip(tokens, normalized(values, set(gray)), strict=True))
    return Text.assemble(*((visible(token), "dim" if at in gray else shade(share)) for at, (token, share) in parts))


def explanation_report(explanation: icebear.Explanation, units: Table | None = None, words: Words = "effects") -> Group:
    """The prediction, the tokens (or `units`), the nodes with their labels, and the controls that were measured."""
    relevance, circuit = explanation.relevance, explanation.circuit
    parts: list[Any] = [relevance_report(relevance, units)]
    if explanation.changes:
        parts += changes_tables(explanation.changes)
    if explanation.nodes:
        parts.append(nodes_table(explanation, words=words))
    if explanation.meanings:
        parts.append(labels_table(explanation.meanings))
    if explanation.nodes and not relevance.counterfactual:
        parts.append(Text(relevance.comparison_text(), "dim"))
    if explanation.ablations:
        parts.append(ablation_table(explanation.ablations))
    if explanation.removal_control:
        parts.append(Text(str(explanation.removal_control), "dim"))
    if circuit:
        parts += [Text(summary(circuit.graph)), groups_table(circuit.graph, circuit.without)]
    return Group(*parts)


def changes_tables(changes: ExplainedChanges) -> list[Any]:
    """What changed weights caused, and what restoring them undoes."""
    causes = [(str(one), f"{one.caused:+.3f}") for one in changes.changes]
    shares = [(f"{one.changes:,}", f"{one.undone:z.0%}", f"{one.largest:z.0%}") for one in changes.restorations]
    title = "Share of the difference that is undone when the first changes take the base model's weights"
    return [
        grid("change", ">caused", rows=causes, title="Changed rows that caused most"),
        grid(">restored", ">undone", ">largest changes", rows=shares, title=title),
    ]


def relevance_report(relevance: icebear.Relevance, units: Table | None = None) -> Group:
    """The prediction and its relevance by token, by `units` or by image patch."""
    head = Text.assemble("Why ", (repr(relevance.target_text), "bold"))
    if relevance.contrast_text:
        head.append(f", not {relevance.contrast_text!r}")
    head.append(f"?  method: {repr(relevance.method).removesuffix('()')}", "dim")
    prompt, tokens, compared = relevance.prompt, relevance.predictions[:5], relevance.counterfactual
    if compared and compared.model and not relevance.tokens.any():
        lines = [f"Predicted: {_listed(tokens)}", f"Predicted by {compared.model}: {_listed(compared.predictions)}"]
        return Group(*map(Text, lines), head, Text(relevance.conservation_text(), "dim"))
    picture = (
        _patches(relevance) if relevance.image else heatmap(prompt.strings, relevance.tokens.tolist(), prompt.template)
    )
    return Group(
        Text(f"Predicted: {_listed(tokens)}"),
        head,
        Padding(picture, (1, 2)),
        *([] if relevance.image else [units or tokens_table(relevance)]),
        Text(relevance.conservation_text(), "dim"),
        *([Text(relevance.comparison_text(), "dim")] if relevance.counterfactual else []),
        *([Text(f"No rule for: {', '.join(relevance.missing_rules)}", "yellow")] if relevance.missing_rules else []),
    )


def _listed(tokens: Sequence[TokenScore]) -> str:
    return ", ".join(f"{token.text!r} {token.number}" for token in tokens)


def _patches(relevance: icebear.Relevance) -> Text:
    assert relevance.image is not None
    patches = relevance.image.patches
    text = Text()
    for number, share in enumerate(normalized(patches.flatten().tolist()), 1):
        text.append("  ", shade(share))
        if number % patches.shape[1] == 0:
            text.append("\n")
    return text


def tokens_table(relevance: icebear.Relevance) -> Table:
    prompt, template = relevance.prompt, set(relevance.prompt.template)
    positions = None if relevance.positions is None else relevance.positions.sum(0).tolist()
    table = grid(">position", "token", ">relevance", *([">of position"] if positions else []), "")
    for at, (token, value) in enumerate(zip(prompt.strings, relevance.tokens.tolist(), strict=True)):
        notes = ["sink"] * (at in prompt.sinks) + ["decoder"] * (at >= prompt.encoder_length)
        of_position = [f"{positions[at]:+.3f}"] if positions else []
        if at not in template:
            table.add_row(str(at), Text(repr(token)), f"{value:+.3f}", *of_position, ", ".join(notes))
    if template:
        rest = relevance.tokens[list(prompt.template)].sum().item()
        table.add_row("", f"chat template ({len(template)} tokens)", f"{rest:+.3f}", style="dim")
    return table


def units_table(parts: Sequence[tuple[Unit, float]]) -> Table:
    table = grid("part", ">relevance", "text")
    for unit, value in parts:
        text = visible(unit.text.strip())
        cut = text if len(text) <= LONG else f"{text[: LONG // 2]} ... {text[-LONG // 2 :]}"
        table.add_row(unit.turn, f"{value:+.3f}", Text(cut), style="dim" if unit.template else None)
    return table


def nodes_table(explanation: icebear.Explanation, title: str = "", words: Words = "effects") -> Table:
    """The nodes with the words that they raise and lower in this prompt, or that they promote on the direct path."""
    compared = explanation.relevance.counterfactual
    measured = words == "effects" and explanation.effects is not None
    rows = []
    for node in explanation.nodes:
        row = node.ranked
        activation = "" if row.neuron.site == "head" else f"{row.activation:+.3f}"
        other = ["" if row.counterfactual is None else f"{row.counterfactual:+.3f}"] if compared else []
        shown = [", ".join(node.raises[:3]), ", ".join(node.lowers[:3])] if measured else [node.words]
        rows.append([str(row.neuron), repr(node.token), activation, *other, f"{row.relevance:+.3f}", *shown])
    counterfactual = [">base model" if compared.model else ">counterfactual"] if compared else []
    shown = ["raises", "lowers"] if measured else ["promotes"]
    names = ("neuron", "token", ">activation", *counterfactual, ">relevance", *shown)
    return grid(*names, rows=rows, title=title or _nodes_title(explanation))


FIRST = {
    "positive": "Most relevant neurons",
    "negative": "Neurons with the most negative relevance",
    "absolute": "Neurons with the largest absolute relevance",
}
"""How neurons are ranked -> what the first ones are."""


def _nodes_title(explanation: icebear.Explanation) -> str:
    relevance, ranking, position = explanation.relevance, explanation.ranking, explanation.ranking.position
    where = {"all": "at all tokens", "last": "at the predicting token"}.get(str(position), f"at position {position}")
    compared = relevance.counterfactual
    title = f"Neurons that pass most on, {where}" if compared and compared.model else f"{FIRST[ranking.by]} {where}"
    if position == "all" and not ranking.include_sinks:
        title += f", attention sinks excluded: {list(relevance.prompt.sinks)}"
    if position == "all" and relevance.prompt.turns and not ranking.include_template:
        title += ", the chat template excluded"
    return title


def ablation_table(ablations: Sequence[Ablation]) -> Table:
    columns = ("sufficiency", "necessity")
    names = [f"{control}{column}" for control in ("", "random_", "most_changed_") for column in columns]
    rows = [[row.site, f"{row.nodes:,}", *(f"{getattr(row, name):z.2f}" for name in names)] for row in ablations]
    caption = [
        "random: as many other neurons of the same layers and tokens, or heads of the same tokens; median of sets.",
        "most changed: nodes whose activations change most.",
        *dict.fromkeys(filter(None, map(hardly_differs, ablations))),
        *(f"No {site} nodes at all: sufficiency {share:z.2f}." for site, share in empty_shares(ablations).items()),
    ]
    return grid(
        "site",
        ">nodes",
        *(f">{name.replace('random_', 'random: ').replace('most_changed_', 'most changed: ')}" for name in names),
        rows=rows,
        title="Sufficiency and necessity, with controls",
        caption=" ".join(caption),
    )


def behaviour_table(neurons: Sequence[BehaviourNeuron], words: dict[Any, Projection], prompts: int) -> Table:
    """Neurons by their mean relevance over prompts; `words` may lack some."""
    return grid(
        *("neuron", ">activation", ">relevance", ">95 % interval", f">in the top {len(neurons)}", "promotes"),
        rows=(
            (
                str(row.neuron),
                "" if row.neuron.site == "head" else f"{row.activation:+.3f}",
                f"{row.relevance:+.3f}",
                f"{row.low:+.3f} to {row.high:+.3f}",
                f"{row.among_top} of {prompts}",
                words[row.neuron].words(row.polarity) if row.neuron in words else "",
            )
            for row in neurons
        ),
        title=f"Most relevant neurons, means over {prompts} prompts, at the predicting token",
    )


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


def circuit_report(graph: icebear.Graph, measured: tuple[Ablation, EdgeFaithfulness] | None) -> Group:
    """A circuit: its groups, its nodes from the last layer to the first with their largest sources, and measurements
    of nodes and edges."""
    parts: list[Any] = [Text(summary(graph)), groups_table(graph), _tree(graph)]
    if measured:
        ablation, edges = measured
        line = (
            f"The {edges.edges} edges have a sufficiency of {edges.sufficiency:.0%}. As many random edges into the "
            f"same targets from the same layers have {edges.random_sufficiency:.0%}. All edges between the nodes have "
            f"{edges.all_edges:.0%}."
        )
        parts += [ablation_table([ablation]), Text(line, "dim")]
    return Group(*parts)


def groups_table(graph: icebear.Graph, without: Sequence[GroupAblation] = ()) -> Table:
    """A circuit's groups. With `without` only the first ones, each with the model's answer without it."""
    rows = [[group.name, str(len(group.nodes)), f"{group.score:+.3f}"] for group in graph.groups]
    if not without:
        return grid("group", ">nodes", ">score", rows=rows, title="Groups")
    for row, off in zip(rows, without, strict=False):
        row += [f"{off.necessity:.0%}", f"{off.random_necessity:.0%}", repr(off.predictions[0].text)]
    return grid(
        *("group", ">nodes", ">score", ">necessity", ">random", "answer without"),
        rows=rows[: len(without)],
        title="Groups",
        caption="random: the necessity of as many random nodes of the same layers and tokens",
    )


def _tree(graph: icebear.Graph) -> Tree:
    tree = Tree(Text(f"{graph.answer}  from {top_sources(graph, graph.answer, 3)}"))
    branches: dict[int, Tree] = {}
    for node in sorted(graph.nodes, key=lambda node: -node.neuron.layer):
        layer = node.neuron.layer
        branch = branches.get(layer) or branches.setdefault(layer, tree.add(f"L{layer}"))
        words = effect_text(node.raises[:2], node.lowers[:2])
        token = repr(graph.tokens[node.position].text)
        branch.add(Text(f"{node} {token} {node.score:+.3f}  {words}  from {top_sources(graph, node, 3)}"))
    return tree


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
    words, written = projections_report(card.projections, TOKENS), ["", writes_table(card)] if card.writes else []
    parts += [*words, *written] if card.has_fixed_words else [*written, "", *words]
    if card.by == "relevance":
        parts.append(Text(RELMAX, "dim"))
    for polarity, examples in card.examples.items():
        parts.append(label_report(polarity, card.meanings.get(polarity), card.held_out.get(polarity, {})))
        places = card.writes[polarity].places if polarity in card.writes else ()
        title = f"class: {class_name(card.kind[polarity])}"
        parts.append(_examples_table(f">{card.by}", "sentence", examples, title, places))
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


def label_report(polarity: str, meaning: Meaning | None, held_out: dict[str, list[Example]]) -> Group:
    parts: list[Any] = [Text(f"\nPolarity {polarity}: {meanings.label_title(meaning)}", "bold")]
    if meaning:
        parts += [Text(line, "dim") for line in meanings.measured(meaning)]
    if meaning and meaning.significant:
        parts += [_examples_table(">", meanings.HELD_OUT[name], rows[:2]) for name, rows in held_out.items() if rows]
    return Group(*parts)


def _examples_table(
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
    records, effects = FlipRecord.all_of(recipe), SideEffects.of(recipe)
    facts = {key: value for key, value in recipe.provenance.items() if isinstance(value, str | int | float)}
    names = {"found_by": "made by", "suppress": "weakens the concept"}
    shown = {True: "yes", False: "no"}
    lines = [f"model: {recipe.model_name} ({recipe.model_fingerprint})"]
    lines += [
        f"{names.get(key, key.replace('_', ' '))}: {shown[value] if isinstance(value, bool) else value}"
        for key, value in facts.items()
    ]
    lines += [line for record in records for line in _flip_lines(record)]
    parts = [*_edits_tables(recipe, records), *(_side_effects(effects) if effects else [])]
    return Group(*parts, *(Text(line, "dim") for line in lines))


def _flip_lines(record: FlipRecord) -> list[str]:
    """What a flip had to do, and how it was searched."""
    goal = "wanted next" if record.top_k is None else f"suppressed below the {record.top_k} most probable tokens"
    lines = [f"prompt: {prompt_line(record.prompt)!r}", f"{goal}: {record.text!r}"]
    aim = "zero"
    if record.source is not None:
        lines.append(f"source prompt: {prompt_line(record.source)!r}")
        aim = "their values in the source prompt"
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
    names = (">before", ">share of range", ">relevance", "raises", "lowers")
    rows: list[list[str]] = []
    for edit in recipe:
        rows.append([str(edit)])
        if row := neurons.get(edit.neuron):
            share = "outside" if row.range_share is None else f"{row.range_share:.2f} x"
            words = (", ".join(map(visible, side)) for side in (row.raises, row.lowers))
            rows[-1] += [f"{row.activation:+.2f}", share, f"{row.relevance:+.3f}", *words]
    caption = EDITS if neurons else ""
    table = grid("edit", *(names if neurons else ()), rows=rows, title=recipe.name, caption=caption)
    table.columns[0].no_wrap = True
    examples = [(str(row.neuron), text) for row in neurons.values() for text in row.examples]
    title = "\nSentences with large activations of the sign that each neuron is set to"
    return [table, *([grid("neuron", "sentence", rows=examples, title=title)] if examples else [])]


def _side_effects(effects: SideEffects) -> list[Table | Text]:
    tokens = {token.text: token for token in (effects.old, effects.new) if token}
    rows = [
        (repr(text), f"{token.before:.3f}", str(token.rank_before), f"{token.after:.3f}", str(token.rank_after))
        for text, token in tokens.items()
    ]
    names = ("next token", ">probability before", ">rank before", ">probability after", ">rank after")
    table = grid(*names, rows=rows)
    lines = []
    if effects.perplexity is not None:
        lines.append(
            f"Perplexity of held-out sentences: {effects.perplexity:.1f} without edits, "
            f"{effects.perplexity_everywhere:.1f} with the edits at every token"
        )
    if effects.repetition is not None:
        lines.append(
            f"Repeated trigrams in the continuation: {effects.repetition_plain:.0%} without edits, "
            f"{effects.repetition:.0%} with edits"
        )
    warnings = [Text(f"Warning: {line}", "yellow") for line in effects.warnings]
    kl = Text(f"Off-target KL (side effects; 0 is none): {effects.off_target_kl:.4f} nats {effects.where}")
    return [kl, *([table] if rows else []), *map(Text, lines), *warnings]


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


def steered_line(concept: icebear.Concept, recipe: icebear.Recipe, plain: float, steered: float) -> Text:
    record = recipe.provenance
    kl = f", off-target KL {record['off_target_kl']:.3f} nats" if "off_target_kl" in record else ""
    return Text(
        f"{concept.name}{' suppressed' * record['suppress']} at strength {record['strength']:.3g}{kl}. "
        f"Its value in each text, measured by the plain model: {plain:+.2f} plain, {steered:+.2f} steered.",
        "dim",
    )


def claims_table(result: CheckedClaims) -> Table:
    """Claims then and now, with the control and the verdict; the reason is below a claim that did not pass."""
    rows: list[tuple[str | Text, ...]] = []
    for row in result.rows:
        claim, now = row.claim, row.measured
        then, control = ("-" if x is None else f"{x:.3f}" for x in (claim.value, now and now.control))
        style = {"passed": "green", "cannot be measured here": "dim"}.get(row.verdict, "red")
        verdict = Text(row.verdict + (f": {row.why}" if row.why else ""), style)
        rows.append((str(claim), then, f"{now.value:.3f}" if now else "-", control, verdict))
    passed = sum(row.verdict == "passed" for row in result.rows)
    title = f"{passed} of {len(result.rows)} claims passed"
    return grid("claim", ">then", ">now", ">control", "verdict", rows=rows, title=title)


def evaluation_table(texts: dict[str, list[str]], columns: Iterable[str], title: str = "") -> Table:
    """Methods by metric, as `Results.texts` returns them."""
    rows = ((name, *cells) for name, cells in texts.items())
    table = grid("method", *(f">{name}" for name in columns), rows=rows, title=title)
    table.columns[0].no_wrap = True
    return table


def listing_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = ([_short(row.get(name, "")) for name in columns] for row in rows)
    return grid(columns[0], *(f">{name}" for name in columns[1:]), rows=cells, title=title)


def _short(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
