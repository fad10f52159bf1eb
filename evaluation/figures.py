"""Figures of an evaluation: its first column by method, and mean curves, both with standard errors."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas

from icebear.errors import need
from icebear.evaluation.results import Results
from icebear.paths import write_file

if TYPE_CHECKING:
    import altair as alt

CURVES = {
    "curve_most": "most relevant first",
    "curve_least": "least relevant first",
    "curve_sufficiency": "all other nodes at their counterfactual values",
    "curve_remaining": "the nodes at their counterfactual values",
}
"""The curves of a sample, and the titles of their panels."""
BETWEEN = "between them (a large area is good)"
"""The panel of the difference of the first two curves."""
PANEL = {"width": 240, "height": 220}
"""In pixels."""
PALETTES = {10: "tableau10", 20: "tableau20"}
"""The most methods, and the palette for them; with more methods its colors repeat."""


def write(folder: Path, results: Results) -> dict[str, str]:
    """Draw `charts` as SVG and PNG into a folder, and return each SVG by name."""
    drawn = charts(results)
    import vl_convert

    pictures = {name: vl_convert.vegalite_to_svg(chart.to_json()) for name, chart in drawn.items()}
    for name, svg in pictures.items():
        write_file(folder / f"{name}.svg", svg)
        write_file(folder / f"{name}.png", vl_convert.svg_to_png(svg, scale=2))
    return pictures


def charts(results: Results) -> dict[str, alt.Chart | alt.LayerChart | alt.FacetChart]:
    """Return the figures by name: ``methods``, and ``curves`` where the samples have some. Raises `InputError` if a
    package is missing."""
    need("figures")
    named = {"methods": methods(results)} if any(any(row.values()) for row in results.cells.values()) else {}
    return {**named, "curves": curves(results)} if curve_frame(results).size else named


def method_frame(results: Results) -> pandas.DataFrame:
    """Return a row for each method that ran: its ``value`` in the first column, and its range from ``low`` to ``high``.

    The range is a standard error on each side, or the quartiles where the column shows medians.
    """
    column, about = next(iter(results.columns.items()))
    rows = []
    for name, row in results.cells.items():
        if (cell := row[column]) is None:
            continue
        error = cell.error or 0
        value = (cell.mean, cell.mean - error, cell.mean + error)
        if about.startswith("median"):
            value = (cell.median, cell.lower, cell.upper)
        rows.append((name, *value))
    return pandas.DataFrame(rows, columns=["method", "value", "low", "high"])


def methods(results: Results) -> alt.LayerChart:
    """Draw `method_frame` as bars with error bars."""
    import altair as alt

    column, about = next(iter(results.columns.items()))
    base = alt.Chart(method_frame(results), title=f"{column}: {about}").encode(y=alt.Y("method", sort=None, title=None))
    bars = base.mark_bar().encode(x=alt.X("value", title=column), color=_color(results, legend=False))
    errors = base.mark_rule(strokeWidth=1.5).encode(x="low", x2="high")
    return (bars + errors).properties(width=2 * PANEL["width"])


def curve_frame(results: Results) -> pandas.DataFrame:
    """Return a row for each method, panel and step: the samples' ``mean``, and it less and more a standard error."""
    steps, rows = results.settings.get("steps", ()), []
    able = [name for name, row in results.cells.items() if any(row.values())]
    kinds = [kind for kind in CURVES if able and kind in results.samples[0]["methods"][able[0]]]
    for kind, name in product(kinds, able):
        values = np.array([sample["methods"][name][kind] for sample in results.samples])  # (S, steps)
        rows += _rows(name, CURVES[kind], steps, values)
    if {"curve_most", "curve_least"} <= set(kinds):
        for name in able:
            pairs = [sample["methods"][name] for sample in results.samples]
            values = np.array([np.subtract(pair["curve_least"], pair["curve_most"]) for pair in pairs])
            rows += _rows(name, BETWEEN, steps, values)
    return pandas.DataFrame(rows, columns=["method", "panel", "step", "mean", "low", "high"])


def _rows(method: str, panel: str, steps: Any, values: np.ndarray) -> list[tuple[Any, ...]]:
    mean = values.mean(0)
    error = values.std(0, ddof=1) / len(values) ** 0.5 if len(values) > 1 else np.zeros_like(mean)
    return [(method, panel, *row) for row in zip(steps, mean, mean - error, mean + error, strict=True)]


def curves(results: Results) -> alt.FacetChart:
    """Draw `curve_frame`: a panel for each kind of curve, with a line and a band of standard errors for each method."""
    import altair as alt

    frame, (x, y) = curve_frame(results), results.settings["axes"]
    scale = alt.Scale(type="log" if frame["step"].max() > 1 else "linear")
    base = alt.Chart(frame).encode(x=alt.X("step", title=x, scale=scale), color=_color(results))
    band = base.mark_area(opacity=0.15).encode(y=alt.Y("low", title=y), y2="high")
    lines = (band + base.mark_line().encode(y="mean")).properties(**PANEL)
    panels = alt.Column("panel", sort=list(frame["panel"].unique()), title=None)
    return lines.facet(panels, title=f"Means and standard errors of {len(results.samples)} samples")


def _color(results: Results, legend: bool = True) -> alt.Color:
    import altair as alt

    methods = list(results.cells)
    palette = next((name for most, name in PALETTES.items() if len(methods) <= most), PALETTES[20])
    scale = alt.Scale(domain=methods, scheme=palette)
    return alt.Color("method", scale=scale, legend=alt.Legend(title=None, symbolOpacity=1) if legend else None)
