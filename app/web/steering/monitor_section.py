"""Watch: a monitor of the concept, whose threshold is set by texts without it."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pandas
import streamlit as st

from icebear.app.web import chat_monitors
from icebear.app.web.shared import jobs, links, markdown, pictures, tables
from icebear.app.web.shared.background_job import Job
from icebear.errors import IcebearError
from icebear.steering.concept.concept import Concept
from icebear.steering.monitor.fitting import fewest, monitor
from icebear.steering.monitor.monitor import CONTROLS_TEXT, Monitor
from icebear.steering.monitor.text_values import UNITS

EVERYDAY = files("icebear.app.web.steering").joinpath("examples", "everyday.txt")
NO_TEXTS = (
    "This link or file has only the neurons of the concept. They make a monitor; to compare it with controls, find the "
    "concept again from its texts."
)
SHARES = ("true positives", "false positives")


def show(concept: Concept) -> None:
    """Draw the fields of a monitor, and the last one that was made of the concept."""
    st.markdown("## Watch")
    st.caption("A monitor flags texts with the concept. Texts without it set its threshold.")
    if not concept.texts:
        st.caption(NO_TEXTS)
    with st.container(horizontal=True):
        fpr = _choice("False positive rate", [0.01, 0.05], "watch_fpr", format_func="{:.0%}".format)
        unit = _choice("What is flagged", list(UNITS), "watch_unit")
        detectors = ["neurons", *(vector.fit for vector in concept.vectors)]
        detector = _choice("Detector", detectors, "watch_detector", help="means, logistic: of the residual stream")
    label = "Texts without the concept, of the kind that the monitor will read (one a line)"
    negatives = texts_field(st, label, "watch_negatives", fewest(fpr))
    settings = (concept, negatives, fpr, unit, detector)
    with st.container(horizontal=True):
        few = len(negatives) < fewest(fpr)
        name = "Set the threshold"
        st.button(name, type="primary", key="set_threshold", disabled=few, on_click=_start, args=settings)
        st.button("Try an example: everyday sentences", key="everyday", icon=":material/chat:", on_click=_everyday)
    made_with, job = st.session_state.get("threshold", (settings, None))
    if job and not job.abandoned and made_with[0] == concept:
        _show(job, made_with == settings)


def texts_field(slot: Any, label: str, key: str, least: int) -> list[str]:
    """Draw a field for texts, one a line, with its counter. Return the different texts."""
    text = slot.text_area(label, key=key, height=160, persist_state="session")
    texts = list(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))
    slot.caption(f"{len(texts)} of at least {least}")
    return texts


def _choice(label: str, options: list, key: str, **more: Any) -> Any:
    return st.segmented_control(
        label, options, default=options[0], key=key, required=True, persist_state="session", **more
    )


def _everyday() -> None:
    st.session_state.update(watch_negatives=EVERYDAY.read_text(encoding="utf-8"), watch_fpr=0.05)


def _start(*settings: Any) -> None:
    loading = jobs.model_job()

    def work(job: Job) -> Monitor:
        concept, negatives, fpr, unit, detector = settings
        return monitor(loading.outcome(), concept, negatives, fpr, unit, detector, on_progress=job.step)

    st.session_state["threshold"] = settings, Job("Reading the texts", work)


def _show(job: Job, is_current: bool) -> None:
    """Show the monitor that a job makes, with its rates beside controls."""
    try:
        result: Monitor = jobs.wait_for(job, stops=True)
    except IcebearError as error:  # such as for a text that found the concept; the rest of the page stays
        st.error(markdown.message(error))
        return
    with st.container(key="monitor_result"):
        if not is_current:
            st.caption("This monitor was made with other settings; set the threshold again.")
        most_important, *others = map(markdown.plain, result.about)
        st.markdown(f"**{most_important}** {' '.join(others)}")
        if result.rates:
            table = pandas.DataFrame(result.rates)
            table.columns = ["texts", "detector", *SHARES, "AUROC", "texts with", "texts without"]
            formats = {"AUROC": st.column_config.NumberColumn(format="%.2f")}
            tables.data_table(table, len(table), shares=SHARES, column_config=formats)
            st.caption(CONTROLS_TEXT)
        with st.container(horizontal=True):
            icon = ":material/visibility:"
            st.button("Use it in the chat", icon=icon, key="use_monitor", on_click=_use, args=(result,))
            pictures.downloads("monitor", {"json": result.to_json})
    markdown.into_view("monitor_result", result.about)


def _use(result: Monitor) -> None:
    chat_monitors.add(result)
    links.go("chat")
