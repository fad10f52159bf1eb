"""Bars with names and numbers: red for positive values, blue for negative ones, thin and gray for controls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from markupsafe import Markup

from icebear.render import as_word
from icebear.steering.provenance import number_text

BARS = Markup("""<style>
.bars{{display:grid;grid-template-columns:fit-content(55%) 1fr max-content;gap:.3rem .8rem;align-items:center;
  font-size:.9rem;line-height:1.3}}
.bars div{{position:relative;height:.8rem;background:color-mix(in srgb,currentColor 6%,transparent)}}
.bars i{{position:absolute;top:0;bottom:0;min-width:2px;border-radius:.15rem;background:#c0392f}}
.bars i.negative{{background:#3b7bbf}}.bars i.control{{top:.2rem;bottom:.2rem;background:#999}}
.bars .control{{opacity:.75}}.bars span:nth-child(3n){{text-align:right;font-variant-numeric:tabular-nums}}
</style><div class="bars">{}</div>""")
BAR = Markup(
    '<span class="{kind}">{name}</span><div><i class="{kind}" style="left:{left:.1f}%;width:{width:.1f}%"></i></div>'
    '<span class="{kind}">{number}</span>'
)


class Bar(NamedTuple):
    name: str
    value: float
    number: str
    is_control: bool = False


def bars(rows: Sequence[Bar], high: float = 0.0) -> Markup:
    """Return bars on one scale, from the smallest value or 0 to the largest value, or `high` if it is larger."""
    low = min(0.0, *(row.value for row in rows))
    scale = 100 / (max(high, *(row.value for row in rows)) - low or 1.0)
    drawn = (
        BAR.format(
            kind="control" if row.is_control else "negative" if row.value < 0 else "positive",
            name=row.name,
            left=scale * (min(row.value, 0.0) - low),
            width=scale * abs(row.value),
            number=row.number,
        )
        for row in rows
    )
    return BARS.format(Markup("").join(drawn))


def word_bars(columns: Mapping[str, Mapping[str, float]]) -> Markup:
    """Return numbers of words as bars; all but those with edits are controls. columns: its name -> word -> number."""
    words = dict.fromkeys(word for numbers in columns.values() for word in numbers)
    rows = [
        Bar(f"{as_word(word)} {name}", numbers[word], number_text(numbers[word]), name != "with edits")
        for word in words
        for name, numbers in columns.items()
    ]
    return bars(rows)
