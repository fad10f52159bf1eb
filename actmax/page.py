"""The HTML of a card, and of its parts for other pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.resources import files
from itertools import pairwise, zip_longest
from math import isfinite
from typing import TYPE_CHECKING

from markupsafe import Markup

from icebear.actmax.head_attention import attended_text, attended_token
from icebear.actmax.labels.significance import HELD_OUT_GROUPS, label_title, score_lines
from icebear.concepts.results.effect_words import BY_LENS, effect_text
from icebear.records import (
    HISTOGRAM_EDGES,
    IMAGES,
    POLARITIES,
    Example,
    Projection,
    Promotion,
    SentenceEffects,
    Writes,
)
from icebear.render import NEGATIVE, POSITIVE, render, visible

if TYPE_CHECKING:
    from icebear.actmax.card import Card, Crop

STYLE = files("icebear.actmax").joinpath("templates", "card.css").read_text(encoding="utf-8")
TICKS = 6
"""About as many numbers are on the axis of a histogram."""
BEFORE = 24
"""Tokens of an excerpt before the strongest one."""
AFTER = 10
ALIKE = 0.5
"""Effects of a smaller mean correlation change from sentence to sentence."""
WRITES = "What the neuron writes at its maximally activating sentences"
HEAD_WRITES = "What the head writes in the sentences in which it writes most"
HEAD_MARKS = "Underlined: the token where it writes; the number is the norm of what it writes there, less its mean."
HEAD_SENTENCES = "Each sentence is the one in which it writes most, for one token that it attends to."
HEAD_COLORS = "Red: its attention from there, darker for more; the line below names the token with the most."
CROPS = {
    "patch": "Each crop shows the patch (outlined) with the patches around it.",
    "relevance": "Each crop is the smallest square with half of the relevance of the activation (of a head: of its "
    "attention). Patches with less are darker. Outlined: the patch.",
}
"""The kinds of crops of an index of images."""
NO_CROP = "The crop needs the model."


def head_tokens(example: Example) -> str:
    """Say where a head writes, and which token it attends to most, if that is measured."""
    attended = attended_text(example)
    return f"writes at {example.token_text!r}" + (f", attends to {attended}" if attended else "")


def head_marks(card: Card) -> str:
    """Return which sentences of a head are shown, and what the marks in them are; of images, what the crops are; empty
    for a neuron of texts."""
    if card.is_of_images:
        return CROPS[card.crop]
    attended = f"{attended_line(card)} {HEAD_MARKS} {HEAD_COLORS}" if card.attends_to else HEAD_MARKS
    return attended if card.is_head else ""


def attended_line(card: Card) -> str:
    """Say which sentences of a head are shown, and which tokens it attends to in all of them."""
    count = sum(card.attends_to.values())
    often = ", ".join(f"{piece!r} in {times}" for piece, times in card.attends_to.items() if times > 1)
    return f"{HEAD_SENTENCES} Among its {count} strongest sentences, it attends to {often or 'another token in each'}."


def heading(card: Card, polarity: str) -> str:
    """Return the heading of the examples at a polarity."""
    what = IMAGES if card.is_of_images else "sentences"
    if card.is_head:
        return f"{what.capitalize()} in which it writes most"
    return f"Strongest {'positive' if polarity == '+' else 'negative'} {what}"


def card_fragment(card: Card) -> Markup:
    """Return the card, for a page with `STYLE`."""
    return render(
        "icebear.actmax/card.html",
        card=card,
        statistics=statistics_line(card),
        heading=heading,
        marks=head_marks(card),
        meaning=meaning_html,
        examples=partial(examples_html, of_head=card.is_head),
        images=partial(images_html, of_head=card.is_head),
        histogram=histogram_html(card.statistics.histogram),
        writes=writes_html(card),
        vocabulary=projections_html(card.projections),
    )


def statistics_line(card: Card) -> str:
    statistics = card.statistics
    if card.is_head:
        return (
            f"norm of what it writes, less its mean: mean {statistics.mean:.3f}, std {statistics.std:.3f}, maximum "
            f"{statistics.max:.2f}{token_count_note(card)}"
        )
    tokens = "patches" if card.is_of_images else "tokens"
    return (
        f"mean {statistics.mean:+.3f}, std {statistics.std:.3f}, positive on {statistics.positive:.0%} of "
        f"the {tokens}{token_count_note(card)}; minimum {statistics.min:+.2f}, maximum {statistics.max:+.2f}"
    )


def token_count_note(card: Card) -> str:
    """Return the number of tokens that means are taken over, if it is not all, and which index the card is from."""
    index = card.made_with["index"]
    averaged, every = index.get("statistics_tokens"), index.get("tokens")
    notes = [] if averaged in (None, every) else [f"of {averaged:,} tokens"]
    notes += [f"from {card.index_name}"] if card.index_name else []
    return f" ({', '.join(notes)})" if notes else ""


def meaning_html(card: Card, polarity: str) -> Markup:
    """Return the label with its score, and on a click its test and held-out sentences."""
    label = card.meanings.get(polarity)
    held_out = card.held_out[polarity] if label and label.significant else {}
    return render(
        "icebear.actmax/meaning.html",
        title=label_title(label),
        lines=score_lines(label) if label else [],
        held_out=[(HELD_OUT_GROUPS[name], examples_html(rows)) for name, rows in held_out.items()],
    )


def examples_html(rows: Sequence[Example], effects: Sequence[SentenceEffects] = (), of_head: bool = False) -> Markup:
    """Return sentences with the value of the neuron in each, and, in the first of them, the measured effects; of a
    head, also the tokens where it writes and that it attends to."""
    texts = [head_tokens(row) if of_head else "" for row in rows]
    shown = list(zip_longest(rows, texts, effects[: len(rows)]))
    return render("icebear.actmax/examples.html", examples=shown, effect_text=effect_text, of_head=of_head)


def images_html(examples: Sequence[Example], crops: Sequence[Crop], of_head: bool = False) -> Markup:
    """Return images: the crop, the value, the patch and the file of each."""
    rows, tokens = list(zip_longest(examples, crops)), partial(patches_text, of_head=of_head)
    return render("icebear.actmax/images.html", rows=rows, tokens=tokens, of_head=of_head, no_crop=NO_CROP)


def patches_text(example: Example, of_head: bool) -> str:
    """Return the patch of an example as row,column, and the one that a head attends to most, if that is measured."""
    attended = attended_token(example) if of_head else None
    if attended is None:
        return example.token_text
    share = (example.relevance or ())[attended]
    return f"{example.token_text}, attends to {example.sentence.tokens[attended]} ({share:.2f})"


def writes_title(card: Card) -> str:
    return HEAD_WRITES if card.is_head else WRITES


def writes_about(card: Card) -> str:
    """Return what the words and numbers of `Card.writes` are; there are some."""
    effects = next(iter(card.writes.values()))
    if card.is_head:
        return (
            f"Effects on the likely next words are measured in each of the first {len(effects.places)} sentences. An "
            "effect compares what the head writes with its mean on the calibration texts. A sentence has words only if "
            "the effect is larger than at every one of as many random tokens; their mean has words only if the effects "
            "are more alike than at random tokens (alike, random: mean correlation of two effects)."
        )
    return (
        f"Effects on the likely next words are measured in each of the first {len(effects.places)} sentences, and "
        f"averaged. An effect compares the neuron's activation with its average activation ({effects.average:+.2f}). "
        "alike: correlation between the effects in two of these sentences, averaged over all pairs. random: the same "
        "average over pairs of random sentences."
    )


def writes_verdict(effects: Writes) -> str:
    """Say whether the words of `Writes` hold at all its sentences, with the numbers behind that."""
    alike, random = effects.correlation, effects.random_correlation
    if alike is None:
        return ""
    numbers = f"alike {alike:.2f}" + ("" if random is None else f", random {random:.2f}")
    if not effects.raises and not effects.lowers:
        return f"The effects have no likely words in common ({numbers})."
    if alike < ALIKE:
        return f"The effect changes from sentence to sentence, so these words are not its meaning ({numbers})."
    if random is not None and random >= ALIKE:
        return f"The effect is much the same in any sentence, in these and in random ones ({numbers})."
    return f"The effect is much the same at each of these sentences ({numbers})."


def writes_html(card: Card, polarities: Sequence[str] = POLARITIES) -> Markup:
    """Return what the neuron writes at its sentences, by polarity; nothing if that is not measured."""
    about = writes_about(card) if card.writes else ""
    measured_at = {polarity: card.writes[polarity] for polarity in polarities if polarity in card.writes}
    return render(
        "icebear.actmax/writes.html",
        title=writes_title(card),
        writes=measured_at,
        of_head=card.is_head,
        verdict=writes_verdict,
        about=about,
    )


def projections_html(projections: Sequence[Projection], polarity: str = "+") -> Markup:
    """Return the projection through the better lens as bars, and the other one as a line."""
    bars = Markup().join(vocabulary_html(projection, polarity) for projection in projections[:1])
    lines = (projection.at(polarity).line for projection in projections[1:])
    return bars + Markup().join(Markup('<p class="dim">{}</p>').format(visible(line)) for line in lines)


def vocabulary_html(projection: Projection, polarity: str = "+") -> Markup:
    """Return the tokens that are promoted and suppressed at a polarity as bars, if they stand out."""
    if not projection.has_words:
        return Markup('<p class="dim">{}</p>').format(projection.no_words)
    return render(
        "icebear.actmax/vocabulary.html",
        projection=projection.at(polarity),
        polarity=polarity,
        positive=POSITIVE,
        negative=NEGATIVE,
        about=BY_LENS[projection.lens],
    )


def result_html(projection: Projection | None, sides: Sequence[tuple[str, Sequence[Example]]]) -> Markup:
    """Return a result of a search: its words, and the sentences of both sides, cut around their strongest tokens."""
    words = projection and [_distinct(tokens) for tokens in (projection.promoted, projection.suppressed)]
    about = BY_LENS[projection.lens] if projection else ""
    shown = [(name, [excerpt(example) for example in examples]) for name, examples in sides]
    return render("icebear.actmax/result.html", words=words, sides=shown, about=about)


def _distinct(tokens: Sequence[Promotion]) -> list[str]:
    """Return the first five words that differ in more than spaces and capitals."""
    words: dict[str, str] = {}
    for token in tokens:
        word = token.text.strip() or token.text
        words.setdefault(word.lower(), word)
    return list(words.values())[:5]


def excerpt(example: Example) -> Example:
    """Return an example whose sentence has `BEFORE` tokens before the strongest one, and `AFTER` after it."""
    tokens, peak = example.sentence.tokens, example.token
    start, stop = max(0, peak - BEFORE), peak + AFTER + 1
    cut = (*(["…"] if start else []), *tokens[start:stop], *(["…"] if stop < len(tokens) else []))
    relevance = example.relevance and (
        *([0.0] if start else []),
        *example.relevance[start:stop],
        *([0.0] if stop < len(tokens) else []),
    )
    sentence = replace(example.sentence, tokens=cut)
    return replace(example, token=peak - start + bool(start), sentence=sentence, relevance=relevance)


def histogram_html(counts: Sequence[int]) -> Markup:
    """Return a histogram of activations (one token per sentence), of the bins that are not empty; heights are square
    roots of counts."""
    edges = [float("-inf"), *HISTOGRAM_EDGES, float("inf")]
    filled = [index for index, count in enumerate(counts) if count] or [0]
    start, stop = filled[0], filled[-1] + 1
    largest = max(counts) or 1
    bars = [
        (f"{low:g} to {high:g}: {count}", 3.5 * (count / largest) ** 0.5, NEGATIVE if low < 0 else POSITIVE)
        for count, (low, high) in zip(counts[start:stop], pairwise(edges[start : stop + 1]), strict=True)
    ]
    step = max(1, (stop - start) // TICKS)
    shown = [index for index in range(start, stop + 1, step) if isfinite(edges[index])]
    ticks = [(100 * (index - start) / len(bars), edges[index]) for index in shown]
    return render("icebear.actmax/histogram.html", bars=bars, ticks=ticks)
