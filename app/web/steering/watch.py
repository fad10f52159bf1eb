"""Watch: a monitor of the concept, whose threshold is set by texts without it."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pandas
import streamlit as st

from icebear.app.web import chat_monitors
from icebear.app.web.shared import jobs, links, markdown, pictures, tables
from icebear.app.web.shared.background import Job
from icebear.errors import IcebearError
from icebear.steering.concept.concept import Concept
from icebear.steering.monitor.fitting import fewest, monitor
from icebear.steering.monitor.monitor import CONTROLS_TEXT, Monitor
from icebear.steering.monitor.text_values import UNITS

FALSE_POSITIVE_RATES = (0.01, 0.05)
EVERYDAY = files("icebear.app.web.steering").joinpath("examples", "everyday.txt")
COLUMNS_OF_RATES = {
    "true_positive_rate": "true positives",
    "false_positive_rate": "false positives",
    "auroc": "AUROC",
    "positives": "texts with",
    "negatives": "texts without",
}


def show(concept: Concept) -> None:
    """Draw the fields of a monitor, and the last one that they made."""
    st.markdown("## Watch")
    st.caption("A monitor flags texts with the concept. Texts without it set its threshold.")
    if not concept.texts:
        st.caption(
            "This link or file has only the neurons of the concept. They make a monitor, but to compare it with "
            "controls, find the concept again from its texts."
        )
    settings = (concept, *_fields(concept))
    negatives, fpr = settings[1:3]
    few = len(negatives) < fewest(fpr)
    with st.container(horizontal=True):
        start: dict[str, Any] = {
            "on_click": _start,
            "args": settings,
            "disabled": few,
            "help": f"Write at least {fewest(fpr)} texts." if few else None,
        }
        st.button("Set the threshold", type="primary", key="set_threshold", **start)
        st.button("Try an example: everyday sentences", key="everyday", icon=":material/chat:", on_click=_everyday)
    made_with, job = st.session_state.get("threshold", (settings, None))
    if job is None or job.abandoned or made_with[0] != concept:
        return
    try:
        result = jobs.waited(job, stops=True)
    except IcebearError as error:  # such as for a text that found the concept; the rest of the page stays
        st.error(markdown.message(error))
        return
    if made_with != settings:
        st.caption("The monitor below was made with other settings; set the threshold again.")
    _result(result)


def lines(slot: Any, label: str, key: str, least: int) -> list[str]:
    """Draw a field for texts, one a line, with its counter. Return the different texts."""
    text = slot.text_area(label, key=key, height=160, persist_state="session")
    texts = list(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))
    slot.caption(f"{len(texts)} of at least {least}")
    return texts


def _fields(concept: Concept) -> tuple[list[str], float, str, str]:
    """Return the texts without the concept, the rate, the unit and the detector."""
    choices: dict[str, Any] = {"required": True, "persist_state": "session"}
    with st.container(horizontal=True):
        fpr = st.segmented_control(
            "False positive rate",
            FALSE_POSITIVE_RATES,
            format_func="{:.0%}".format,
            default=0.01,
            key="watch_fpr",
            **choices,
        )
        unit = st.segmented_control("What is flagged", list(UNITS), default="sentence", key="watch_unit", **choices)
        detector = st.segmented_control(
            "Detector",
            ["neurons", *(vector.fit for vector in concept.vectors)],
            default="neurons",
            key="watch_detector",
            help="means, logistic: a vector of the residual stream, by the difference of means or a logistic model",
            **choices,
        )
    label = "Texts without the concept, like those that the monitor will read (one a line)"
    return lines(st, label, "watch_negatives", fewest(fpr)), fpr, unit, detector


def _everyday() -> None:
    st.session_state.update(watch_negatives=EVERYDAY.read_text(encoding="utf-8"), watch_fpr=0.05)


def _start(concept: Concept, negatives: list[str], fpr: float, unit: str, detector: str) -> None:
    loading = jobs.loading()

    def work(job: Job) -> Monitor:
        return monitor(loading.outcome(), concept, negatives, fpr, unit, detector, on_progress=job.step)

    st.session_state["threshold"] = (concept, negatives, fpr, unit, detector), Job("Reading the texts", work)


def _result(result: Monitor) -> None:
    most_important, *others = map(markdown.plain, result.about)
    with st.container(key="monitor_result"):
        st.markdown(f"**{most_important}** {' '.join(others)}")
        if result.rates:
            table = pandas.DataFrame(result.rates).rename(columns=COLUMNS_OF_RATES)
            formats = {"AUROC": st.column_config.NumberColumn(format="%.2f")}
            tables.data_table(table, len(table), shares=("true positives", "false positives"), column_config=formats)
            st.caption(CONTROLS_TEXT)
        with st.container(horizontal=True):
            st.button(
                "Use it in the chat", icon=":material/visibility:", key="use_monitor", on_click=_use, args=(result,)
            )
            pictures.downloads("monitor", {"json": result.to_json})
    markdown.into_view("monitor_result", result.about)


def _use(result: Monitor) -> None:
    chat_monitors.add(result)
    links.go("chat")
