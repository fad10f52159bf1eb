"""An evaluation's folder: results.json, table.csv, figures, and one HTML page that needs no other file."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path

import pandas

from icebear.convert import from_json, to_json
from icebear.evaluation import figures
from icebear.evaluation.results import Results
from icebear.paths import read_text, write_file
from icebear.render import page, render


def write(folder: str | Path, results: Results) -> None:
    """Write all files of a table."""
    path = Path(folder)
    write_file(path / "results.json", to_json(results, indent=None))
    write_file(path / "table.csv", pandas.DataFrame(results.rows()).to_csv(index=False))
    drawn = {name: b64encode(svg.encode()).decode() for name, svg in figures.write(path, results).items()}
    body = render(
        "icebear.evaluation/evaluation.html",
        settings=results.settings,
        columns=results.columns,
        cells=results.texts(),
        lines=results.legend(),
        figures=drawn,
        written=json.dumps(results.settings, ensure_ascii=False, indent=1),
    )
    write_file(path / "index.html", page(f"icebear evaluate {results.settings['evaluation']}", body))


def load(folder: str | Path) -> Results:
    """Read a folder that `write` wrote. Raises `InputError` for any other folder."""
    path = Path(folder) / "results.json"
    return from_json(read_text(path), Results, source=str(path))
