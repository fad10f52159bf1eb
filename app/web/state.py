"""What the views share: model and store, the URL, and moving between views."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import streamlit as st

from concepts.render import visible
from db.store import Store, open_store
from icebear.errors import IcebearError, StoreError
from icebear.records import Neuron

if TYPE_CHECKING:
    from concepts.models.model import Model

VIEWS = ("explain", "neuron", "search", "steer", "compare", "report")


def model_name() -> str:
    return os.environ.get("ICEBEAR_APP_MODEL", "smollm2-135m")


def store_path() -> Path:
    return Path(os.environ.get("ICEBEAR_APP_STORE", "icebear.db"))


@st.cache_resource(show_spinner="Loading the model, once for all visitors ...")
def _load(name: str, device: str, dtype: str | None, accept_terms: bool) -> Model:
    from concepts.models.loading import load_model

    return load_model(name, device=device, dtype=dtype, accept_terms=accept_terms)


def model() -> Model:
    """The model that all visitors share; loaded when a view first needs it."""
    environ = os.environ
    return _load(
        model_name(),
        environ.get("ICEBEAR_APP_DEVICE", "auto"),
        environ.get("ICEBEAR_APP_DTYPE") or None,
        environ.get("ICEBEAR_APP_ACCEPT_TERMS") == "1",
    )


@contextmanager
def store() -> Iterator[Store]:
    """The store, opened for this run of the script. Raises `StoreError` when there is none."""
    with open_store(store_path(), create=False) as opened:
        yield opened


def has_store() -> bool:
    try:
        with store() as opened:
            return "finished" in opened.facts()
    except StoreError:
        return False


def fitting(opened: Store) -> Model:
    """The model, if the store is an index of it. Raises `StoreError` otherwise."""
    loaded = model()
    opened.check(loaded.fingerprint, loaded.name)
    return loaded


@contextmanager
def telling_trouble() -> Iterator[None]:
    """For callbacks: an error is shown by the next run instead of ending it."""
    try:
        yield
    except IcebearError as error:
        st.session_state["trouble"] = str(error)


def typed(widget: Callable, label: str, key: str, *args: Any, **options: Any) -> Any:
    """A widget whose value is in the URL, and is kept while other views are shown."""
    return widget(label, *args, key=key, bind="query-params", persist_state="session", **options)


def go(view: str, **values: Any) -> None:
    """For callbacks: show `view` with these values typed in."""
    st.session_state["view"] = view
    for key, value in values.items():
        st.session_state[key] = value


def to_steer(neuron: Neuron | str) -> None:
    """For callbacks: add an edit that switches the neuron off, and show the steering view."""
    lines = st.session_state.get("edits", "")
    go("steer", edits=f"{lines.rstrip()}\n{neuron}*0".strip())


def neuron_pills(label: str, found: Iterable[tuple[Neuron, str]], key: str) -> None:
    """Neurons with a polarity, if they have one, to click on, which opens their card."""

    def open_card() -> None:
        if st.session_state[key]:
            neuron, _, polarity = st.session_state[key].partition(" ")
            st.session_state[key] = None
            go("neuron", neuron=neuron, polarity=polarity or "+")

    names = list(dict.fromkeys(f"{neuron} {polarity}".strip() for neuron, polarity in found))
    st.pills(label, names, key=key, on_change=open_card)


def plain(text: str) -> str:
    """Text that shows as itself where Streamlit expects Markdown."""
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", text.replace("\n", " "))


def token_label(text: str) -> str:
    """A token for a button: its spaces visible, its Markdown not."""
    return plain(visible(text.replace(" ", "␣")))


def downloads(name: str, files: dict[str, Callable[[], str | bytes]]) -> None:
    """A row of buttons; suffix -> what makes the file, called on the click."""
    with st.popover("Download", icon=":material/download:"):
        for suffix, make in files.items():
            st.download_button(suffix.upper(), make, f"{name}.{suffix}", key=f"{name}.{suffix}", on_click="ignore")
