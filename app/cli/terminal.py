"""Results as rich renderables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from icebear.actmax.index.classes import class_name
from icebear.actmax.labels import score_text
from icebear.actmax.labels.score_text import HELD_OUT, measured
from icebear.actmax.page import RELMAX, counted, nearest_title
from icebear.concepts.attribution.controls import Ablation
from icebear.concepts.circuits.drawing import summary, top_sources
from icebear.concepts.render import color, hexadecimal, ink, shares, visible
from icebear.steering.flipping.phrases import in_a_line
from icebear.steering.flipping.record import EditedNeuron, FlipRecord
from icebear.steering.side_effects import SideEffects

if TYPE_CHECKING:
    from icebear.actmax.card import Card
    from icebear.actmax.explanation import Explanation
    from icebear.concepts.attribution.behaviour import Shared
    from icebear.concepts.attribution.result import Relevance
    from icebear.concepts.attribution.units import Unit
    from icebear.concepts.circuits.graph import Graph
    from icebear.concepts.circuits.records import GroupAblation
    from icebear.recipe import Recipe
    from icebear.records import Example, Hit, Meaning, Neuron, Projection, Promotion, TokenScore
    from icebear.steering.comparison import Comparison


def heatmap(relevance: Relevance) -> Text:
    """The prompt, each token on its relevance's colour; what a chat's template wrote is grey."""
    return coloured(relevance.prompt.strings, relevance.tokens.tolist(), relevance.prompt.template)


def coloured(tokens: Sequence[str], values: list[float], apart: Sequence[int] = ()) -> Text:
    """Tokens on the colour of their values; those apart are grey."""
    text = Text()
    for place, (token, share) in enumerate(zip(tokens, shares(values, set(apart)), strict=True)):
        rgb = color(share)
        look = Style(dim=True) if place in apart else Style(color=ink(rgb), bgcolor=hexadecimal(rgb))
        text.append(visible(token), look)
    return text


LONG = 240
"""Letters of a text in a table."""


def grid(*columns: str, title: str | Text | None = None, caption: str | None = None) -> Table:
    """An empty table; a column whose name begins with > is justified to the right."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    table.caption, table.caption_justify = caption, "left"
    for name in columns:
        table.add_column(name.removeprefix(">"), justify="right" if name[:1] == ">" else "left", overflow="fold")
    return table


def patches(relevance: Relevance) -> Text:
    """An image's patches as cells of colour."""
    text = Text()
    assert relevance.image is not None
    rows = relevance.image.patches.tolist()
    parts = iter(shares([value for row in rows for value in row]))
    for row in rows:
        for _ in row:
            text.append("  ", Style(bgcolor=hexadecimal(color(next(parts)))))
        text.append("\n")
    return text


def token_table(relevance: Relevance) -> Table:
    template = set(relevance.prompt.template)
    positions = None if relevance.positions is None else relevance.positions.sum(0).tolist()
    of_position = [">its position"] if positions else []
    table = grid(">position", "token", ">relevance", *of_position, "")
    for place, (token, value) in enumerate(zip(relevance.prompt.strings, relevance.tokens.tolist(), strict=True)):
        if place in template:
            continue
        notes = ["sink"] * (place in relevance.prompt.sinks) + ["decoder"] * (place >= relevance.prompt.encoder_length)
        extra = [f"{positions[place]:+.3f}"] if positions else []
        table.add_row(str(place), Text(repr(token)), f"{value:+.3f}", *extra, ", ".join(notes))
    if template:
        rest = relevance.tokens[list(relevance.prompt.template)].sum().item()
        table.add_row("", f"the template's {len(template)} tokens", f"{rest:+.3f}", style="dim")
    return table


def units_table(parts: Sequence[tuple[Unit, float]]) -> Table:
    table = grid("whose", ">relevance", "text")
    for unit, value in parts:
        style = "dim" if unit.template else None
        text = visible(unit.text.strip())
        shown = text if len(text) <= LONG else f"{text[: LONG // 2]} ... {text[-LONG // 2 :]}"
        table.add_row(unit.turn, f"{value:+.3f}", Text(shown), style=style)
    return table


def token_relevance(relevance: Relevance, units: Table | None = None) -> Group:
    """The prediction, the heatmap and where the relevance went, by token or by `units`."""
    head = Text.assemble("Why ", (repr(relevance.target_text), "bold"))
    if relevance.contrast_text:
        head.append(f" rather than {relevance.contrast_text!r}")
    predicted = ", ".join(f"{token.text!r} {token.number}" for token in relevance.predictions[:5])
    return Group(
        Text(f"Predicted: {predicted}"),
        Text.assemble(head, Text(f"?  method: {repr(relevance.method).removesuffix('()')}", "dim")),
        Padding(patches(relevance) if relevance.image else heatmap(relevance), (1, 2)),
        *([] if relevance.image else [units or token_table(relevance)]),
        Text(relevance.account(), "dim"),
        *([Text(relevance.meaning(), "dim")] if relevance.counterfactual else []),
        *([Text(f"No rule for: {', '.join(relevance.missing_rules)}", "yellow")] if relevance.missing_rules else []),
    )


def investigation(explanation: Explanation, units: Table | None = None) -> Group:
    """Everything that an explanation has, in the order in which it is read."""
    relevance, circuit = explanation.relevance, explanation.circuit
    parts: list[Any] = [token_relevance(relevance, units)]
    if explanation.nodes:
        parts.append(nodes_table(explanation))
    if explanation.meanings:
        parts.append(meanings(explanation.meanings))
    if explanation.nodes and not relevance.counterfactual:
        parts.append(Text(relevance.meaning(), "dim"))
    if explanation.ablations:
        parts.append(carried(explanation.ablations))
    if explanation.removed:
        parts.append(Text(str(explanation.removed), "dim"))
    if circuit:
        parts += [Text(summary(circuit.graph)), groups_table(circuit.graph, circuit.without)]
    return Group(*parts)


def nodes_table(explanation: Explanation, title: str | None = None) -> Table:
    """The nodes with what they write."""
    relevance = explanation.relevance
    compared = relevance.counterfactual is not None
    table = grid(
        "neuron",
        "token",
        ">activation",
        *([">there"] if compared else []),
        ">relevance",
        "promotes more here" if compared else "promotes here",
        title=title or _nodes_title(explanation),
    )
    for node in explanation.nodes:
        row = node.ranked
        there = [] if not compared else ["" if row.counterfactual is None else f"{row.counterfactual:+.3f}"]
        table.add_row(
            str(row.neuron),
            Text(repr(node.token)),
            "" if row.neuron.site == "head" else f"{row.activation:+.3f}",
            *there,
            f"{row.relevance:+.3f}",
            Text(node.words),
        )
    return table


def _nodes_title(explanation: Explanation) -> str:
    relevance, ranking, position = explanation.relevance, explanation.ranking, explanation.ranking.position
    where = {"all": "at every token", "last": "where it is predicted"}.get(str(position), f"at position {position}")
    title = f"Most relevant neurons {where}"
    if position == "all" and not ranking.include_sinks:
        title += f", attention sinks excluded: {list(relevance.prompt.sinks)}"
    if position == "all" and relevance.prompt.turns and not ranking.include_template:
        title += ", the chat template excluded"
    return title


def carried(found: Sequence[Ablation]) -> Table:
    """What lists of nodes carry, beside controls."""
    table = grid(
        ">nodes by size of relevance",
        *(f">{name}{kind}" for name in ("", "matched: ", "control: ") for kind in ("kept", "left without")),
        title="How much of the difference is there with these nodes alone, and without them",
        caption="matched: others of the same layers and tokens; control: largest activation change",
    )
    for row in found:
        table.add_row(f"{row.nodes:,}", *(f"{round(share, 2) + 0.0:.2f}" for share in list(vars(row).values())[1:]))
    return table


def circuit_tables(
    graph: Graph,
    ablation: dict[str, Any] | None = None,
    faithfulness: dict[str, Any] | None = None,
    correlations: dict[str, float] | None = None,
) -> Group:
    """A circuit: its groups, its nodes from the top down with what gives them most, and what was measured of it."""
    parts: list[Any] = [Text(summary(graph)), groups_table(graph), _tree(graph)]
    if ablation:
        parts.append(carried([Ablation(**ablation)]))
    if faithfulness and correlations:
        parts.append(
            Text(
                f"The sufficiency of {faithfulness['edges']} edges is {faithfulness['sufficiency']:.0%}, of as many "
                "random edges into the same targets from the same layers "
                f"{faithfulness['random_sufficiency']:.0%}, of all edges between the nodes "
                f"{faithfulness['all_edges']:.0%}.\n"
                f"Effects between neurons correlate with direct interventions at {correlations['effects']:.3f}, "
                f"contributions with two-sided ones at {correlations['contributions']:.3f}.",
                "dim",
            )
        )
    return Group(*parts)


def groups_table(graph: Graph, without: Sequence[GroupAblation] = ()) -> Table:
    """A circuit's groups; of the first what the answer is without each."""
    off = [">necessity", ">random", "answer without"] if without else []
    table = grid("group", ">nodes", ">score", *off, title="Groups")
    if without:
        table.caption = "random: the necessity of as many random nodes of the same layers and tokens"
    for number, group in enumerate(graph.groups[: len(without) or None]):
        told: list[Any] = []
        if without:
            found = without[number]
            told = [f"{found.necessity:.0%}", f"{found.random_necessity:.0%}", Text(repr(found.predictions[0].text))]
        table.add_row(Text(group.name), str(len(group.nodes)), f"{group.score:+.3f}", *told)
    return table


def _tree(graph: Graph) -> Tree:
    """The answer, then layer by layer downwards, each node with its three largest sources by share."""
    tree = Tree(Text(f"{graph.answer}  from {top_sources(graph, graph.answer, 3)}"))
    for layer in sorted({node.neuron.layer for node in graph.nodes}, reverse=True):
        branch = tree.add(f"L{layer}")
        for node in graph.nodes:
            if node.neuron.layer == layer:
                token = repr(graph.tokens[node.position].text)
                words = ", ".join(word.strip() for word in node.words[:3])
                branch.add(Text(f"{node} {token} {node.score:+.3f}  {words}  from {top_sources(graph, node, 3)}"))
    return tree


def behaviour_table(found: Sequence[Shared], words: dict[Any, Projection], prompts: int) -> Table:
    """Neurons by their mean over prompts; `words` may lack some."""
    table = grid(
        "neuron",
        ">activation",
        ">relevance",
        ">95 %",
        f">in the top {len(found)}",
        "promotes there",
        title=f"Most relevant neurons, means over {prompts} prompts, where it is predicted",
    )
    for row in found:
        table.add_row(
            str(row.neuron),
            "" if row.neuron.site == "head" else f"{row.activation:+.3f}",
            f"{row.relevance:+.3f}",
            f"{row.low:+.3f} to {row.high:+.3f}",
            f"{row.among_top} of {prompts}",
            Text(words[row.neuron].words(row.polarity) if row.neuron in words else ""),
        )
    return table


def projection(result: Projection) -> Table:
    """What a neuron writes; where its standard deviation is known, by that as well."""
    by_std = result.typical is not None and result.std is not None
    numbers = [*(["logit"] if result.typical else []), *(["per std"] if by_std else []), "z"]
    columns = [f">{name}" for name in numbers]
    table = grid("promotes (+)", *columns, "suppresses (-)", *columns, title=result.about)

    def cells(token: Promotion) -> list[str | Text]:
        logit = token.logit or 0.0
        values = {"logit": f"{logit:+.3f}", "per std": f"{logit * (result.std or 0.0):+.2f}", "z": f"{token.z:+.1f}"}
        return [Text(repr(token.text)), *(values[name] for name in numbers)]

    for up, down in zip(result.promoted, result.suppressed, strict=True):
        table.add_row(*cells(up), *cells(down))
    return table


def side_by_side(comparison: Comparison) -> Group:
    """Two generations and their first-token probabilities."""
    sides = (comparison.plain, comparison.steered)
    end = "\n" if not isinstance(comparison.prompt, str) else "" if comparison.task == "causal" else " → "
    begin = in_a_line(comparison.prompt) + end
    table = Table(box=box.ROUNDED, expand=True)
    for name in ("plain", "steered"):
        table.add_column(name, ratio=1, overflow="fold")
    table.add_row(*(Text.assemble((begin, "dim"), side.text) for side in sides))
    table.add_section()
    table.add_row(*(Text(_bars(side.next)) for side in sides))
    return Group(table)


def _bars(tokens: Sequence[TokenScore]) -> str:
    def bar(token: TokenScore) -> str:
        if token.probability is None:  # a number is predicted
            return f"{token.logit:+.3f}"
        return f"{token.probability:.3f} {'█' * round(20 * token.probability)}"

    return "\n".join(f"{token.text!r:<14} {bar(token)}" for token in tokens)


def recipe_table(recipe: Recipe) -> Group:
    """A recipe's edits, what is known about their neurons, their side effects, and where the recipe came from.

    Raises `RecipeError` where its provenance is not as icebear writes it.
    """
    records, effects = FlipRecord.all_of(recipe), SideEffects.of(recipe)
    facts = {"model": f"{recipe.model_name} ({recipe.model_fingerprint})"}
    for origin in (recipe.provenance, *map(vars, records)):
        facts |= {key: repr(value) for key, value in origin.items() if isinstance(value, str | int | float)}
    neurons = {row.neuron: row for record in records for row in record.neurons}
    lines = [Text(f"{key.replace('_', ' ')}: {value}", "dim") for key, value in facts.items()]
    return Group(_edits(recipe, neurons), *(_side_effects(effects) if effects else []), *lines)


def _edits(recipe: Recipe, neurons: Mapping[Neuron, EditedNeuron]) -> Table:
    examples = ["examples"] if any(row.examples for row in neurons.values()) else []
    table = grid(
        "edit", ">was", ">of its range", ">relevance", "promotes at +", "at -", *examples, title=Text(recipe.name)
    )
    table.columns[0].no_wrap = True
    for edit in recipe:
        row, cells = neurons.get(edit.neuron), []
        if row:
            share = "outside" if row.of_its_range is None else f"{row.of_its_range:.2f} x"
            words = (", ".join(map(visible, side)) for side in (row.promotes, row.suppresses))
            cells = [f"{row.activation:+.2f}", share, f"{row.relevance:+.3f}", *words]
            cells += ["\n".join(row.examples) for _ in examples]
        table.add_row(str(edit), *map(Text, cells))
    return table


def _side_effects(effects: SideEffects) -> list[Table | Text]:
    table = grid("next token", ">before", ">rank", ">after", ">rank")
    tokens = {token.text: token for token in (effects.old, effects.new) if token}
    for text, token in tokens.items():
        table.add_row(
            Text(repr(text)),
            f"{token.before:.3f}",
            str(token.rank_before),
            f"{token.after:.3f}",
            str(token.rank_after),
        )
    lines = [
        f"Price: {effects.kl:.4f} nats of KL {effects.where}",
        f"Perplexity of held-out sentences: {effects.perplexity:.1f}, with edits at each token "
        f"{effects.perplexity_everywhere:.1f}",
    ]
    if effects.repetition is not None:
        lines.append(f"Repetition after it: {effects.repetition:.0%}, without edits {effects.repetition_plain:.0%}")
    warnings = [Text(f"Warning: {line}", "yellow") for line in effects.warnings]
    return [Text(lines[0]), *([table] if tokens else []), *map(Text, lines[1:]), *warnings]


def predictions(tokens: Sequence[TokenScore]) -> str:
    return ", ".join(f"{token.text!r} {token.number}" for token in tokens)


def card(found: Card) -> Group:
    """A neuron: label, class, statistics, vocabulary, and examples of both signs."""
    statistics = found.statistics
    parts: list[Any] = [
        Text.assemble((str(found.neuron), "bold"), f"  {found.title}"),
        Text(
            f"mean {statistics.mean:+.3f}  std {statistics.std:.3f}  min {statistics.min:+.2f}  "
            f"max {statistics.max:+.2f}  positive {statistics.positive:.0%}{counted(found)}",
            "dim",
        ),
        Text(f"{_sparkline(statistics.histogram)}  histogram of activations, -128 to 128, log2 bins", "dim"),
    ]
    if found.projection:
        parts.append(projection(found.projection))
    if found.by == "relevance":
        parts.append(Text(RELMAX, "dim"))
    for polarity, examples in found.examples.items():
        parts += meaning_told(polarity, found.meanings.get(polarity), found.held_out.get(polarity, {}))
        title = f"class: {class_name(found.kind[polarity])}"
        table = grid(f">{found.by}", "sentence", title=title)
        for example in examples:
            table.add_row(f"{example.value:+.2f}", _highlighted(example))
        parts.append(table)
    for by, nearest in found.nearest.items():
        names = ", ".join(f"{hit} ({hit.score:.2f})" for hit in nearest)
        parts.append(Text(f"{nearest_title(by, found.nearest_by_chance[by])}: {names}", "dim"))
    return Group(*parts)


def meaning_told(polarity: str, meaning: Meaning | None, held_out: dict[str, list[Example]]) -> list[Any]:
    """A label with what it was measured on, and sentences that it was not made from."""
    parts: list[Any] = [Text(f"\nPolarity {polarity}: {score_text.title(meaning)}", "bold")]
    if meaning:
        parts += [Text(line, "dim") for line in measured(meaning)]
        parts += [_held_out(name, rows[:2]) for name, rows in held_out.items() if rows and meaning.clear]
    return parts


def _held_out(name: str, examples: Sequence[Example]) -> Table:
    table = grid(">", HELD_OUT[name])
    for example in examples:
        table.add_row(f"{example.value:+.2f}", _highlighted(example))
    return table


KNOWN = "What they mean: labels that hold, with their AUROC (icebear neuron has what it was measured on)"


def meanings(found: Sequence[Meaning], title: str = KNOWN) -> Table:
    """Labels with their scores."""
    table = grid("neuron", "sign", "label", "by", ">score", ">p", title=title)
    for meaning in found:
        text = Text(meaning.text, "" if meaning.clear else "dim")
        table.add_row(
            str(meaning.neuron),
            meaning.polarity,
            text if meaning.clear else Text.assemble("no clear meaning; nearest: ", text),
            meaning.by,
            f"{meaning.score:.2f}",
            f"{meaning.p:.3f}",
        )
    return table


def evaluation_table(texts: dict[str, list[str]], columns: Iterable[str], title: str = "") -> Table:
    """Methods by metric, as `Results.texts` has them."""
    table = grid("method", *(f">{name}" for name in columns), title=title)
    for name, cells in texts.items():
        table.add_row(name, *(Text(cell) for cell in cells))
    return table


def listing_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Rows of any columns."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = grid(columns[0], *(f">{name}" for name in columns[1:]), title=title)
    for row in rows:
        table.add_row(*(Text(_short(row.get(name, ""))) for name in columns))
    return table


def _short(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def hits(found: Sequence[Hit], labels: dict[Any, str | None]) -> Table:
    """What a search found, and why; labels are somebody's, or automatic ones that hold, with their scores."""
    table = grid("neuron", "sign", "why", "label")
    for hit in found:
        table.add_row(str(hit.neuron), hit.polarity, Text("; ".join(hit.why)), Text(labels.get(hit) or ""))
    return table


def _highlighted(example: Example) -> Text:
    """The tokens up to a little past the extreme one, which stands out."""
    tokens, place = example.sentence.tokens, example.token
    text = Text("..." if place > 25 else "")
    parts = shares(list(example.relevance)) if example.relevance else [0.0] * len(tokens)
    for number in range(max(0, place - 25), min(len(tokens), place + 8)):
        if not tokens[number]:  # part of a character that a later token completes
            continue
        rgb = color(parts[number])
        style = Style(color=ink(rgb), bgcolor=hexadecimal(rgb)) if example.relevance else Style()
        text.append(visible(tokens[number]), style + Style(bold=True, underline=True) if number == place else style)
    return text.append("..." if place + 8 < len(tokens) else "")


def _sparkline(counts: Sequence[int]) -> str:
    largest = max(counts) or 1
    return "".join(" ▁▂▃▄▅▆▇█"[-(-8 * count // largest)] for count in counts)
