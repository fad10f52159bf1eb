"""Evaluations, and claims that are measured again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from icebear.app.cli.tables.grid import grid

if TYPE_CHECKING:
    from icebear.claims.checked import CheckedClaims
    from icebear.claims.checked_monitor import CheckedMonitor


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


def conditions_table(result: CheckedClaims) -> Table:
    """Claims then, now, and under each condition, numbered; what did not pass is red."""
    from icebear.claims.condition_table import cell

    rows: list[tuple[str | Text, ...]] = []
    for *texts, checked in result.lines():
        colors = ("red" if row.failed else "green" if row.measured else "dim" for row in checked)
        rows.append((*texts, *map(Text, map(cell, checked), colors)))
    columns = (">" + heading.replace("=", "= ") for heading in result.headings())
    return grid(">", "claim", *columns, rows=rows, title=result.summary()[0])


def monitor_table(result: CheckedMonitor) -> Table:
    """A monitor under conditions; what does not hold is red."""
    from icebear.claims.checked_monitor import COLUMNS_SHOWN

    failed = {run.condition for run in result.runs if run.failed}
    rows: list[tuple[str | Text, ...]] = [
        (Text(name, "red" if name in failed else ""), *texts) for name, *texts in result.lines()
    ]
    columns = (f">{name}" if name else name for name in COLUMNS_SHOWN)
    return grid(*columns, rows=rows, title=result.summary()[0])


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
