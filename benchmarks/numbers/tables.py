"""Writes docs/results/numbers-*.csv from the folders of the scripts of this folder.

python -m benchmarks.numbers.tables FOLDER    # has dpa, knowledge-neurons, sva, ravel, function-vectors, bipia, sources
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas

from icebear.evaluation import report

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
TABLES: dict[str, dict[str, str]] = {
    "dpa": {
        "tokens, known_1000": "dpa/tokens",
        "parts, known_1000": "dpa/parts",
        "parts, indirect objects": "dpa/parts-indirect-objects",
    },
    "knowledge": {"facts": "knowledge-neurons"},
    "agreement": {name: f"sva/{name}" for name in ("simple", "nounpp", "within_rc")},
    "ravel": {"cities": "ravel"},
    "function-vectors": {"ten tasks": "function-vectors"},
    "bipia": {"e-mails": "bipia"},
    "sources": {"answers": "sources/answers/all", "40 sources or more": "sources/answers/large"},
    "sources-bipia": {"e-mails": "sources/bipia"},
}
"""Table -> the name of each set of prompts and its folder."""


def rows(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each method: means with their standard errors over the samples."""
    results = report.load(folder)
    for method, cells in results.cells.items():
        row: dict[str, Any] = {"prompts (n)": f"{name} ({len(results.samples)})", "method": method}
        for column, cell in cells.items():
            digits = 1 if max(abs(x.mean) for x in (other[column] for other in results.cells.values()) if x) > 5 else 3
            row |= {column: f"{cell.mean:z.{digits}f}", f"{column} ±": f"{cell.error or 0:.{digits}f}"} if cell else {}
        yield row


def main(out: Path) -> None:
    for table, parts in TABLES.items():
        folders = {name: out / folder for name, folder in parts.items() if (out / folder / "results.json").exists()}
        written = [row for name, folder in folders.items() for row in rows(folder, name)]
        if written:
            path = RESULTS / f"numbers-{table}.csv"
            path.write_text(pandas.DataFrame(written).to_csv(index=False), encoding="utf-8")
        for name, folder in folders.items():
            print(f"{table}, {name}:", *report.load(folder).notes)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
