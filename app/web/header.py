"""The line on top of every view, with model and index; and the replacement for an index that is not there yet."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from icebear.app.web import ui
from icebear.app.web.background import LARGER, shared
from icebear.errors import StoreError


def show() -> None:
    """Show the line. If there is no index, start to build the small one."""
    try:
        ready = ui.has_store()
        if not ready and not shared().builds.get(None):
            shared().build(ui.loading(), on_request=False)
        label = _label(ready)
    except StoreError:  # the file is something else; a view that needs it reports that
        ready, label = False, f"{ui.named_store()} cannot be read"
    with st.container(horizontal=True, vertical_alignment="center", gap="small", key="header"):
        st.markdown("**icebear**", width="content")
        name = Path(ui.model_name())
        st.markdown(ui.plain(name.name if name.exists() else str(name)), width="content")
        with st.popover(f"index: {ui.plain(label)}", type="tertiary"):
            _about(ready)
    with st.container():  # in any case, so that what follows keeps its place
        if any(job.is_alive() for job in shared().builds.values()):
            _watching()


def _label(ready: bool) -> str:
    if ready:
        return ui.named_store().name if ui.store_path() == ui.named_store() else "300 Wikipedia summaries"
    job = shared().builds.get(None)
    return "being built" if job and job.is_alive() else "none"


def _about(ready: bool) -> None:
    if ready:
        with ui.store() as opened:
            facts = opened.facts.all()
        size = f", {facts['limit']:,} documents" if facts["limit"] else ""
        st.markdown(ui.plain(f"{facts['corpus']}{size}, read by {facts['model']}"))
        st.caption(ui.plain(str(ui.store_path().absolute())))
    if ui.store_path() != ui.named_store():
        larger = shared().builds.get(ui.named_store())
        if larger and larger.error:
            st.caption(ui.plain(str(larger.error)))
        st.button(
            f"Build a larger index ({LARGER:,} articles, about 40 min)",
            key="build_larger",
            on_click=shared().build,
            args=(ui.loading(), ui.named_store()),
            disabled=bool(larger and larger.is_alive()),
            help=f"It is written to {ui.plain(str(ui.named_store()))}. You can use the app meanwhile.",
        )
    st.caption("Use another model or index: `icebear app --model ... --store ...`")


@st.fragment(run_every=2.0)
def _watching() -> None:
    """Show the progress of the indexes that are being built; then draw the whole page again."""
    alive = [job for job in shared().builds.values() if job.is_alive()]
    for job in alive:
        st.progress(job.share, f"Building an index: {job.doing} ...")
    if not alive:
        st.rerun()


def no_store_yet(needs: str) -> bool:
    """Return whether there is no index to read; then the page says what `needs` it, and what to do."""
    if ui.has_store():
        return False
    job = shared().builds.get(None)
    with st.container(border=True):
        if job and job.error:
            st.markdown(f"{needs} an index. {ui.plain(str(job.error))}")
            st.button(
                "Build a small index", key="build_small", on_click=shared().build, args=(ui.loading(),), type="primary"
            )
        else:
            st.markdown(f"{needs} an index. It is being built, in about 4 minutes; this page then updates itself.")
            st.skeleton(height=200)
        st.caption(f"To index your own texts: `icebear index --store {ui.named_store()}`")
    return True
