"""Stages as a picture: the causal trace, heads as arrows from the token that they read, and the written words."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from icebear.concepts.stages import stage_sentences
from icebear.concepts.stages.stage_records import StageRecord
from icebear.concepts.stages.stage_sentences import percent, summary, swap_text
from icebear.render import NEGATIVE, POSITIVE, hexadecimal, render

COLUMN_WIDTH = 68
"""The width of a token's column, in pixels."""
ROW_HEIGHT = 30
"""The height of a layer's row, in pixels."""
APART = 7
"""Pixels between two arrows at least."""
LINE_HEIGHT = 13
"""Pixels between the names of two heads."""
SHOWN_SHARE = 0.05
"""Smaller shares have no number."""
SHOWN_HEADS = 12
"""The largest number of heads with an arrow, those that were found first."""


@dataclass(frozen=True)
class Arrow:
    """A head: from the token that it fetches most from to the last one, at its layer."""

    name: str
    title: str
    source: float
    """The column of the token, and of the last token; columns count from 0."""
    target: float
    y: float
    """Pixels from the last layer's row down, lower where arrows of higher layers are."""
    name_y: float


def arrows(stages: StageRecord) -> list[Arrow]:
    """Return the heads, the last layer first; without sources they come from the first token that differs."""
    columns = {position: column for column, position in enumerate(stages.trace.positions)}
    last, top = len(columns) - 1, max(stages.trace.layers, default=0) or 1
    strongest = max(stages.sources, key=lambda source: source.share, default=None)
    source = columns.get(strongest.position, 0) if strongest else 0
    titles = {swap.neuron: swap_text(stages, swap) for swap in stages.swaps}
    heads = sorted((head.neuron for head in stages.heads[:SHOWN_HEADS]), key=lambda head: -head.layer)
    high = ROW_HEIGHT * (len(stages.trace.layers) - 1)
    result: list[Arrow] = []
    for head in heads:
        y = name_y = high * (1 - head.layer / top)
        if result:
            y, name_y = max(y, result[-1].y + APART), max(y, result[-1].name_y + LINE_HEIGHT)
        result.append(Arrow(str(head), titles.get(head, ""), source, last, y, name_y))
    return result


def stage_picture(stages: StageRecord) -> Markup:
    """Return the picture, in the colors of its page."""
    trace = stages.trace
    rows = list(zip(trace.layers, zip(*trace.shares, strict=True), strict=True))
    words = sorted(stages.words, key=lambda word: -word.effect)
    return render(
        "icebear.concepts/stages.svg",
        stages=stages,
        rows=rows[::-1],
        tokens=[stages.prompt.tokens[position] for position in trace.positions],
        arrows=arrows(stages),
        words=words,
        summary=summary(stages),
        percent=percent,
        least=SHOWN_SHARE,
        column=COLUMN_WIDTH,
        row=ROW_HEIGHT,
        positive=hexadecimal(POSITIVE),
        negative=hexadecimal(NEGATIVE),
    )


def on_paper(stages: StageRecord) -> str:
    """Return the picture on a white background, for a file."""
    start, end, rest = stage_picture(stages).replace("currentColor", "#111111").partition("<defs>")
    return f'{start}<rect width="100%" height="100%" fill="#ffffff"/>{end}{rest}'


def stage_fragment(stages: StageRecord, notes: Sequence[str] = ()) -> Markup:
    """Return what stages say, with the picture, as HTML. notes: see `stage_lines`."""
    picture = stage_picture(stages)
    return render("icebear.concepts/stages.html", stages=stages, text=stage_sentences, picture=picture, notes=notes)
