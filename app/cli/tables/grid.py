"""Tables of literal texts, and tokens in colors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.style import Style
from rich.table import Table
from rich.text import Text

from icebear.records import TokenScore
from icebear.render import color, hexadecimal, ink, normalized, visible


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
    return Text.assemble(
        *((token and visible(token), "dim" if at in gray else shade(share)) for at, (token, share) in parts)
    )


def listed(tokens: Sequence[TokenScore]) -> str:
    return ", ".join(f"{token.text!r} {token.number}" for token in tokens)
