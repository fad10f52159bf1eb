"""The line on top of every view, with model and index; and the box that asks to build an index."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import streamlit as st

from icebear.actmax.index.part_files import folder_of, parts_lines
from icebear.actmax.shipped.index_choice import has_same_texts, store_name
from icebear.actmax.shipped.shipped_index import shipped_path
from icebear.app.web.shared import jobs, markdown, served
from icebear.app.web.shared.all_visitors import cached_indexes, server_state
from icebear.app.web.shared.background_job import Job
from icebear.app.web.shared.index_builds import APP_SITES, LARGE_INDEX, SMALL_INDEX
from icebear.cache import cache_folder
from icebear.db.store import documents_read, scan_facts
from icebear.errors import StoreError

WHAT_FOR = (
    "An index holds, for each neuron, the sentences that activate it most. Cards, search and labels are made from it."
)


def show() -> None:
    """Show the line, and the progress of the indexes that are being built."""
    try:
        ready = served.has_store()
        label = _label(ready)
    except StoreError:  # the file is something else; a view that needs it reports that
        ready, label = False, f"{served.named_store()} cannot be read"
    _prepare_shipped(ready)
    with st.container(horizontal=True, vertical_alignment="center", gap="small", key="header"):
        st.markdown("**icebear**", width="content")
        name = Path(served.model_name())
        st.markdown(markdown.plain(name.name if name.exists() else str(name)), width="content")
        with st.popover(f"index: {markdown.plain(label)}", type="tertiary"):
            _about(ready)
    with st.container():  # in any case, so that what follows keeps its place
        if any(job.is_alive() for job in server_state().builds.values()):
            _watching()


def _prepare_shipped(ready: bool) -> None:
    """Start to prepare the index that comes with icebear, if it is to be read and is not there yet."""
    name = served.model_name()
    shipped = shipped_path(name)
    if not shipped or shipped in server_state().builds:
        return
    if not ready or (served.choice().is_shipped and shipped not in cached_indexes(name)):
        server_state().build(jobs.model_job(), shipped)


def _label(ready: bool) -> str:
    if ready:
        with served.store() as opened:
            return store_name(opened)
    return "being built" if any(job.is_alive() for job in server_state().builds.values()) else "none"


def _about(ready: bool) -> None:
    """Say what the index is, and which parts of a scan over several machines there are; offer a larger one."""
    for line in parts_lines(folder_of(served.named_store())):
        st.caption(markdown.plain(line))
    if not ready:
        _offer("header")
        return
    with served.store() as opened:
        facts = opened.facts.all()
        sample = opened.documents_phrase
    st.markdown(markdown.plain(f"It holds {sample}, read by {facts['model']}"))
    st.caption(markdown.plain(str(served.store_path().absolute())))
    if note := served.choice().note:
        st.caption(markdown.plain(note))
    documents = larger(facts)
    if served.store_path() != served.named_store() and documents and can_hold(served.named_store(), facts):
        job = server_state().builds.get(served.named_store())
        _outcome(job)
        if not (job and job.is_alive()):
            st.caption(
                f"A larger one is written to {markdown.plain(str(served.named_store().absolute()))}. You can stop it."
            )
            _button(f"Build a larger index ({documents:,} articles)", "build_larger", served.named_store(), documents)


def larger(facts: Mapping[str, Any]) -> int | None:
    """Return how many documents an index has that is larger than one with these facts; None if it has all."""
    count, size = documents_read(facts), facts.get("documents")
    if count is None or size is None or count >= size:
        return None
    return min(size, LARGE_INDEX if count < LARGE_INDEX else 2 * count)


def can_hold(path: Path, facts: Mapping[str, Any]) -> bool:
    """Return whether the app can write an index of this model and these texts to a path, or resume one."""
    before = scan_facts(path)
    same = (before.get("fingerprint"), before.get("sites")) == (facts["fingerprint"], list(APP_SITES))
    return not before or (same and has_same_texts(before, facts))


@st.fragment(run_every=1.0)
def _watching() -> None:
    """Show the progress of what is being built, with Stop; then draw the whole page again."""
    alive = [job for job in server_state().builds.values() if job.is_alive()]
    for number, job in enumerate(alive):
        with st.container(horizontal=True, vertical_alignment="center", key=f"building_{number}"):
            st.progress(job.share, f"{markdown.plain(job.what)}: {job.doing} ...")
            st.button("Stop", key=f"stop_build_{number}", on_click=job.stop, disabled=job.stopped)
    if not alive:
        st.rerun()


def no_store_yet(needs: str) -> bool:
    """If there is no index to read, say what `needs` it, and ask to build one. Return whether it was asked for."""
    if served.has_store():
        return False
    with st.container(border=True, key="no_index"):
        st.markdown(f"{needs} an index.")
        _offer("page")
    return True


def offer_small(lack: str) -> None:
    """Ask to build the small index, because the one that is there lacks something."""
    with st.container(border=True, key="no_index"):
        st.markdown(f"This index has {lack}. The app can build a small index that has them.")
        _offer("site")


def _offer(where: str) -> None:
    """Say what an index is for, how long it takes and where it is written; build the small one on a click."""
    job = server_state().builds.get(None)
    if any(build.is_alive() for build in server_state().builds.values()):
        st.caption("It is being built; the progress is at the top of the page, and the page then updates itself.")
        return
    _outcome(job)
    st.markdown(WHAT_FOR)
    st.markdown(
        f"The model reads {SMALL_INDEX} Wikipedia summaries; after the first sentences the progress bar says how long "
        "it takes. Meanwhile you can use the app, and you can stop and continue. The index stays on this computer, and "
        "is built only once."
    )
    _button("Continue" if job else "Build the index", f"build_small_{where}", None)
    st.caption(markdown.plain(f"It is written to {cache_folder()}."))


def _outcome(job: Job | None) -> None:
    """Say how a build ended, if it did not succeed."""
    if job and job.stopped:
        st.markdown("Stopped. Most of what was read is saved: *Continue* resumes there.")
    elif job and job.error:
        st.error(markdown.plain(str(job.error)))


def _button(label: str, key: str, path: Path | None, documents: int = SMALL_INDEX) -> None:
    build = server_state().build
    st.button(label, key=key, type="primary", on_click=lambda: build(jobs.model_job(), path, documents))
