"""The report of an evaluation, as `icebear evaluate --out` wrote it."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from icebear.app.web import ui
from icebear.paths import read_text


def show() -> None:
    folder = ui.typed(st.text_input, "Folder of an evaluation (icebear evaluate ... --out FOLDER)", "folder")
    if folder:
        html = read_text(Path(folder) / "index.html")
        st.download_button("Download", html, "index.html", "text/html", icon=":material/download:", on_click="ignore")
        st.iframe(html, height=900)
        return
    reports = sorted(path.parent for depth in ("*", "*/*", "*/*/*") for path in Path().glob(f"{depth}/results.json"))
    here = f" There are: {', '.join(map(str, reports))}." if reports else ""
    st.caption(ui.plain(f"Name a folder that icebear evaluate wrote.{here}"))
