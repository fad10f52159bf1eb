"""What the views share: model and index, the URL, tables of neurons, and moving between views."""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas
import streamlit as st
from markupsafe import Markup
from streamlit.errors import StreamlitAPIException
from streamlit.runtime.scriptrunner import get_script_run_ctx

from icebear.app.web.shared import background
from icebear.app.web.shared.background import STOPPED, Job, shared
from icebear.concepts.results.effect_words import BY_LENS, IN_PROMPT
from icebear.db.store import Store, open_store
from icebear.errors import IcebearError, StoreError
from icebear.models.text.chat import Chat
from icebear.records import Neuron
from icebear.render import relevance_heatmap, visible

if TYPE_CHECKING:
    from streamlit.navigation.page import Page

    from icebear.concepts.results.ranking import Ranking
    from icebear.concepts.results.result import Relevance
    from icebear.explanation.explanation import Explanation, Grouped
    from icebear.models.model import Model


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
    "steer": View("Concepts & steering", "steering.sections"),
}
"""The URL of a view -> the view; the first one is at the root."""
LIGHT = ("why",)
"""Views that can be shown without torch."""
LINK = 6000
"""The longest conversation that goes into a link, in characters."""
SIGNED = st.column_config.NumberColumn(format="%+.3f")
PERCENT = st.column_config.NumberColumn(format="%.1f%%")
FORMATS: dict[str, Any] = {
    "relevance": SIGNED,
    "activation": SIGNED,
    "counterfactual": st.column_config.NumberColumn("value in the counterfactual", format="%+.3f"),
    "label": st.column_config.TextColumn(width=380),
}
"""How columns of tables of neurons are shown."""
COMMAND = re.compile(r"(^|\W)--[a-z]|\bicebear [a-z]")
"""What only a command line knows."""
QUICK = 0.3
"""Seconds before progress is shown."""
POLL = 0.5
"""Seconds between two looks at a job that the page does not wait for."""
ROWS = 10
"""Rows that a table shows before it scrolls."""
HEAT = Markup('<div class="heat">{}</div>')
ANSWER = Markup('<div class="heat answer">{}<b>&rarr; {}</b></div>')


def page(view: str) -> Page:
    """Return a view as a page of Streamlit's navigation; its code is imported when it is first shown."""

    def show() -> None:
        lock = nullcontext() if view in LIGHT else background.importing
        with st.skeleton(height=400), lock:  # the first import of torch takes seconds
            code = importlib.import_module(f"icebear.app.web.{VIEWS[view].module}")
        st.session_state["drawn"] = set()
        code.show()

    return st.Page(show, title=VIEWS[view].title, url_path=view, default=view == next(iter(VIEWS)))


# --- model and index ------------------------------------------------------------------------------------


def settings() -> dict[str, Any]:
    """Return the index's path and the arguments of `load_model` that `icebear app` was started with."""
    return {"store": "icebear.db", "model": "smollm2-135m", **json.loads(os.environ.get("ICEBEAR_APP", "{}"))}


def _model_settings() -> dict[str, Any]:
    return {name: value for name, value in settings().items() if name not in ("store", "base_model")}


def model_name() -> str:
    return settings()["model"]


def base_name() -> str | None:
    return settings().get("base_model")


def a_neuron() -> str:
    """Return the neuron that views show first; in the default model it fires on the ice bear."""
    return "L29.ffn.860" if model_name() == "smollm2-135m" else "L0.ffn.0"


@st.cache_resource(show_spinner=False)
def _load(model: str, **options: Any) -> Job:
    return background.loading(model, **options)


def loading(name: str | None = None) -> Job:
    """Return the job that loads, or has loaded, a model of all visitors: the named one, or the one to explain."""
    options = {**_model_settings(), "model": name or model_name()}
    if _load(**options).error:
        _load.clear(**options)  # to try again
    job = shared().loads[json.dumps(options)] = _load(**options)
    return job


def loaded(opened: Store) -> Model | None:
    """Return the model if it is loaded already, and the index is of this model."""
    job = shared().loads.get(json.dumps(_model_settings()))
    if job and job.result:
        with suppress(StoreError):
            opened.check(job.result.fingerprint, job.result.name)
            return job.result
    return None


def model() -> Model:
    """Return the model that all visitors share; the page waits until it is loaded."""
    return waited(loading())


def base_model() -> Model:
    """Return the base model that all visitors share, loaded as the model is."""
    return waited(loading(base_name()))


def waited(job: Job, stops: bool = False) -> Any:
    """Return the job's result. Until then the page shows the progress, and any click ends this run."""
    place = st.empty()
    if visitor() in job.left and not job.stopped:  # others wait for it
        job.left.discard(visitor())
        raise IcebearError(STOPPED)
    job.enter(visitor())
    job.join(QUICK)
    if job.is_alive():
        with place.container():
            bar = st.progress(0.0)
            if stops:
                _stop(job)
            st.skeleton(height=240)
        while job.is_alive():
            bar.progress(job.share, f"{plain(doing(job))} ...")
            job.join(0.2)
        place.empty()
    return job.outcome()


def is_done(job: Job) -> bool:
    """Return whether a job has a result, perhaps the first part of it; until then show its progress with Stop, while
    the page goes on, or why it has none."""
    if job.result is not None:
        return True
    if is_awaited(job):
        watched(job)
    elif job.is_alive() or job.error:
        st.info(message(job.error or STOPPED))
    else:
        return True
    return False


def is_awaited(job: Job) -> bool:
    """Return whether a job works for this visitor."""
    return job.is_alive() and visitor() not in job.left


@st.fragment(run_every=POLL)
def watched(job: Job, draw: Callable[[Any], None] | None = None) -> None:
    """Show what there is of the result, and the progress with Stop; at the end the page is drawn again.

    draw: shows a part of the result; without it the page is drawn again as soon as there is one.
    """
    if not is_awaited(job) or not (draw or job.result is None):
        st.rerun()
    job.enter(visitor())
    if draw:
        draw(job.result)
    st.progress(job.share, f"{plain(doing(job))} ...")
    _stop(job)


def _stop(job: Job) -> None:
    st.button("Stop", key=f"stop {job.name}", on_click=job.leave, args=(visitor(),))


def visitor() -> str:
    """Return the id of this visitor's session."""
    context = get_script_run_ctx()
    return context.session_id if context else ""


def doing(job: Job) -> str:
    """Return what the job is doing; a model works for one visitor at a time."""
    loads = list(shared().loads.values())
    if any(load.result and job.ident and load.result.lock.is_waiting(job.ident) for load in loads):
        return "Waiting for another tab"
    return job.doing


def computed(what: str, make: Callable[[], Any]) -> Any:
    """Return the result of `make`, in a thread that Stop, any other click, and leaving the page end."""
    job = Job(what, lambda _: make())
    try:
        return waited(job, stops=True)
    finally:
        job.stop()


def awaited(start: Any, *request: Any, stops: bool = False) -> Any:
    """Wait for the job that `start`, a cached function, returns. After an error it is started again the next time."""
    job = start(*request)
    try:
        return waited(job, stops)
    finally:
        if job.error:
            start.clear(*request)


@contextmanager
def progress(text: str) -> Iterator[Callable[[int, int], Any]]:
    """Show a progress bar and yield the function that moves it; any click ends this run at its next step."""
    place = st.empty()
    with place.container():
        bar = st.progress(0.0, text)
        st.button("Stop", key=f"stop {text}")
    yield lambda done, total: bar.progress(min(1.0, done / max(total, 1)), text)
    place.empty()


def named_store() -> Path:
    return Path(settings()["store"])


def store_path(site: str | None = None) -> Path:
    """Return the path of the named index; while it is missing or unfinished, of a small one in the cache.

    site: that the index must have; if none has it, the path is of the named one.
    """
    if _has(named_store(), site):
        return named_store()
    return next((path for path in background.small_index(model_name()) if _has(path, site)), named_store())


def _has(path: Path, site: str | None) -> bool:
    facts = background.index_facts(path)
    return bool(facts) and site in (None, *facts["sites"])


@contextmanager
def store(site: str | None = None) -> Iterator[Store]:
    """Open the index for this run of the script. Raises `StoreError` if there is none."""
    with open_store(store_path(site)) as opened:
        yield opened


def has_store(site: str | None = None) -> bool:
    """Return whether cards can be read. Raises `StoreError` if the named file is something else."""
    return _has(store_path(site), site)


def has_labels() -> bool:
    """Return whether labels can be read; the views that need an index report its errors."""
    with suppress(IcebearError):
        return has_store()
    return False


def fitting(opened: Store) -> Model:
    """Return the model, if the index is of this model. Raises `StoreError` otherwise."""
    loaded = model()
    opened.check(loaded.fingerprint, loaded.name)
    return loaded


# --- the URL --------------------------------------------------------------------------------------------


def typed(widget: Callable, label: str, key: str, *args: Any, **options: Any) -> Any:
    """Draw a widget whose value is in the URL, and persists while other views are shown."""
    st.session_state["drawn"].add(key)
    return widget(label, *args, key=key, bind="query-params", persist_state="session", **options)


def from_url(key: str) -> str | None:
    """Return a part of the URL that no widget shows. It persists while other views are shown, or if it is too long."""
    value = st.session_state.get(key)
    if key in st.query_params:
        value = st.query_params[key]
    elif not st.session_state["came"] and len(value or "") <= LINK:
        value = None  # as by the button that goes back
    to_url(**{key: value})
    return value


def to_url(**values: str | None) -> None:
    """Set parts of the URL in one step."""
    st.session_state.update(values)
    short = {key: value for key, value in values.items() if value and len(value) <= LINK}
    for key in values:
        if key not in short:
            st.query_params.pop(key, None)
    changed = {key: value for key, value in short.items() if st.query_params.get(key) != value}
    if changed:  # each update is a step of the browser's Back
        st.query_params.update(changed)


def fill(**values: str) -> None:
    """Type values into widgets of `typed`, whether the page draws them now or only in its next run; for callbacks."""
    st.session_state.update(values)
    for key, value in values.items():
        with suppress(StreamlitAPIException):  # a widget that is drawn now writes the URL itself
            to_url(**{key: value})


def go(view: str, **values: str) -> None:
    """Show `view` with these values typed in; for callbacks."""
    st.session_state.update(values)
    if VIEWS[view].title != st.session_state["view"]:
        _switch(view, values)


def _switch(view: str, values: dict[str, str]) -> None:
    """Switch to a view, with these values in the URL; a widget that is drawn now writes its own."""
    drawn = st.session_state["drawn"]
    st.switch_page(page(view), query_params={key: value for key, value in values.items() if key not in drawn})


def open_card(neuron: str, polarity: str = "") -> None:
    """Show the card of a neuron at a polarity, of its strongest sentence if it has none; for callbacks."""
    values = {"neuron": neuron, "polarity": polarity or _strongest_side(Neuron.parse(neuron))}
    st.session_state.update(values)
    title = st.session_state["view"]
    if title != VIEWS["neurons"].title:
        view = next(name for name in VIEWS if VIEWS[name].title == title)
        st.session_state["card_from"] = (view, None if view == "chat" else st.session_state.get("prompt"))
    if values["polarity"] == "+":
        del values["polarity"]  # the default is not in the URL; a second change of it would be a second step back
    _switch("neurons", values)


def _strongest_side(neuron: Neuron) -> str:
    """Return the polarity of the sentence with the largest absolute activation; + without an index."""
    if not has_store(neuron.site):
        return "+"
    with store(neuron.site) as opened:
        strongest = [(abs(one.value), side) for side in "+-" for one in opened.examples(neuron, side, 1)]
    return max(strongest, default=(0, "+"))[1]


def to_steer(neuron: Neuron | str, **values: str) -> None:
    """Add an edit that switches the neuron off, and show the steering view with these values; for callbacks."""
    lines = st.session_state.get("edits", "")
    go("steer", section="edits", edits=f"{lines.rstrip()}\n{neuron}*0".strip(), **values)


# --- prompts --------------------------------------------------------------------------------------------


def read_prompt(text: str) -> str | Chat:
    """Return a text as it is, and the messages of a chat as JSON as a `Chat`. Raises `InputError`."""
    return Chat.from_json(text, "The prompt") if re.match(r'\s*\[\s*{\s*"role"', text) else text


# --- what is shown --------------------------------------------------------------------------------------


def heat(relevance: Relevance, answer: bool = False) -> None:
    """Show the tokens, shaded by their relevance; answer: followed by the target."""
    tokens = relevance_heatmap(relevance)
    st.html(ANSWER.format(tokens, relevance.target_text) if answer else HEAT.format(tokens))


def target_label(relevance: Relevance) -> str:
    """Return the target, and the contrast if there is one, as Markdown."""
    contrast = f" rather than {word(relevance.contrast_text)}" if relevance.contrast_text else ""
    return word(relevance.target_text) + contrast


def explanation_of(relevance: Relevance, ranking: Ranking) -> Explanation:
    """Return the nodes of a relevance with their effects, and with their labels if there is an index."""
    from icebear.explanation.explanation import Explanation

    with st.skeleton(height=240), store() if has_labels() else nullcontext() as opened:
        return Explanation.of(model(), relevance, ranking, store=opened)


def grouped(relevance: Relevance, site: str) -> Grouped:
    """Return the groups of the nodes of a site, measured once for all visitors."""
    from icebear.explanation.explanation import explain_groups

    known = shared().groups.setdefault(relevance, {})
    if site not in known:
        shown = model()
        what = "Measuring what groups of neurons do to the next word"
        known[site] = computed(what, lambda: explain_groups(shown, relevance, site))
    return known[site]


def with_groups(explanation: Explanation) -> Explanation:
    """Return the explanation with the groups of its nodes, if they were measured."""
    known = shared().groups.get(explanation.relevance, {})
    together, groups = known.get(explanation.ranking.site or "ffn", (None, ()))
    return replace(explanation, together=together, groups=groups)


def node_table(explanation: Explanation, key: str, columns: Sequence[str], **values: str) -> None:
    """Show the nodes of an explanation with these columns and their words.

    values: typed into the steering view when the first neuron is sent there.
    """
    table = explanation.to_frame().rename(columns={"polarity": "sign"})
    words = ("raises", "lowers") if explanation.effects else ("promotes",)
    joined = {name: table[name].map(", ".join) for name in ("raises", "lowers")}
    table = table.assign(label=table["label"].fillna(""), **joined)
    columns = (*columns, *words)
    if any(node.ranked.neuron.site == "head" for node in explanation.nodes):
        apart = {"activation", "counterfactual"}
        shown = [name for name in columns if name in table and name not in apart]
        data_table(table, column_order=shown, column_config=FORMATS)
    else:
        shown = [*columns, *(["label"] if table["label"].any() else [])]
        neuron_table(table, key, column_order=shown)
    if explanation.effects:
        st.caption(f"Raises, lowers: {IN_PROMPT.lower()}, each node alone, among the likely next words.")
    else:
        st.caption(f"Promotes: {BY_LENS['direct'][0].lower()}{BY_LENS['direct'][1:]}.")
    first = explanation.nodes[0].ranked.neuron
    with st.container(horizontal=True):
        whole = partial(with_groups, explanation)  # when it is downloaded
        downloads(key, {"html": lambda: whole().to_html(), "json": lambda: whole().to_json()})
        st.button(
            f"Switch off {first} in {VIEWS['steer'].title}",
            key=f"{key}_steer",
            on_click=to_steer,
            args=(first,),
            kwargs=values,
        )


def neuron_table(table: pandas.DataFrame, key: str, sorts: bool = False, labels: bool = False, **options: Any) -> None:
    """Show a table of neurons. A click on a row opens the card of the neuron in its columns neuron and sign.

    sorts: a click on a column's header sorts by it; then only a row's box opens a card. labels: add the labels of the
    index, if it has any.
    """

    def open_chosen() -> None:
        chosen = st.session_state[key]["selection"]
        rows = [*chosen["rows"], *(row for row, _ in chosen["cells"])]
        if rows:
            row = table.iloc[rows[0]]
            open_card(row["neuron"], row["sign"])

    if labels and has_labels():
        with store() as opened:
            pairs = zip(table["neuron"], table["sign"], strict=True)
            names = [opened.labels.name(Neuron.parse(neuron), sign) or "" for neuron, sign in pairs]
        table = table.assign(label=names) if any(names) else table
    st.caption("Tick a row for the neuron's card." if sorts else "Click a row for the neuron's card.")
    # Where columns can be chosen, which means nothing here, their heads do not sort.
    modes: list[Any] = ["single-row"] if sorts else ["single-row", "single-cell", "single-column"]
    formats = FORMATS | options.pop("column_config", {})
    data_table(table, key=key, on_select=open_chosen, selection_mode=modes, column_config=formats, **options)


def data_table(
    table: pandas.DataFrame,
    rows: int = ROWS,
    *,
    shares: Sequence[str] = (),
    column_config: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Show a table of at most `rows` rows at a time; a longer one shows half of the next row, and scrolls.

    The columns `shares` are shown in percent, with one decimal.
    Without a height, what is below the table would move, perhaps under a click, when the browser has loaded its code.
    """
    height = int(35 * (1 + max(1, min(len(table), rows + 0.5)))) + 2
    percents = {name: (100 * table[name]).round(1) + 0.0 for name in shares}  # -0.0 + 0.0 is 0.0
    formats = {**(column_config or {}), **dict.fromkeys(shares, PERCENT)}
    st.dataframe(table.assign(**percents), hide_index=True, height=height, column_config=formats, **options)


def neuron_pills(label: str, pairs: Iterable[tuple[Neuron, str]], key: str) -> None:
    """Show neurons with a polarity, if they have one; a click on one opens its card."""

    def open_chosen() -> None:
        if st.session_state[key]:
            neuron, _, polarity = st.session_state[key].partition(" ")
            st.session_state[key] = None
            open_card(neuron, polarity)

    names = list(dict.fromkeys(f"{neuron} {polarity}".strip() for neuron, polarity in pairs))
    st.pills(label, names, key=key, on_change=open_chosen)


def plain(text: str) -> str:
    """Escape a text that Streamlit would read as Markdown."""
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", text.replace("\n", " "))


def message(error: object) -> str:
    """Return an error in Markdown, without the parts that are about the command line."""
    parts = re.split(r"(?<=[.;?]) ", str(error))
    useful = [part for part in parts if not COMMAND.search(part)]
    return plain(re.sub(r";$", ".", " ".join(useful or parts)))


def token_label(text: str) -> str:
    """Return a token with visible spaces and escaped Markdown."""
    return plain(visible(text.replace(" ", "␣")))


def word(text: str) -> str:
    """Return a token without the space before it, as Markdown."""
    return token_label(text.strip() or text)


def into_view(key: str, result: object) -> None:
    """Scroll to the container with this key when its result is new, unless it is in view."""
    look = f"setTimeout(() => document.querySelector('.st-key-{key}')?.scrollIntoView({{block: 'nearest'}}), 300)"
    st.html(f"<script>{look}  // {hash(str(result))}</script>", unsafe_allow_javascript=True)


def downloads(name: str, files: dict[str, Callable[[], str | bytes]]) -> None:
    """Offer files for download. files: suffix -> the function that makes the file, called on the click."""
    with st.popover("Download", icon=":material/download:"):
        for suffix, make in files.items():
            st.download_button(suffix.upper(), make, f"{name}.{suffix}", key=f"{name}.{suffix}", on_click="ignore")
