"""An evaluation's folder: results.json, table.csv, table.md, figures and one HTML page that needs no other file."""

from __future__ import annotations

import io
import json
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from icebear.concepts.statistics import RESAMPLES, Cell, Cells, table
from icebear.convert import Tabled, from_json, to_json
from icebear.errors import need
from icebear.paths import read_text, write_file
from icebear.render import page, render

TEST = (
    f"p (in table.csv): of the paired difference to the best method of the column, by {RESAMPLES:,} random changes of "
    "sign; corrected for the methods of the column (Holm), not for several columns, nor for the best being chosen on "
    "the same samples."
)
CURVES = {
    "curve_most": "share removed, most relevant first",
    "curve_least": "share removed, least relevant first",
    "curve_sufficiency": "number of nodes, all others at their counterfactual values",
    "curve_remaining": "number of nodes at their counterfactual values",
}
"""The curves of a sample, and the labels of their x axes."""


@dataclass(frozen=True)
class Results(Tabled):
    """A table of an evaluation with its samples, as results.json keeps it."""

    settings: dict[str, Any]
    """With the name of the evaluation, the model, and ``methods``, the rows of the table."""
    columns: dict[str, str]
    notes: list[str]
    unable: dict[str, str]
    """Methods that cannot run on the model, and why."""
    samples: list[dict[str, Any]]

    @property
    def made_with(self) -> dict[str, Any]:  # type: ignore[override]
        return self.settings

    @cached_property
    def cells(self) -> Cells:
        return table(self.samples, self.columns, list(self.settings["methods"]))

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each method; JSON-ready, None where there is no number."""
        names, rows = [part.name for part in fields(Cell)], []
        for method, row in self.cells.items():
            numbers = {f"{column} {name}": getattr(x, name, None) for column, x in row.items() for name in names}
            rows.append({"method": method, **numbers})
        return rows

    def texts(self) -> dict[str, list[str]]:
        """Return the cells of each method as text."""
        return {
            name: ["—" if (cell := row[column]) is None else cell.text(about) for column, about in self.columns.items()]
            for name, row in self.cells.items()
        }

    def markdown(self) -> str:
        head = f"| method | {' | '.join(self.columns)} |\n|{' --- |' * (len(self.columns) + 1)}\n"
        return head + "".join(f"| {name} | {' | '.join(row)} |\n" for name, row in self.texts().items())

    def legend(self) -> list[str]:
        """Return what the numbers and columns are, and why methods are missing."""
        basis = f"{len(self.samples)} samples; mean ± standard error; * is the best of its column."
        columns = [f"{name}: {about}" for name, about in self.columns.items()]
        return [basis, TEST, *self.notes, *columns, *(f"{name} cannot run: {why}" for name, why in self.unable.items())]

    def to_frame(self) -> pandas.DataFrame:
        """Return the columns' numbers as a row for each sample and method. `to_arrow` gives them as an Arrow table."""
        rows = [
            {"sample": number, "method": name, **{column: numbers[column] for column in self.columns}}
            for number, sample in enumerate(self.samples)
            for name, numbers in sample["methods"].items()
        ]
        return pandas.DataFrame(rows)


def write(folder: str | Path, results: Results) -> None:
    """Write all files of a table."""
    path, lines = Path(folder), results.legend()
    write_file(path / "results.json", to_json(results, indent=None))
    write_file(path / "table.csv", pandas.DataFrame(results.rows()).to_csv(index=False))
    write_file(path / "table.md", results.markdown() + "\n" + "".join(f"- {line}\n" for line in lines))
    body = render(
        "icebear.evaluation/evaluation.html",
        settings=results.settings,
        columns=results.columns,
        cells=results.texts(),
        lines=lines,
        figures={path.stem: b64encode(path.read_bytes()).decode() for path in draw(path, results)},
        written=json.dumps(results.settings, ensure_ascii=False, indent=1),
    )
    write_file(path / "index.html", page(f"icebear evaluate {results.settings['evaluation']}", body))


def load(folder: str | Path) -> Results:
    """Read a folder that `write` wrote. Raises `InputError` for any other folder."""
    path = Path(folder) / "results.json"
    return from_json(read_text(path), Results, source=str(path))


def draw(folder: Path, results: Results) -> list[Path]:
    """Draw bars of the first column, and mean curves over the settings' `steps`, if there are any."""
    need("evaluate")
    from matplotlib.figure import Figure

    metric, about = next(iter(results.columns.items()))
    cells = {name: cell for name, row in results.cells.items() if (cell := row[metric])}
    figure = Figure(figsize=(7, 0.4 * len(cells) + 1.2))
    axes = figure.subplots()
    means, errors = [cell.mean for cell in cells.values()], [cell.error or 0 for cell in cells.values()]
    axes.barh(list(cells), means, xerr=errors, color="#4c72b0")
    axes.invert_yaxis()
    axes.set_xlabel(f"{metric}: {about}")
    paths = [save(figure, folder / "bars")]
    steps: Sequence[float] = results.settings.get("steps", ())
    kinds = [kind for kind in CURVES if results.samples and kind in results.samples[0]["methods"][next(iter(cells))]]
    if steps and kinds:
        figure = Figure(figsize=(10, 4))
        pair = figure.subplots(1, 2, sharey=True)
        for axes, kind in zip(pair, kinds, strict=True):
            for name in cells:
                curves = np.array([sample["methods"][name][kind] for sample in results.samples])
                axes.plot(steps, curves.mean(0), label=name)
            axes.set_xlabel(CURVES[kind])
            if max(steps) > 1:
                axes.set_xscale("log")
        pair[0].legend(fontsize=7)
        paths.append(save(figure, folder / "curves"))
    return paths


def save(figure: Any, path: Path) -> Path:
    """Save a figure as SVG and PNG, the same bytes each time. Returns the PNG's path."""
    from matplotlib import rc_context

    figure.tight_layout()
    for suffix, metadata in ((".svg", {"Date": None}), (".png", {})):
        picture = io.BytesIO()
        with rc_context({"svg.hashsalt": path.name}):  # without it, ids are random
            figure.savefig(picture, format=suffix[1:], dpi=150, metadata=metadata)
        write_file(path.with_suffix(suffix), picture.getvalue())
    return path.with_suffix(".png")
