"""Runs the notebooks of docs/notebooks/ and writes each as a page of the site, beside it.

python docs/notebooks.py [NAME ...]

The notebooks are kept without outputs. A page that is newer than its notebook is left as it is, unless it is named.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent / "notebooks"


def executed(path: Path) -> Any:
    """The notebook with its outputs. Raises `CellExecutionError` where a cell fails."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
    return notebook


def page(notebook: Any) -> str:
    """As Markdown: texts as they are, code in fences, outputs below it; HTML stays HTML."""
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source.replace(".ipynb)", ".md)"))
        else:
            parts.append(f"```python\n{cell.source}\n```")
            parts += map(_shown, cell.outputs)
    return "\n\n".join(part for part in parts if part) + "\n"


def _shown(output: Any) -> str:
    """One output."""
    if output.output_type == "stream":
        return f"```text\n{output.text.rstrip()}\n```" if output.name == "stdout" else ""
    data = output.get("data", {})
    if "text/html" in data:
        html = data["text/html"].replace(' border="1" class="dataframe"', "")  # pandas', which the site's look excepts
        # A blank line would end the block of HTML for Markdown.
        return "<div>" + "\n".join(line for line in html.splitlines() if line.strip()) + "</div>"
    return f"```text\n{data['text/plain']}\n```" if "text/plain" in data else ""


def write(path: Path) -> Path:
    """Run a notebook and write its page; where that is."""
    place = path.with_suffix(".md")
    place.write_text(page(executed(path)), encoding="utf-8")
    return place


def main() -> None:
    for path in sorted(FOLDER.glob("*.ipynb")):
        place = path.with_suffix(".md")
        if sys.argv[1:] and path.stem not in sys.argv[1:]:
            continue
        if place.exists() and place.stat().st_mtime > path.stat().st_mtime and not sys.argv[1:]:
            continue
        print(f"Wrote {write(path)}")


if __name__ == "__main__":
    main()
