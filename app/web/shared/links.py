"""The views, what of them is in the URL, and moving between them."""

import importlib
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import streamlit as st
from streamlit.errors import StreamlitAPIException
from streamlit.navigation.page import Page
from streamlit.runtime.scriptrunner import get_script_run_ctx

from icebear.app.web.shared import background_job, served
from icebear.records import POLARITIES, Neuron


class View(NamedTuple):
    title: str
    """Its name in the navigation."""
    module: str
    """Its module with `show()`, in `icebear.app.web`."""


VIEWS = {
    "why": View("Why this word?", "why.prediction"),
    "chat": View("Chat", "chat"),
    "circuit": View("How is it computed?", "circuit"),
    "neurons": View("Neurons", "neurons"),
    "atlas": View("Atlas", "atlas"),
    "steer": View("Concepts & steering", "steering.sections"),
}
"""The URL of a view -> the view; the first one is at the root."""
LIGHT = ("why", "atlas")
"""Views that can be shown without torch."""
LONGEST_URL_VALUE = 6000
"""The longest value, such as a conversation, that goes into a link, in characters."""


@dataclass(frozen=True)
class Visit:
    """A run of the page: the view that it shows."""

    view: str
    is_first: bool
    """Whether the run before it showed another view."""
    drawn: set[str] = field(default_factory=set)
    """The keys of the widgets of `bound` so far."""


def visit() -> Visit:
    """Return the visit that `navigation` began; in a callback, that of the run before."""
    return st.session_state["visit"]


def navigation() -> Page:
    """Draw the navigation, begin a visit of the view that is chosen, and return its page."""
    _restore()
    chosen = st.navigation([page(name) for name in VIEWS], position="top")
    view = next(name for name in VIEWS if VIEWS[name].title == chosen.title)
    before: Visit | None = st.session_state.get("visit")
    st.session_state["visit"] = Visit(view, before is None or before.view != view)
    return chosen


def _restore() -> None:
    """Read the URL to which the browser's Back returned; Streamlit drops what the page before it has fields for."""
    context = get_script_run_ctx()
    if context and context.is_history_navigation:
        with context.session_state.query_params() as known:
            known.populate_from_query_string(context.query_string)
            known.set_initial_query_params_from_current()
            known._send_query_param_msg()


def page(view: str) -> Page:
    """Return a view as a page of Streamlit's navigation; its code is imported when it is first shown."""

    def show() -> None:
        lock = nullcontext() if view in LIGHT else background_job.importing
        with st.skeleton(height=400), lock:  # the first import of torch takes seconds
            code = importlib.import_module(f"icebear.app.web.{VIEWS[view].module}")
        code.show()

    return st.Page(show, title=VIEWS[view].title, url_path=view, default=view == next(iter(VIEWS)))


def bound(widget: Callable, label: str, key: str, *args: Any, **options: Any) -> Any:
    """Draw a widget whose value is in the URL, and persists while other views are shown."""
    visit().drawn.add(key)
    return widget(label, *args, key=key, bind="query-params", persist_state="session", **options)


def from_url(key: str) -> str | None:
    """Return a value that no widget shows, of the URL or else of this session, and write it into the URL.

    It persists while other views are shown: the first run of a visit writes it into the URL again. In later runs only
    what is too long for the URL may be missing there; anything else was removed by the browser's Back.
    """
    value = st.session_state.get(key)
    if key in st.query_params:
        value = st.query_params[key]
    elif not visit().is_first and len(value or "") <= LONGEST_URL_VALUE:
        value = None
    to_url(**{key: value})
    return value


def to_url(**values: str | None) -> None:
    """Set parts of the URL in one step."""
    st.session_state.update(values)
    short = {key: value for key, value in values.items() if value and len(value) <= LONGEST_URL_VALUE}
    for key in values:
        if key not in short:
            st.query_params.pop(key, None)
    changed = {key: value for key, value in short.items() if st.query_params.get(key) != value}
    if changed:  # each update is a step of the browser's Back
        st.query_params.update(changed)


def fill(**values: str) -> None:
    """Type values into widgets of `bound`, whether the page draws them now or only in its next run; for callbacks."""
    st.session_state.update(values)
    for key, value in values.items():
        with suppress(StreamlitAPIException):  # a widget that is drawn now writes the URL itself
            to_url(**{key: value})


def go(view: str, **values: str) -> None:
    """Show `view` with these values typed in; for callbacks."""
    st.session_state.update(values)
    if view != visit().view:
        _switch(view, values)


def _switch(view: str, values: dict[str, str]) -> None:
    """Switch to a view, with these values in the URL; a widget that is drawn now writes its own."""
    st.switch_page(page(view), query_params={key: value for key, value in values.items() if key not in visit().drawn})


def open_card(neuron: str, polarity: str = "") -> None:
    """Show the card of a neuron at a polarity, of its strongest sentence if it has none; for callbacks."""
    values = {"neuron": neuron, "polarity": polarity or _strongest_side(Neuron.parse(neuron))}
    st.session_state.update(values)
    view = visit().view
    if view != "neurons":
        st.session_state["card_from"] = (view, None if view == "chat" else st.session_state.get("prompt"))
    if values["polarity"] == "+":
        del values["polarity"]  # the default is not in the URL; a second change of it would be a second step back
    _switch("neurons", values)


def _strongest_side(neuron: Neuron) -> str:
    """Return the polarity of the sentence with the largest absolute activation; + without an index."""
    if not served.has_store(neuron.site):
        return "+"
    with served.store(neuron.site) as opened:
        strongest = [
            (abs(example.activation), side) for side in POLARITIES for example in opened.examples(neuron, side, 1)
        ]
    return max(strongest, default=(0, "+"))[1]


def to_steer(neuron: Neuron | str, **values: str) -> None:
    """Add an edit that switches the neuron off, and show the steering view with these values; for callbacks."""
    lines = st.session_state.get("edits", "")
    go("steer", section="edits", edits=f"{lines.rstrip()}\n{neuron}*0".strip(), **values)
