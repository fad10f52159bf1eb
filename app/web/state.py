"""What the views share: model and store, the URL, and moving between views."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas
import streamlit as st
from markupsafe import Markup

from icebear.app.cli.verbs.demo import OTHER
from icebear.app.web import background
from icebear.app.web.shared import shared
from icebear.concepts.models.chat import Chat
from icebear.concepts.render import relevance_heatmap, visible
from icebear.db.store import Store, open_store
from icebear.errors import IcebearError
from icebear.records import Neuron

if TYPE_CHECKING:
    from streamlit.navigation.page import Page

    from icebear.actmax.explanation import Explanation
    from icebear.concepts.attribution.ranking import Ranking
    from icebear.concepts.attribution.result import Relevance
    from icebear.concepts.models.model import Model

VIEWS = ("talk", "explain", "circuit", "neuron", "search", "concept", "steer", "compare", "report")
LINK = 6000
"""Characters of a conversation that a link has room for."""


def page(view: str) -> Page:
    """A view as a page of Streamlit's navigation; its code is read when it is first shown."""

    def show() -> None:
        with st.skeleton(height=400), background.importing:  # the first import of torch takes seconds
            code = importlib.import_module(f"icebear.app.web.{view}")
        code.show()

    return st.Page(show, title=view, url_path=view, default=view == VIEWS[0])


def model_name() -> str:
    return os.environ.get("ICEBEAR_APP_MODEL", "smollm2-135m")


def a_neuron() -> str:
    """The one that views show before another is named; the default model's is of the ice bear."""
    return "L29.ffn.860" if model_name() == "smollm2-135m" else "L0.ffn.0"


@st.cache_resource(show_spinner=False)
def _load(name: str, **options: Any) -> background.Job:
    return background.loading(name, **options)


def loading() -> background.Job:
    """The model that all visitors share, being loaded or there."""
    environ = os.environ
    options = {
        "device": environ.get("ICEBEAR_APP_DEVICE", "auto"),
        "device_map": environ.get("ICEBEAR_APP_DEVICE_MAP") or None,
        "bits": int(environ.get("ICEBEAR_APP_BITS") or 0) or None,
        "dtype": environ.get("ICEBEAR_APP_DTYPE") or None,
        "attention": environ.get("ICEBEAR_APP_ATTENTION") or None,
        "accept_terms": environ.get("ICEBEAR_APP_ACCEPT_TERMS") == "1",
        "trust_remote_code": environ.get("ICEBEAR_APP_TRUST_REMOTE_CODE") == "1",
    }
    if _load(model_name(), **options).error:
        _load.clear()  # to try again
    return _load(model_name(), **options)


def model() -> Model:
    """The model that all visitors share; where it is not there yet, the page has a placeholder until it is."""
    job = loading()
    if job.is_alive():
        place = st.empty()
        with place.container():
            said = st.empty()
            st.skeleton(height=240)
        while job.is_alive():
            said.caption(f"{plain(job.doing)} ...")  # any click ends this run here
            job.join(0.2)
        place.empty()
    if job.error:
        raise job.error
    return job.result


def has_labels() -> bool:
    """Whether there is a store to look labels up in; what is wrong with it the views that need one say."""
    with suppress(IcebearError):
        return has_store()
    return False


def known(pairs: list[tuple[Neuron, str]]) -> dict[str, list[str]]:
    """A column for a table of neurons at polarities: their labels that hold, with scores; none where none are known."""
    if not has_labels():
        return {}
    with store() as opened:
        names = [opened.labels.name(*pair) or "" for pair in pairs]
    return {"means": names} if any(names) else {}


WIDE: dict[str, Any] = {"means": st.column_config.TextColumn(width=380)}
"""How that column is shown."""


HEADS = {"counterfactual": "there", "promotes": "promotes here", "label": "means"}
"""Columns of `Explanation.to_frame` -> how they are headed."""
_NUMBER = st.column_config.NumberColumn(format="%+.3f")
NUMBERS = {"relevance": _NUMBER, "activation": _NUMBER, "there": _NUMBER, **WIDE}
HEAT = Markup('<div class="heat">{}</div>')
ANSWER = Markup('<div class="heat answer">{}<b>&rarr; {}</b></div>')


def named_store() -> Path:
    return Path(os.environ.get("ICEBEAR_APP_STORE", "icebear.db"))


def store_path() -> Path:
    """The store that was named; while that is missing or not finished the demo's, where it is built."""
    small = shared().builds.get(None)
    if small and small.result and not _finished(named_store()):
        return small.result
    return named_store()


def _finished(path: Path) -> bool:
    if not path.exists():
        return False
    with open_store(path) as opened:
        return "finished" in opened.facts.all()


@contextmanager
def store() -> Iterator[Store]:
    """The store, opened for this run of the script. Raises `StoreError` when there is none."""
    with open_store(store_path()) as opened:
        yield opened


def has_store() -> bool:
    """Whether cards can be read. Raises `StoreError` where the named file is something else."""
    return _finished(store_path())


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


def kept(key: str) -> str | None:
    """A part of the URL that no widget shows; kept while other views are shown, or where it is too long for a URL."""
    value = st.session_state.get(key)
    if key in st.query_params:
        value = st.query_params[key]
    elif not st.session_state["came"] and len(value or "") <= LINK:
        value = None  # as by the button that goes back
    keep(**{key: value})
    return value


def keep(**values: str | None) -> None:
    """Put parts of the URL, all in one step."""
    st.session_state.update(values)
    short = {key: value for key, value in values.items() if value and len(value) <= LINK}
    for key in values:
        if key not in short:
            st.query_params.pop(key, None)
    st.query_params.update(short)


def read_prompt(text: str) -> str | Chat:
    """What stands in a field for a prompt: a text, or the messages of a chat as JSON. Raises `InputError`."""
    return Chat.from_json(text, "The prompt") if re.match(r'\s*\[\s*{\s*"role"', text) else text


def other_prompt(prompt: str, default: str = "") -> str | None:
    """The field for a prompt to compare with; while it is empty, suggestions can be asked for."""
    label = "Compared with another prompt (optional)"
    other = typed(st.text_input, label, "counterfactual", value=default) or None
    if other is None and isinstance(read_prompt(prompt), str):
        _suggested(prompt)
    return other


def _suggested(prompt: str) -> None:
    """On a click three prompts, of which one is taken by another click."""
    if st.button("Suggest a comparison", key="suggest", icon=":material/compare_arrows:"):
        from icebear.concepts.attribution.counterfactuals import suggest_counterfactuals

        st.session_state["suggested"] = (prompt, suggest_counterfactuals(model(), prompt))
    suggested_for, rows = st.session_state.get("suggested", (None, []))
    if suggested_for != prompt:
        return
    if not rows:
        st.caption("No prompt of as many tokens has another answer; write one.")
    answers = {row.text: f"{plain(row.text)} → {token_label(row.answer)} {row.probability:.2f}" for row in rows}

    def take() -> None:
        st.session_state["counterfactual"] = st.session_state["suggestion"] or ""

    st.pills("Compare with", list(answers), format_func=answers.__getitem__, key="suggestion", on_change=take)


def forget_other() -> None:
    """For callbacks of another prompt than the example."""
    if st.session_state.get("counterfactual") == OTHER:
        st.session_state["counterfactual"] = ""


def go(view: str, **values: str) -> None:
    """For callbacks: show `view` with these values typed in."""
    for key, value in values.items():
        st.session_state[key] = value
    if view != st.session_state["view"]:
        st.switch_page(page(view), query_params=values)


def to_steer(neuron: Neuron | str, **values: str) -> None:
    """For callbacks: add an edit that switches the neuron off, and show the steering view with these values."""
    lines = st.session_state.get("edits", "")
    go("steer", edits=f"{lines.rstrip()}\n{neuron}*0".strip(), **values)


def neuron_pills(label: str, found: Iterable[tuple[Neuron, str]], key: str) -> None:
    """Neurons with a polarity, if they have one, to click on, which opens their card."""

    def open_card() -> None:
        if st.session_state[key]:
            neuron, _, polarity = st.session_state[key].partition(" ")
            st.session_state[key] = None
            go("neuron", neuron=neuron, polarity=polarity or "+")

    names = list(dict.fromkeys(f"{neuron} {polarity}".strip() for neuron, polarity in found))
    st.pills(label, names, key=key, on_change=open_card)


def heat(relevance: Relevance, answer: bool = False) -> None:
    """The tokens on the colours of their relevance; answer: then what is explained."""
    tokens = relevance_heatmap(relevance)
    if answer:
        st.html(ANSWER.format(tokens, relevance.target_text))
    else:
        st.html(HEAT.format(tokens))


def why_heading(relevance: Relevance) -> None:
    """What is asked, as a heading."""
    against = f" rather than {token_label(relevance.contrast_text)}" if relevance.contrast_text else ""
    st.markdown(f"#### Why {token_label(relevance.target_text)}{against}?")


def investigation(relevance: Relevance, ranking: Ranking) -> Explanation:
    """The nodes of a relevance with their words, and their labels where there is a store."""
    from icebear.actmax.explanation import Explanation

    with st.skeleton(height=240), ExitStack() as stack:
        opened = stack.enter_context(store()) if has_labels() else None
        return Explanation.of(model(), relevance, ranking, store=opened)


def node_table(explanation: Explanation, key: str, columns: Sequence[str], **options: Any) -> pandas.DataFrame:
    """The nodes of an explanation as a table whose rows open cards; returns what it shows."""
    rows = [node.ranked for node in explanation.nodes]
    heads = any(row.neuron.site == "head" for row in rows)
    labelled = any(node.label for node in explanation.nodes)
    apart = {"activation", "counterfactual"} if heads else set()
    table = explanation.to_frame()
    shown = [name for name in (*columns, *(["label"] if labelled else [])) if name in table and name not in apart]
    table = table[shown].rename(columns=HEADS)
    if heads:
        st.dataframe(table, hide_index=True, column_config=NUMBERS, **options)
    else:
        st.caption("Click a row for the neuron's card.")
        opens = [(row.neuron, row.polarity) for row in rows]
        neuron_table(table, key, opens.__getitem__, column_config=NUMBERS, **options)
    return table


def neuron_table(
    table: pandas.DataFrame,
    key: str,
    opens: Callable[[int], tuple[Any, str]],
    sorts: bool = False,
    **options: Any,
) -> None:
    """A table of neurons. A click on a row opens the card of the neuron and polarity that `opens` tells of the row.

    sorts: a click on a column's head sorts by it; then only a row's box opens a card, as such a click is one on a cell.
    """

    def open_card() -> None:
        chosen = st.session_state[key]["selection"]
        rows = [*chosen["rows"], *(row for row, _ in chosen["cells"])]
        if rows:
            neuron, polarity = opens(rows[0])
            go("neuron", neuron=str(neuron), polarity=polarity or "+")

    # Where columns can be chosen, which means nothing here, their heads do not sort.
    modes: list[Any] = ["single-row"] if sorts else ["single-row", "single-cell", "single-column"]
    st.dataframe(table, hide_index=True, key=key, on_select=open_card, selection_mode=modes, **options)


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
