"""Stages as a picture: tokens with their causal trace, heads as arrows from the token that they read, the words that
neurons write, and the answers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from unicodedata import bidirectional

from markupsafe import Markup

from icebear.concepts.stages import stage_sentences
from icebear.concepts.stages.stage_records import StageRecord, Swap
from icebear.concepts.stages.stage_sentences import percent, probability_text, random_swaps_texts, summary, swap_text
from icebear.records import Neuron
from icebear.render import NEGATIVE, POSITIVE, as_word, hexadecimal, render

WIDTH = 900
"""The width of the picture, in pixels; a page scales it to its column."""
GRID = 446
"""The width of all tokens."""
ROW_HEIGHT = 30
"""The height of a layer's row."""
APART = 7
"""Pixels between two arrows at least."""
LINE_HEIGHT = 14
"""Pixels between the names of two heads."""
LETTER = 7.2
"""The width of a letter."""
NARROWEST = 16
"""The width of a token at least."""
TRACED = 46
"""The width of a token with a causal trace at least."""
LONGEST = 14
"""The letters of a token that are shown."""
SHOWN_SHARE = 0.05
"""Smaller shares have no number."""
SHOWN_HEADS = 12
"""The largest number of heads with an arrow, those that were found first."""
Probabilities = tuple[float | None, float | None]
"""Of the target and of the contrast."""


@dataclass(frozen=True)
class Column:
    """A token, or several that are left out, from the left."""

    positions: tuple[int, ...]
    text: str
    title: str
    other: str
    """The token there in the counterfactual prompt, where it differs."""
    x: float
    width: float
    shares: tuple[float, ...]
    """The causal trace by layer; empty without one."""

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


@dataclass(frozen=True)
class Arrow:
    """A head: from the token that it fetches most from to the last one, at its layer."""

    name: str
    title: str
    swapped: str
    """The probability of the target in the prompt, and when only this head is swapped."""
    source: float
    target: float
    y: float
    """Pixels from the last layer's row down, lower where arrows of higher layers are."""
    name_y: float


def columns(stages: StageRecord) -> list[Column]:
    """Return the tokens of the prompt; of a long one the first, those with a trace, and as many of the last as fit."""
    tokens, trace = stages.prompt.tokens, dict(zip(stages.trace.positions, stages.trace.shares, strict=True))
    shown = [_short(token) for token in tokens]
    others = _others(stages)
    least = [
        max(LETTER * max(len(text), len(others.get(position, ""))) + 8, TRACED if position in trace else NARROWEST)
        for position, text in enumerate(shown)
    ]
    runs = _runs(_fitting(stages, least), len(tokens))
    widths = [least[run[0]] if len(run) == 1 else TRACED for run in runs]
    stretch = GRID / sum(widths)
    drawn, x = [], 0.0
    for run, width in zip(runs, widths, strict=True):
        is_alone = len(run) == 1
        text = shown[run[0]] if is_alone else "…"
        other, shares = (others.get(run[0], ""), trace.get(run[0], ())) if is_alone else ("", ())
        title = "".join(tokens[run[0] : run[-1] + 1])
        drawn.append(Column(tuple(run), text, title, other, x, width * stretch, shares))
        x += width * stretch
    return drawn


def _short(token: str) -> str:
    text = as_word(token)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _others(stages: StageRecord) -> dict[int, str]:
    """Return the tokens of the counterfactual prompt that differ, where both prompts have equally many."""
    tokens = stages.counterfactual.tokens
    if len(tokens) != len(stages.prompt.tokens):
        return {}
    return {position: _short(tokens[position]) for position in stages.differing}


def _fitting(stages: StageRecord, least: Sequence[float]) -> set[int]:
    """Return the tokens that are shown. least: their widths."""
    must = (stages.position, *stages.differing, *reversed(stages.trace.positions), 0)
    others = reversed(range(len(least)))
    shown, width = set[int](), 2.0 * TRACED  # of what is left out
    for position in dict.fromkeys((*must, *others)):
        if position < len(least) and width + least[position] <= GRID:
            shown.add(position)
            width += least[position]
    return shown | {stages.position}


def _runs(shown: Collection[int], count: int) -> list[list[int]]:
    """Return each token that is shown alone, and those between them together."""
    runs: list[list[int]] = []
    for position in range(count):
        if position in shown or not runs or runs[-1][-1] in shown:
            runs.append([position])
        else:
            runs[-1].append(position)
    return runs


def arrows(stages: StageRecord) -> list[Arrow]:
    """Return the heads, the last layer first; without sources they come from the first token that differs."""
    drawn = columns(stages)
    strongest = max(stages.sources, key=lambda source: source.share, default=None)
    source = strongest.position if strongest else min(stages.differing, default=0)
    begin, last = (next(c for c in drawn if position in c.positions) for position in (source, stages.position))
    swaps = {swap.neuron: swap for swap in stages.swaps}
    heads = sorted((head.neuron for head in stages.heads[:SHOWN_HEADS]), key=lambda head: -head.layer)
    top, high = max(stages.trace.layers, default=0) or 1, ROW_HEIGHT * (len(stages.trace.layers) - 1)
    control = " ".join(random_swaps_texts(stages))
    result: list[Arrow] = []
    for head in heads:
        y = name_y = high * (1 - head.layer / top)
        if result:
            y, name_y = max(y, result[-1].y + APART), max(y, result[-1].name_y + LINE_HEIGHT)
        swap = swaps.get(head)
        title = f"{swap_text(stages, swap)} {control} Alone with the neurons: {percent(swap.alone)}" if swap else ""
        result.append(Arrow(str(head), title, _swapped(swap), begin.middle, last.x, y, name_y))
    return result


def _swapped(swap: Swap | None) -> str:
    known = [swap.before[0], swap.after[0]] if swap and swap.before else []
    return "→".join(probability_text(value) for value in known if value is not None)


def answers(stages: StageRecord, now: Probabilities | None = None) -> list[tuple[str, float, float, float | None]]:
    """Return target and contrast with their probabilities in the prompt, with parts switched off, and in the
    counterfactual prompt."""
    rows = []
    for number, token in enumerate((stages.target, stages.contrast)):
        before, other = ((each.target, each.contrast)[number] for each in (stages.prompt, stages.counterfactual))
        after = now[number] if now else before
        if token is not None and before is not None and after is not None:
            rows.append((_short(token.text), before, after, other))
    return rows


def stage_picture(
    stages: StageRecord,
    cards: Collection[str] | None = (),
    off: Collection[Neuron] = (),
    now: Probabilities | None = None,
) -> Markup:
    """Return the picture, in the colors of its page.

    cards: see `icebear.render.linked`. off: heads and neurons that are switched off. now: the probabilities of target
    and contrast then."""
    trace = stages.trace
    return render(
        "icebear.concepts/stages.svg",
        stages=stages,
        text=stage_sentences,
        layers=list(reversed(trace.layers)),
        columns=columns(stages),
        arrows=arrows(stages),
        words=sorted(stages.words, key=lambda word: -word.effect),
        answers=answers(stages, now),
        is_switched=now is not None,
        off={str(node) for node in off},
        cards=cards,
        summary=" ".join(summary(stages)),
        percent=percent,
        probability=probability_text,
        is_mirrored=_is_from_right(stages.prompt.tokens),
        least=SHOWN_SHARE,
        wide=WIDTH,
        grid=GRID,
        row=ROW_HEIGHT,
        positive=hexadecimal(POSITIVE),
        negative=hexadecimal(NEGATIVE),
    )


def _is_from_right(tokens: Sequence[str]) -> bool:
    """Return whether the first letter is of a script that is written from right to left."""
    strong = (bidirectional(letter) for letter in "".join(tokens))
    return next((kind for kind in strong if kind in ("L", "R", "AL")), "L") != "L"


def on_paper(stages: StageRecord) -> str:
    """Return the picture on a white background, for a file."""
    start, end, rest = stage_picture(stages).replace("currentColor", "#111111").partition("<defs>")
    return f'{start}<rect width="100%" height="100%" fill="#ffffff"/>{end}{rest}'


def stage_part(name: str, stages: StageRecord, cards: Collection[str] | None) -> Markup:
    """Return a part of what stages say as HTML. name: of its template; cards: see `linked`."""
    return render(f"icebear.concepts/{name}.html", stages=stages, text=stage_sentences, cards=cards)


def stage_fragment(stages: StageRecord, notes: Sequence[str] = (), cards: Collection[str] | None = ()) -> Markup:
    """Return what stages say, with the picture, as HTML. notes: see `stage_lines`; cards: see `linked`."""
    picture = stage_picture(stages, cards)
    return render(
        "icebear.concepts/stages.html", stages=stages, text=stage_sentences, picture=picture, notes=notes, cards=cards
    )
