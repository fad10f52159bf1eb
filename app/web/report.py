"""The folder of an evaluation: its table, figures and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import streamlit as st

from icebear.app.web.state import plain, typed
from icebear.concepts.evaluation import report


def show() -> None:
    folder = typed(st.text_input, "Folder of an evaluation (icebear evaluate ... --out FOLDER)", "folder")
    if not folder:
        found = sorted(
            str(path.parent) for depth in ("*", "*/*", "*/*/*") for path in Path().glob(f"{depth}/results.json")
        )
        here = f" Here are: {', '.join(found)}." if found else ""
        st.caption(plain(f"Name a folder that icebear evaluate wrote.{here}"))
        return
    written = Path(folder) / "results.json"
    settings, rows, lines = _read(folder, written.stat().st_mtime_ns if written.is_file() else 0)
    st.markdown(f"#### {plain(settings['evaluation'])}: {plain(settings['model']['name'])}")
    st.dataframe(rows, hide_index=True, height="content")
    st.caption("\n".join(f"- {plain(line)}" for line in lines))
    for picture in ("curves.png", "bars.png"):
        if (Path(folder) / picture).is_file():
            st.image(str(Path(folder) / picture))
    for file, kind in (("index.html", "text/html"), ("table.csv", "text/csv"), ("results.json", "application/json")):
        st.download_button(file, (Path(folder) / file).read_bytes(), file, kind)
    with st.expander("Settings"):
        st.json(settings)


@st.cache_data(max_entries=8, show_spinner=False)
def _read(folder: str, modified: int) -> tuple[dict[str, Any], list[dict[str, str]], list[str]]:
    """The settings, table and legend of what was written at `modified`; the table's bootstraps take a second."""
    results = report.load(folder)
    rows = [{"method": name, **dict(zip(results.columns, row, strict=True))} for name, row in results.texts().items()]
    return results.settings, rows, results.legend()
