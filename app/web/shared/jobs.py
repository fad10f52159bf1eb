"""What a page does with jobs: it waits for a result, or shows the progress with Stop. And the model of all visitors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import streamlit as st
from streamlit.runtime.scriptrunner import get_script_run_ctx

from icebear.app.web.shared import all_visitors, background_job, markdown, served
from icebear.app.web.shared.background_job import STOPPED, Job, running
from icebear.db.store import Store
from icebear.errors import IcebearError, StoreError

if TYPE_CHECKING:
    from icebear.models.model import Model

QUICK = 0.3
"""Seconds before progress is shown."""
POLL = 0.5
"""Seconds between two looks at a job that the page does not wait for."""


@st.cache_resource(show_spinner=False)
def _load(model: str, **options: Any) -> Job:
    return all_visitors.start_loading(model, **options)


def model_job() -> Job:
    """Return the job that loads, or has loaded, the model of all visitors."""
    options = served.model_settings()
    if _load(**options).error:
        _load.clear(**options)  # to try again
    job = background_job.loads[json.dumps(options)] = _load(**options)
    return job


def model_if_loaded(opened: Store) -> Model | None:
    """Return the model if it is loaded already, and the index is of this model."""
    job = background_job.loads.get(json.dumps(served.model_settings()))
    if job and job.result:
        with suppress(StoreError):
            opened.check(job.result.index_fingerprint, job.result.name)
            return job.result
    return None


def model() -> Model:
    """Return the model that all visitors share; the page waits until it is loaded."""
    return wait_for(model_job())


def reads_images() -> bool:
    """Return whether the model is loaded, and reads images with a text."""
    model = model_job().result
    return model is not None and model.vision is not None


def wait_for(job: Job, stops: bool = False) -> Any:
    """Return the job's result. Until then the page shows the progress, and any click ends this run."""
    slot = st.empty()
    if visitor() in job.left and not job.stopped:  # others wait for it
        job.left.discard(visitor())
        raise IcebearError(STOPPED)
    _enter(job, stops)
    background_job.first_page.set()
    job.join(QUICK)
    if job.is_alive():
        end_unwatched()
        with slot.container():
            bar = st.progress(0.0)
            if stops:
                _stop(job)
            st.skeleton(height=240)
        while job.is_alive():
            bar.progress(job.share, f"{markdown.plain(doing(job))} ...")
            job.join(0.2)
        slot.empty()
    return job.outcome()


def show_until_done(job: Job) -> bool:
    """Show the progress of a job, with Stop, or why it has no result; the page goes on meanwhile.

    Return whether there is a result, perhaps the first part of it; then show nothing."""
    if job.result is not None:
        return True
    if works_for_visitor(job):
        show_progress(job)
    elif job.is_alive() or job.error:
        st.info(markdown.message(job.error or STOPPED))
    else:
        return True
    return False


def works_for_visitor(job: Job) -> bool:
    """Return whether a job works for this visitor."""
    return job.is_alive() and visitor() not in job.left


@st.fragment(run_every=POLL)
def show_progress(job: Job, draw: Callable[[Any], None] | None = None) -> None:
    """Show what there is of the result, and the progress with Stop; at the end the page is drawn again.

    draw: shows a part of the result; without it the page is drawn again as soon as there is one.
    """
    if not works_for_visitor(job) or not (draw or job.result is None):
        st.rerun()
    _enter(job)
    if draw:
        draw(job.result)
    st.progress(job.share, f"{markdown.plain(doing(job))} ...")
    _stop(job)


def _stop(job: Job) -> None:
    st.button("Stop", key=f"stop {job.name}", on_click=job.leave, args=(visitor(),))


def visitor() -> str:
    """Return the id of this visitor's session."""
    context = get_script_run_ctx()
    return context.session_id if context else ""


def _enter(job: Job, stops: bool = True) -> None:
    """Count this visitor. stops: the work ends when no page shows it."""
    job.enter(visitor())
    if stops:
        st.session_state.setdefault("watched", set()).add(job)


def begin_run() -> None:
    """Begin a run of the page: what the run before it watched may be shown again."""
    state = st.session_state
    jobs = {*state.get("watched_before", ()), *state.get("watched", ())}
    state.update(watched_before={job for job in jobs if job.is_alive()}, watched=set())


def end_unwatched() -> None:
    """End the work that an earlier run of this page showed, and this one does not."""
    state = st.session_state
    for job in state.get("watched_before", set()) - state.get("watched", set()):
        job.abandon(visitor())


def doing(job: Job) -> str:
    """Return what the job is doing, or for which other work it waits; a model does one thing at a time."""
    for load in list(background_job.loads.values()):
        lock = load.result and load.result.lock
        if lock and job.ident and lock.is_waiting(job.ident):
            return next(
                (f"Waiting for: {o.what}" for o in running() if o.ident == lock.holder), "Waiting for another tab"
            )
    return job.doing


def cached_job(start: Any, *request: Any) -> Job:
    """Return the job that `start`, a cached function, returns; one that nobody watched to its end starts anew."""
    if start(*request).abandoned:
        start.clear(*request)
    return start(*request)


def run_and_wait(what: str, make: Callable[[Job], Any]) -> Any:
    """Return the result of `make`, in a thread that Stop, any other click, and leaving the page end."""
    job = Job(what, make)
    try:
        return wait_for(job, stops=True)
    finally:
        job.stop()


def wait_for_cached(start: Any, *request: Any, stops: bool = False) -> Any:
    """Wait for the job that `start`, a cached function, returns. After an error it is started again the next time."""
    job = cached_job(start, *request)
    try:
        return wait_for(job, stops)
    finally:
        if job.error:
            start.clear(*request)


@contextmanager
def progress(text: str) -> Iterator[Callable[[int, int], Any]]:
    """Show a progress bar and yield the function that moves it; any click ends this run at its next step."""
    slot = st.empty()
    with slot.container():
        bar = st.progress(0.0, text)
        st.button("Stop", key=f"stop {text}")
    yield lambda done, total: bar.progress(min(1.0, done / max(total, 1)), text)
    slot.empty()


def model_of_index(opened: Store) -> Model:
    """Return the model, if the index is of this model. Raises `StoreError` otherwise."""
    loaded = model()
    opened.check(loaded.index_fingerprint, loaded.name)
    return loaded
