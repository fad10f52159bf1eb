"""The folder of an evaluation: its table, figures and files."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from app.state import plain, typed
from concepts.evaluation import report


def show() -> None:
    folder = typed(st.text_input, "Folder of an evaluation (icebear evaluate ... --out FOLDER)", "folder")
    if not folder:
        found = sorted(path.parent.name for path in Path.cwd().glob("*/results.json"))
        here = f" Here are: {', '.join(found)}." if found else ""
        st.caption(plain(f"Name a folder that icebear evaluate wrote.{here}"))
        return
    results = report.load(folder)
    settings, columns = results["settings"], results["columns"]
    st.markdown(f"#### {plain(settings['evaluation'])}: {plain(settings['model']['name'])}")
    table = report.table(results["samples"], columns, list(settings["methods"]))
    rows = [
        {"method": name, **{c: "—" if v is None else str(v) for c, v in cells.items()}} for name, cells in table.items()
    ]
    st.dataframe(rows, hide_index=True, height="content")
    lines = report.legend(results["samples"], columns, results["notes"], results["unable"])
    st.caption("\n".join(f"- {plain(line)}" for line in lines))
    for picture in ("curves.png", "bars.png"):
        if (Path(folder) / picture).is_file():
            st.image(str(Path(folder) / picture))
    for file, kind in (("index.html", "text/html"), ("table.csv", "text/csv"), ("results.json", "application/json")):
        st.download_button(file, (Path(folder) / file).read_bytes(), file, kind)
    with st.expander("Settings"):
        st.json(settings)
