"""The parts of a card as HTML, also for other pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from itertools import pairwise, zip_longest
from math import isfinite

from markupsafe import Markup

from icebear.actmax.head_attention import attended_text, attended_token
from icebear.concepts.results.effect_words import BY_LENS, effect_text
from icebear.records import (
    HISTOGRAM_EDGES,
    Example,
    Projection,
    Promotion,
    SentenceEffects,
    Writes,
)
from icebear.render import NEGATIVE, POSITIVE, render, visible

STYLE = files("icebear.actmax").joinpath("templates", "card.css").read_text(encoding="utf-8")
TICKS = 6
"""About as many numbers are on the axis of a histogram."""
BEFORE = 24
"""Tokens of an excerpt before the strongest one."""
AFTER = 10
ALIKE = 0.5
"""Effects of a smaller mean correlation change from sentence to sentence."""
NO_CROP = "The crop needs the model."


@dataclass(frozen=True)
class Crop:
    """A crop of an image (`icebear.actmax.crops`)."""

    png: str
    """A PNG file in base64; empty if there is none."""
    about: str
    """What share of the relevance it shows, or why there is no crop."""


def head_tokens(example: Example) -> str:
    """Say where a head writes, and which token it attends to most, if that is measured."""
    attended = attended_text(example)
    return f"writes at {example.token_text!r}" + (f", attends to {attended}" if attended else "")


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
