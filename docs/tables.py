"""Writes docs/tables.md, every table behind docs/results.md, from the data files in docs/results/.

python docs/tables.py
"""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).resolve().parent
DATA = DOCS / "results"
HEAD = """# All tables

The numbers behind [Results](results.md): SmolLM2-135M-Instruct (4-bit weights, dequantized to float32) unless a table
names another model. `±` is the standard error over the samples. Each table is also a CSV file in `docs/results/`.
"""


def page() -> str:
    sections = tomllib.loads((DATA / "tables.toml").read_text(encoding="utf-8"))["section"]
    parts = [HEAD]
    for section in sections:
        parts += [f"## {section['title']}", section.get("text", "")]
        for table in section["table"]:
            parts += [f"### {Path(table['file']).stem}", table.get("text", "")]
            parts += [f"`{table['command']}`"] if "command" in table else []
            parts += ["\n".join(markdown(DATA / table["file"]))]
    return "\n\n".join(part for part in parts if part) + "\n"


def markdown(path: Path) -> Iterator[str]:
    """The lines of a table; a column `x ±` is joined with its column `x`."""
    with path.open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    errors = {at for at, name in enumerate(head) if name.endswith(" ±")}
    shown = [at for at in range(len(head)) if at not in errors]
    yield line(head[at] for at in shown)
    yield "| --- " * len(shown) + "|"
    for row in rows:
        yield line(f"{row[at]} ± {row[at + 1]}" if at + 1 in errors and row[at] else row[at] for at in shown)


def line(cells: Iterator[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    (DOCS / "tables.md").write_text(page(), encoding="utf-8")
