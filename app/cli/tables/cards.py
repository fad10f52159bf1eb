"""The card of a neuron, its labels with their scores, and search results."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.style import Style
from rich.table import Table
from rich.text import Text

from icebear.actmax.card import attended_line, heading, statistics_line, token_count_note, writes_about, writes_title
from icebear.actmax.head_attention import attended_text
from icebear.actmax.labels import significance
from icebear.actmax.page import patches_text
from icebear.app.cli.tables.grid import grid, shade
from icebear.concepts.results.effect_words import effect_text
from icebear.db.search import LIKE_IMAGE, NO_NEURON, NO_NEURON_LIKE, absent_line
from icebear.models.loading.presets import model_option
from icebear.records import AutomaticLabel, Example, Hit, Projection, Promotion, SentenceEffects
from icebear.render import characters, normalized, visible

if TYPE_CHECKING:
    import icebear
    from icebear.actmax.searching import LikeImage
    from icebear.concepts.vocabulary.lens import MeanLens

PROJECTED_TOKENS = 10
"""Tokens of a projection on a card."""


def projections_report(projections: Sequence[Projection], rows: int | None = None) -> list[Table | Text]:
    """The first tokens by the better lens as a table, the other lens as one line, and how reliable the table is."""
    parts: list[Table | Text] = []
    for best in projections[:1]:
        shown = replace(best, promoted=best.promoted[:rows], suppressed=best.suppressed[:rows], reliability=None)
        parts.append(projection_table(shown) if best.has_words else Text(best.no_words, "dim"))
        parts += [Text(f"Reliability in this layer: {best.reliability}.", "dim")] if best.reliability else []
    return parts + [Text(visible(projection.line), "dim") for projection in projections[1:]]


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


def card_report(card: icebear.Card, store: Sequence[str] = ()) -> Group:
    """The card of a neuron. store: the option of the command that names its index, if it needs one."""
    statistics, largest = card.statistics, max(card.statistics.histogram) or 1
    bars = "".join(" ▁▂▃▄▅▆▇█"[-(-8 * count // largest)] for count in statistics.histogram)
    numbers = (
        f"mean {statistics.mean:+.3f}  std {statistics.std:.3f}  min {statistics.min:+.2f}  "
        f"max {statistics.max:+.2f}  positive {statistics.positive:.0%}{token_count_note(card)}"
    )
    parts: list[Any] = [
        Text.assemble((str(card.neuron), "bold"), f"  {card.title}"),
        Text(statistics_line(card) if card.is_head else numbers, "dim"),
        Text(_histogram(bars, card.is_head), "dim"),
        *map(Text, card.attention.lines if card.attention else ()),
    ]
    words = projections_report(card.projections, PROJECTED_TOKENS)
    written = ["", writes_table(card)] if card.writes else []
    parts += [*words, *written] if card.has_fixed_words else [*written, "", *words]
    if card.is_of_images:
        return Group(*parts, *(images_table(card, polarity) for polarity in card.examples))
    for polarity, examples in card.examples.items():
        side = "Tokens that it attends to" if card.is_head else f"Polarity {polarity}"
        parts.append(label_report(side, card.meanings.get(polarity), card.held_out.get(polarity, {})))
        parts += [Text(visible(attended_line(card)), "dim")] if card.attends_to else []
        effects = card.writes[polarity].places if polarity in card.writes else ()
        value = ">norm" if card.is_head else ">activation"
        heading = f"sentence ({card.index_name})" if card.beside else "sentence"
        absence = card.absence(polarity)
        shown = Text(absence, "dim") if absence else _examples_table(value, heading, examples, effects, card.is_head)
        parts.append(shown)
        for other in card.beside:
            if rows := other.examples.get(polarity):
                parts.append(_examples_table(value, f"sentence ({other.index})", rows, of_head=card.is_head))
    parts += [Text(f"Try: {card.swap}", "dim")] if card.swap else []
    if any(not card.absence(polarity) for polarity in card.examples.keys() - card.meanings.keys()):
        command = ["icebear", "label", str(card.neuron), "--auto", *store, *model_option(card.made_with)]
        parts.append(Text(f"Label it: {shlex.join(command)}", "dim"))
    return Group(*parts)


def images_table(card: icebear.Card, polarity: str) -> Table:
    """The images of a polarity: the value, the patch and the file of each."""
    rows = [
        (f"{e.activation:{'' if card.is_head else '+'}.2f}", patches_text(e, card.is_head), visible(e.sentence.text))
        for e in card.examples[polarity]
    ]
    names = (">norm" if card.is_head else ">activation", "patch (row,column)", "file")
    return grid(*names, rows=rows, title=f"\n{heading(card, polarity)}")


def writes_table(card: icebear.Card) -> Table:
    """What the neuron writes at its sentences, by polarity."""
    rows = []
    for polarity, words in card.writes.items():
        moved = (", ".join(map(visible, side)) for side in (words.raises, words.lowers))
        numbers = (words.correlation, words.random_correlation)
        rows.append((polarity, *moved, *("" if number is None else f"{number:.2f}" for number in numbers)))
    return grid(
        "sign", "raises", "lowers", ">alike", ">random", rows=rows, title=writes_title(card), caption=writes_about(card)
    )


LABELS_TITLE = "Significant labels with their AUROC; icebear neuron shows the details"


def _histogram(bars: str, of_head: bool) -> str:
    """Return a histogram with its range; a norm has the bins from 0 on."""
    if of_head:
        return f"{bars[len(bars) // 2 :]}  histogram of this norm, 0 to 128, log2 bins"
    return f"{bars}  histogram of activations, -128 to 128, log2 bins"


def label_report(side: str, meaning: AutomaticLabel | None, held_out: dict[str, list[Example]]) -> Group:
    parts: list[Any] = [Text(f"\n{side}: {significance.label_title(meaning)}", "bold")]
    if meaning:
        parts += [Text(line, "dim") for line in significance.score_lines(meaning)]
    if meaning and meaning.significant:
        parts += [
            _examples_table(">", significance.HELD_OUT_GROUPS[name], rows[:2])
            for name, rows in held_out.items()
            if rows
        ]
    return Group(*parts)


def _examples_table(
    value: str,
    heading: str,
    examples: Sequence[Example],
    effects: Sequence[SentenceEffects] = (),
    of_head: bool = False,
) -> Table:
    """Sentences, and the measured effects of the neuron in the first of them; of a head, both tokens by themselves."""
    rows: list[Sequence[str | Text]] = []
    for example, effect in zip_longest(examples, effects[: len(examples)]):
        text = highlighted(example)
        if effect:
            text.append(f"\n{visible(effect_text(effect.raises, effect.lowers))}", "dim")
        both = [repr(example.token_text), attended_text(example)] if of_head else []
        rows.append((f"{example.activation:{'' if of_head else '+'}.2f}", *both, text))
    columns = ("writes at", "attends to") if of_head else ()
    return grid(value, *columns, heading, rows=rows)


def highlighted(example: Example) -> Text:
    """The tokens around the extreme one, which stands out; in a file or pipe, which has no styles, in « »."""
    tokens, extreme = example.sentence.tokens, example.token
    text = Text("..." if extreme > 25 else "")
    parts = normalized(list(example.relevance)) if example.relevance else None
    shown = next(group[-1] for group in characters(tokens) if extreme in group)  # the last token has the character
    for at in range(max(0, extreme - 25), min(len(tokens), shown + 8)):
        style = shade(parts[at]) if parts else Style()
        piece = tokens[at] and visible(tokens[at])  # empty: part of a character that a later token completes
        if at == shown and not sys.stdout.isatty():
            piece = f"{piece[: len(piece) - len(piece.lstrip())]}«{piece.strip()}»"
        if piece:
            text.append(piece, style + Style(bold=True, underline=True) if at == shown else style)
    return text.append("..." if shown + 8 < len(tokens) else "")


def labels_table(labels: Sequence[AutomaticLabel], title: str = LABELS_TITLE) -> Table:
    """Automatic labels with their scores. A candidate that is not significant is not shown."""
    rows = []
    for row in labels:
        measured = (row.text, row.by, f"{row.score:.2f}", f"{row.p:.3f}")
        shown = measured if row.significant else (significance.label_title(row), "", "", "")
        rows.append((str(row.neuron), row.polarity, *shown))
    return grid("neuron", "sign", "label", "by", ">score", ">p", rows=rows, title=title)


def own_label_table(scores: Sequence[AutomaticLabel], title: str) -> Table:
    """The scores of a label that a person gave, significant or not."""
    rows = [
        (str(row.neuron), row.polarity, row.by, f"{row.score:.2f}", f"{row.p:.3f}", "yes" if row.significant else "no")
        for row in scores
    ]
    return grid("neuron", "sign", "by", ">score", ">p", "significant", rows=rows, title=title)


def hits_report(
    hits: Sequence[Hit],
    labels: dict[Any, str | None],
    absent: Sequence[str],
    headings: dict[str, str],
    index: str,
) -> Iterator[Table | Text]:
    """The results of a search by kind, the words that no sentence has, and which index this is."""
    if absent:
        yield Text(absent_line(absent))
    for by, title in headings.items():
        by_kind = [hit for hit in hits if hit.by == by]
        rows = [(str(hit.neuron), hit.polarity, "; ".join(hit.why), labels.get(hit) or "") for hit in by_kind]
        if rows:
            yield grid("neuron", "sign", "why", "label", rows=rows, title=title)
    if not hits and not absent:
        yield Text(NO_NEURON)
    yield Text(f"Index: {index}.", "dim")


def like_image_report(result: LikeImage, labels: dict[Any, str | None], index: str) -> Iterator[Table | Text]:
    """The neurons whose strongest images are like an image, the most similar images, and which index this is."""
    rows = [(str(hit.neuron), hit.polarity, "; ".join(hit.why), labels.get(hit) or "") for hit in result.hits]
    yield grid("neuron", "sign", "why", "label", rows=rows, title=LIKE_IMAGE) if rows else Text(NO_NEURON_LIKE)
    images = [(f"{cosine:.2f}", visible(name)) for name, cosine in result.images]
    yield grid(">cosine", "file", rows=images, title="The most similar images of the index")
    yield Text(f"Index: {index}.", "dim")
