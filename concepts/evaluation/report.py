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

from icebear.concepts import files
from icebear.concepts.render import page, render
from icebear.errors import InputError
from icebear.extras import need
from icebear.paths import read_text, write_file
from icebear.tables import Tabled

FORMAT = 1

RESAMPLES = 10_000

TEST = (
    f"p (in table.csv): of the paired difference to the best method of the column, by {RESAMPLES:,} random changes of "
    "sign; corrected for the methods of the column (Holm), not for several columns, nor for the best being chosen on "
    "the same samples."
)


@dataclass(frozen=True)
class Cell:
    """A method's number: mean over samples, its standard error, and whether it differs from the best."""

    mean: float
    error: float | None
    """None of a single sample."""
    p: float | None
    """Two-sided, against the best method of the column (`TEST`); None for the best itself."""
    median: float
    lower: float
    """The lower quartile."""
    upper: float

    def said(self, about: str) -> str:
        """As its column wants it (`COLUMNS` of the evaluation): a text that begins with "median" is of medians."""
        best = "" if self.p is not None else " *"
        if about.startswith("median"):
            return f"{self.median:.3f} [{self.lower:.2f}, {self.upper:.2f}]"
        return f"{self.mean:.3f}{'' if self.error is None else f' ± {self.error:.3f}'}{best}"


CURVES = {
    "curve_most": "share removed, most relevant first",
    "curve_least": "share removed, least relevant first",
    "curve_kept": "nodes kept, all others as in the other prompt",
    "curve_left": "nodes left out",
}
"""Of a sample's numbers those that are drawn, and over what."""

Table = dict[str, dict[str, Cell | None]]
"""method -> column -> cell; None where the method cannot run."""


def table(
    samples: Sequence[dict[str, Any]], columns: Mapping[str, str], methods: Sequence[str], seed: int = 0
) -> Table:
    """Of samples that have `methods`: name -> column -> number; a column whose text ends in "lower is better" is so."""
    found: Table = {name: dict.fromkeys(columns) for name in methods}
    able = [name for name in methods if samples and all(name in sample["methods"] for sample in samples)]
    if not able:
        return found
    for column, about in columns.items():
        values = np.array([[sample["methods"][name][column] for sample in samples] for name in able])  # (M, S)
        means = values.mean(1)
        best = int((-means if about.endswith("lower is better") else means).argmax())
        others = [row for row in range(len(able)) if row != best]
        corrected = dict(zip(others, holm(paired_p(values[others] - values[best], seed)), strict=True))
        for row, name in enumerate(able):
            quartiles = np.quantile(values[row], (0.5, 0.25, 0.75)).tolist()
            found[name][column] = Cell(float(means[row]), _error(values[row]), corrected.get(row), *quartiles)
    return found


def _error(values: np.ndarray) -> float | None:
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else None


def paired_p(differences: np.ndarray, seed: int = 0) -> np.ndarray:
    """(M,) of differences (M, S) of S samples: two-sided p that their mean is zero, by random changes of sign.

    What was measured is one of the changes that are counted, so that p is never 0 (Phipson & Smyth 2010).
    """
    signs = np.random.default_rng(seed).choice((-1.0, 1.0), (RESAMPLES, differences.shape[1]))
    sums, measured = np.abs(signs @ differences.T), np.abs(differences.sum(1))
    return (1 + (sums >= measured * (1 - 1e-9)).sum(0)) / (1 + RESAMPLES)


def holm(p: np.ndarray) -> list[float]:
    """Corrected for as many comparisons (Holm 1979): the smallest times n, the next times n - 1, none below its
    predecessor."""
    order = p.argsort()
    corrected = np.empty(len(p))
    corrected[order] = np.maximum.accumulate(np.minimum(1, p[order] * np.arange(len(p), 0, -1)))
    return corrected.tolist()


def rows(found: Table) -> list[dict[str, Any]]:
    """JSON-ready; None where there is no number."""
    return [
        {
            "method": name,
            **{
                f"{column} {part}": None if value is None else getattr(value, part)
                for column, value in cells.items()
                for part in ("mean", "error", "p", "median", "lower", "upper")
            },
        }
        for name, cells in found.items()
    ]


def markdown(found: Table, columns: Mapping[str, str]) -> str:
    head = f"| method | {' | '.join(columns)} |\n|{' --- |' * (len(columns) + 1)}\n"
    return head + "\n".join(f"| {name} | {' | '.join(cells)} |" for name, cells in told(found, columns).items()) + "\n"


def told(found: Table, columns: Mapping[str, str]) -> dict[str, list[str]]:
    """method -> its cells as text."""
    return {
        name: ["—" if (cell := cells[column]) is None else cell.said(about) for column, about in columns.items()]
        for name, cells in found.items()
    }


def write(
    folder: str | Path,
    samples: Sequence[dict[str, Any]],
    columns: Mapping[str, str],
    settings: dict[str, Any],
    unable: Mapping[str, str],
    notes: Sequence[str] = (),
) -> Table:
    """Everything from the samples again. unable: methods that cannot run on the model, and why."""
    place = Path(folder)
    methods = list(settings["methods"])
    found = table(samples, columns, methods)
    said = legend(samples, columns, notes, unable)
    result: dict[str, Any] = {
        "icebear_evaluation": FORMAT,
        "settings": settings,
        "columns": dict(columns),
        "notes": list(notes),
        "unable": dict(unable),
    }
    result["samples"] = list(samples)
    write_file(place / "results.json", json.dumps(result, ensure_ascii=False, allow_nan=False))
    write_file(place / "table.csv", pandas.DataFrame(rows(found)).to_csv(index=False))
    body = markdown(found, columns)
    write_file(place / "table.md", body + "\n" + "\n".join(f"- {line}" for line in said) + "\n")
    figures = draw(place, samples, found, columns, settings.get("shares") or settings.get("sizes", ()))
    write_file(place / "index.html", html(found, columns, settings, said, figures))
    return found


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
        found = json.loads(read_text(Path(folder) / "results.json"))
        if found.get("icebear_evaluation", FORMAT) != FORMAT:  # at first it was not said
            raise ValueError(f"it is not of version {FORMAT}")
        parts = ("settings", "columns", "notes", "unable", "samples")
        return files.decoded({name: found[name] for name in parts}, Results)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InputError(f"{folder} holds no results of icebear evaluate ({error}); check the path.") from None


def draw(
    place: Path, samples: Sequence[dict[str, Any]], found: Table, columns: Mapping[str, str], shares: Sequence[float]
) -> list[Path]:
    """Bars of the first column, and mean curves over shares or sizes, if there are any; each as PNG and SVG."""
    need("evaluate")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    first = next(iter(columns))
    able = {name: cells[first] for name, cells in found.items() if cells[first] is not None}
    figure, axes = pyplot.subplots(figsize=(7, 0.4 * len(able) + 1.2))
    axes.barh(list(able), [c.mean for c in able.values()], xerr=[c.error or 0 for c in able.values()], color="#4c72b0")  # type: ignore[union-attr]
    axes.invert_yaxis()
    axes.set_xlabel(f"{first}: {columns[first]}")
    paths = [_save(figure, place / "bars")]
    kinds = [kind for kind in CURVES if samples and kind in samples[0]["methods"][next(iter(able))]]
    if shares and kinds:
        figure, pair = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
        for axes, kind in zip(pair, kinds, strict=True):
            for name in able:
                curves = np.array([sample["methods"][name][kind] for sample in samples])
                axes.plot(shares, curves.mean(0), label=name)
            axes.set_xlabel(CURVES[kind])
            if max(shares) > 1:
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
    found: Table, columns: Mapping[str, str], settings: dict[str, Any], lines: Sequence[str], figures: Sequence[Path]
) -> Markup:
    """A self-contained page."""
    body = render(
        "icebear.concepts/evaluation.html",
        settings=settings,
        columns=columns,
        cells=told(found, columns),
        lines=lines,
        figures={path.stem: b64encode(path.read_bytes()).decode() for path in figures},
        written=json.dumps(settings, ensure_ascii=False, indent=1),
    )
    return page(f"icebear evaluate {settings['evaluation']}", body)
