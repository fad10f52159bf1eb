"""The line on top of every view, with model and store; and what stands in for a store that is not there yet."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from icebear.app.web.background import LARGER
from icebear.app.web.shared import shared
from icebear.app.web.state import has_store, loading, model_name, named_store, plain, store, store_path
from icebear.errors import StoreError


def show() -> None:
    """The line. Where there is no store, the demo's is built from here on."""
    try:
        ready = has_store()
        if not ready and not shared().builds.get(None):
            shared().build(loading(), asked=False)
        label = _label(ready)
    except StoreError:  # the file is something else; a view that needs it says so
        ready, label = False, f"{named_store()} cannot be read"
    with st.container(horizontal=True, vertical_alignment="center", gap="small", key="header"):
        st.markdown("**icebear**", width="content")
        name = Path(model_name())
        st.markdown(plain(name.name if name.exists() else str(name)), width="content")
        with st.popover(f"store: {plain(label)}", type="tertiary"):
            _about(ready)
    with st.container():  # in any case, so that what follows keeps its place
        if any(job.is_alive() for job in shared().builds.values()):
            _watching()


def _label(ready: bool) -> str:
    if ready:
        return named_store().name if store_path() == named_store() else "the demo's"
    job = shared().builds.get(None)
    return "being built" if job and job.is_alive() else "none"


def _about(ready: bool) -> None:
    if ready:
        with store() as opened:
            facts = opened.facts.all()
        size = f", {facts['limit']:,} documents" if facts["limit"] else ""
        st.markdown(plain(f"{facts['corpus']}{size}, read by {facts['model']}"))
        st.caption(plain(str(store_path().absolute())))
    if store_path() != named_store():
        larger = shared().builds.get(named_store())
        if larger and larger.error:
            st.caption(plain(str(larger.error)))
        st.button(
            f"Build one of {LARGER:,} summaries in {plain(str(named_store()))}",
            key="build_larger",
            on_click=_build_larger,
            disabled=bool(larger and larger.is_alive()),
            help="Ten times as many take about ten times as long. This server does it while you look around.",
        )
    st.caption("Another model or store: `icebear app --model ... --store ...`")


def _build_larger() -> None:
    shared().build(loading(), named_store())


def _build_small() -> None:
    shared().build(loading())


@st.fragment(run_every=2.0)
def _watching() -> None:
    """How far the building is; at its end the whole page is drawn anew."""
    alive = [job for job in shared().builds.values() if job.is_alive()]
    for job in alive:
        st.progress(job.share, f"Building a store: {job.doing} ...")
    if not alive:
        st.rerun()


def no_store_yet(what: str) -> bool:
    """Whether there is no store to read; then the page says why `what` is missing, and what to do."""
    if has_store():
        return False
    error = (job := shared().builds.get(None)) and job.error
    with st.container(border=True):
        if error:
            st.markdown(f"{what} from a store, and there is none. {plain(str(error))}")
            st.button("Build a small one", key="build_small", on_click=_build_small, type="primary")
        else:
            st.markdown(
                f"{what} when the small store is built, a few minutes after the model is here. "
                "The page then goes on by itself."
            )
            st.skeleton(height=200)
        st.caption(f"One of your own texts: `icebear index --store {named_store()}`")
    return True
