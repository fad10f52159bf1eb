"""An evaluation's folder: results.json, table.csv, table.md, figures and one HTML page that needs nothing else."""

from __future__ import annotations

import io
import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from markupsafe import Markup

from icebear.concepts.render import page, render
from icebear.concepts.statistics import RESAMPLES, Cells, table
from icebear.convert import CONVERTER
from icebear.errors import InputError
from icebear.extras import need
from icebear.paths import read_text, write_file
from icebear.tables import Tabled

FORMAT = 1

TEST = (
    f"p (in table.csv): of the paired difference to the best method of the column, by {RESAMPLES:,} random changes of "
    "sign; corrected for the methods of the column (Holm), not for several columns, nor for the best being chosen on "
    "the same samples."
)


CURVES = {
    "curve_most": "share removed, most relevant first",
    "curve_least": "share removed, least relevant first",
    "curve_kept": "nodes kept, all others as in the other prompt",
    "curve_left": "nodes left out",
}
"""Of a sample's numbers those that are drawn, and over what."""


def rows(cells: Cells) -> list[dict[str, Any]]:
    """JSON-ready; None where there is no number."""
    return [
        {
            "method": name,
            **{
                f"{column} {part}": None if value is None else getattr(value, part)
                for column, value in row.items()
                for part in ("mean", "error", "p", "median", "lower", "upper")
            },
        }
        for name, row in cells.items()
    ]


def markdown(cells: Cells, columns: Mapping[str, str]) -> str:
    head = f"| method | {' | '.join(columns)} |\n|{' --- |' * (len(columns) + 1)}\n"
    return head + "\n".join(f"| {name} | {' | '.join(row)} |" for name, row in texts(cells, columns).items()) + "\n"


def texts(cells: Cells, columns: Mapping[str, str]) -> dict[str, list[str]]:
    """method -> its cells as text."""
    return {
        name: ["—" if (cell := row[column]) is None else cell.text(about) for column, about in columns.items()]
        for name, row in cells.items()
    }


def write(
    folder: str | Path,
    samples: Sequence[dict[str, Any]],
    columns: Mapping[str, str],
    settings: dict[str, Any],
    unable: Mapping[str, str],
    notes: Sequence[str] = (),
) -> Cells:
    """Everything from the samples again. unable: methods that cannot run on the model, and why."""
    place = Path(folder)
    methods = list(settings["methods"])
    cells = table(samples, columns, methods)
    lines = legend(samples, columns, notes, unable)
    result: dict[str, Any] = {
        "icebear_evaluation": FORMAT,
        "settings": settings,
        "columns": dict(columns),
        "notes": list(notes),
        "unable": dict(unable),
    }
    result["samples"] = list(samples)
    write_file(place / "results.json", json.dumps(result, ensure_ascii=False, allow_nan=False))
    write_file(place / "table.csv", pandas.DataFrame(rows(cells)).to_csv(index=False))
    body = markdown(cells, columns)
    write_file(place / "table.md", body + "\n" + "\n".join(f"- {line}" for line in lines) + "\n")
    figures = draw(place, samples, cells, columns, settings.get("steps", ()))
    write_file(place / "index.html", html(cells, columns, settings, lines, figures))
    return cells


def legend(
    samples: Sequence[Any], columns: Mapping[str, str], notes: Sequence[str], unable: Mapping[str, str]
) -> list[str]:
    """What a table is of, what its columns are, and why methods are missing."""
    basis = f"{len(samples)} samples; mean ± standard error; * is the best of its column."
    reasons = [f"{name} cannot run: {why}" for name, why in unable.items()]
    return [basis, TEST, *notes, *(f"{name}: {about}" for name, about in columns.items()), *reasons]


@dataclass(frozen=True)
class Results(Tabled):
    """What `write` wrote, for tables of one's own."""

    settings: dict[str, Any]
    columns: dict[str, str]
    notes: list[str]
    unable: dict[str, str]
    samples: list[dict[str, Any]]

    @property
    def made_with(self) -> dict[str, Any]:  # type: ignore[override]
        return self.settings

    def to_frame(self) -> pandas.DataFrame:
        """The columns' numbers of each sample and method, a row each. `to_arrow` has them as an Arrow table."""
        rows = [
            {"sample": number, "method": name, **{column: numbers[column] for column in self.columns}}
            for number, sample in enumerate(self.samples)
            for name, numbers in sample["methods"].items()
        ]
        return pandas.DataFrame(rows)


def load(folder: str | Path) -> Results:
    """What `write` wrote. Raises `InputError` where there is none."""
    try:
        results = json.loads(read_text(Path(folder) / "results.json"))
        if results["icebear_evaluation"] != FORMAT:
            raise ValueError(f"it is not of version {FORMAT}")
        parts = ("settings", "columns", "notes", "unable", "samples")
        return CONVERTER.structure({name: results[name] for name in parts}, Results)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InputError(f"{folder} holds no results of icebear evaluate ({error}); check the path.") from None


def draw(
    place: Path, samples: Sequence[dict[str, Any]], cells: Cells, columns: Mapping[str, str], steps: Sequence[float]
) -> list[Path]:
    """Bars of the first column, and mean curves over `Evaluation.steps`, if there are any; each as PNG and SVG."""
    need("evaluate")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    first = next(iter(columns))
    able = {name: row[first] for name, row in cells.items() if row[first] is not None}
    figure, axes = pyplot.subplots(figsize=(7, 0.4 * len(able) + 1.2))
    axes.barh(list(able), [c.mean for c in able.values()], xerr=[c.error or 0 for c in able.values()], color="#4c72b0")  # type: ignore[union-attr]
    axes.invert_yaxis()
    axes.set_xlabel(f"{first}: {columns[first]}")
    paths = [_save(figure, place / "bars")]
    kinds = [kind for kind in CURVES if samples and kind in samples[0]["methods"][next(iter(able))]]
    if steps and kinds:
        figure, pair = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
        for axes, kind in zip(pair, kinds, strict=True):
            for name in able:
                curves = np.array([sample["methods"][name][kind] for sample in samples])
                axes.plot(steps, curves.mean(0), label=name)
            axes.set_xlabel(CURVES[kind])
            if max(steps) > 1:
                axes.set_xscale("log")
        pair[0].legend(fontsize=7)
        paths.append(_save(figure, place / "curves"))
    return paths


def _save(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    for suffix in (".svg", ".png"):
        picture = io.BytesIO()
        figure.savefig(picture, format=suffix[1:], dpi=150)
        write_file(path.with_suffix(suffix), picture.getvalue())
    from matplotlib import pyplot

    pyplot.close(figure)
    return path.with_suffix(".png")


def html(
    cells: Cells, columns: Mapping[str, str], settings: dict[str, Any], lines: Sequence[str], figures: Sequence[Path]
) -> Markup:
    """A self-contained page."""
    body = render(
        "icebear.concepts/evaluation.html",
        settings=settings,
        columns=columns,
        cells=texts(cells, columns),
        lines=lines,
        figures={path.stem: b64encode(path.read_bytes()).decode() for path in figures},
        written=json.dumps(settings, ensure_ascii=False, indent=1),
    )
    return page(f"icebear evaluate {settings['evaluation']}", body)
