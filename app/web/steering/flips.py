"""A flip: few edits that make another word the answer. Found in the background, shown beside random edits, and filled
in as it is measured."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from statistics import fmean
from typing import Any

import pandas
import streamlit as st
from markupsafe import Markup

from icebear.app.web.shared import jobs, links, markdown, tables
from icebear.app.web.shared.background_job import STOPPED, Job
from icebear.app.web.shared.bars import word_bars
from icebear.concepts.results.effect_words import IN_PROMPT
from icebear.models.model import Model
from icebear.models.text.prompts import PromptLike
from icebear.recipe import Recipe
from icebear.records import RandomControl
from icebear.steering.flipping.flip import flip
from icebear.steering.outcome import outcomes
from icebear.steering.provenance import FlipRecord, Outcome

MOST = 10
"""Edits at most, unless another number is chosen."""
SEARCH = 0.6
"""The share of the time that the search takes; measuring takes the other."""
SIDE = Markup(
    "<style>mark{{background:rgba(230,180,40,.3);color:inherit;border-radius:.2em}}</style>"
    '<div dir="auto" style="white-space:pre-wrap;overflow-wrap:anywhere"><span style="opacity:.75">{}</span>{}</div>'
)

Wanted = tuple[str, str, str, str | None, int, bool]
"""The arguments of `started`."""


@st.cache_resource(max_entries=64, show_spinner=False)
def started(
    name: str, prompt: str, to: str, source: str | None, most: int, unbounded: bool, _recipe: Recipe | None = None
) -> Job:
    """Return the job that finds and measures a flip, or has done so, for all visitors; its result is a recipe that
    `show` takes, which has more and more of its outcome.

    to: the word or phrase that the model should say; without its space, the one with it is taken where it is more
    probable. source: a prompt after which the model says it. most: the largest number of edits. _recipe: the flip, if
    it is known.
    """
    loading = jobs.model_job()

    def work(job: Job) -> Recipe:
        job.result, model = _recipe, loading.outcome()
        recipe = _recipe or _searched(job, model, markdown.read_prompt(prompt), to, source, most, unbounded)
        return _measured(job, model, recipe)

    return Job("Searching for edits", work)


def resume(wanted: Wanted) -> None:
    """Start the job again if it was stopped or failed; it measures a flip that is known already."""
    job = started(*wanted)
    job.left.discard(jobs.visitor())
    if job.error:
        started.clear(*wanted)
        started(*wanted, job.result)


def show_progress_or_flip(wanted: Wanted) -> None:
    """Show a flip as soon as it is found, and what is measured of it; until then the progress, or why there is none."""
    if started(*wanted).abandoned:
        resume(wanted)
    job = started(*wanted)
    if jobs.show_until_done(job):
        show(job.result, wanted)
    elif not jobs.works_for_visitor(job):
        st.button("Search again", key="search_again", on_click=resume, args=(wanted,))


def _searched(
    job: Job, model: Model, prompt: PromptLike, to: str, source: str | None, most: int, unbounded: bool
) -> Recipe:
    def step(done: int, total: int) -> None:
        job.doing = f"Searching for edits: {done} of at most {total}"
        job.step(SEARCH * done, total)

    read = markdown.read_prompt(source) if source else None
    return flip(model, prompt, to, read, most, on_progress=step, unbounded=unbounded)


def _measured(job: Job, model: Model, recipe: Recipe) -> Recipe:
    def step(done: int, total: int) -> None:
        job.step(SEARCH * total + (1 - SEARCH) * done, total)

    for outcome in outcomes(model, recipe, on_progress=step):
        job.doing = "Writing both texts" if outcome.edited is None else "Measuring side effects"
        job.result = recipe.noting(**outcome.provenance())
        if not recipe:
            break
    return job.result


def show(recipe: Recipe, wanted: Wanted | None = None) -> None:
    """Show a flip: both texts, both words' probabilities, side effects, random edits and the edits.

    recipe: a result of `started`, or saved from it; the model is not needed. wanted: where it is not from a file.
    """
    outcome, record = Outcome.of(recipe), FlipRecord.of(recipe)
    if outcome is None or record is None:
        st.info("This recipe was not made by a flip, so nothing is known about its effect.")
        return
    old, new = markdown.word(record.before[0].text), markdown.word(record.text)
    if not recipe:
        st.info(f"The model says {new} already; no edit is needed.")
        return
    edits = f"{len(recipe)} edit{'s make' if len(recipe) > 1 else ' makes'}"
    st.markdown(f"## {edits} the model say {new} instead of {old}")
    if wanted and jobs.works_for_visitor(started(*wanted)):
        jobs.show_progress(started(*wanted), _outcome)
    else:
        _outcome(recipe)
        if wanted and outcome.off_target_kl is None:
            st.info(markdown.message(started(*wanted).error or STOPPED))
            st.button("Measure the rest", key="flip_measure", on_click=resume, args=(wanted,))
    pairs = [(edit.neuron, edit.polarity) for edit in recipe.neuron_edits()]
    about = "The edited neurons (+ set to a positive value, - to a negative one)"
    swaps = all(edit.source is not None for edit in recipe.neuron_edits())
    tables.neuron_pills("The swapped heads" if swaps else about, pairs, "flip_neurons")
    with st.expander("What each edit does"):
        _edits(recipe, record)
    with st.container(horizontal=True):
        st.button("Edit these", icon=":material/tune:", key="flip_edit", on_click=edit, args=(recipe,))
        name, kind = "recipe.json", "application/json"
        st.download_button("Save recipe", recipe.to_json(), name, kind, key="flip_save", on_click="ignore")


def edit(recipe: Recipe) -> None:
    """Show a recipe's edits and what they do, after its prompt if it has one, in the steering view; for callbacks."""
    values = {"section": "edits", "run": "edits", "edits": "\n".join(map(str, recipe.neuron_edits()))}
    prompt, record = prompt_of(recipe), FlipRecord.of(recipe)
    if prompt:
        values["prompt"] = prompt
    st.session_state.pop("edits result", None)
    rows = record.neurons if record else ()
    st.session_state["edit_words"] = {row.neuron: f"raises {', '.join(row.raises)}" for row in rows if row.raises}
    links.fill(**values)
    links.go("steer", **values)


def prompt_of(recipe: Recipe) -> str | None:
    """Return the prompt that a recipe was made or saved with, a chat as JSON; None if there is none."""
    record = FlipRecord.of(recipe)
    prompt = record.prompt if record else recipe.provenance.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        return markdown.prompt_text(prompt)
    return prompt if isinstance(prompt, str) else None


def _outcome(recipe: Recipe) -> None:
    """Show what is measured of a flip, and what is not."""
    outcome, record = Outcome.of(recipe), FlipRecord.of(recipe)
    assert outcome
    assert record
    if outcome.plain is None or outcome.edited is None:
        st.caption("Both texts: not written yet.")
    else:
        both_texts(record.prompt, outcome.plain, outcome.edited)
    old = {record.before[0].text: outcome.old} if outcome.old else {}
    probabilities({**old, record.text: outcome.control})
    measured(outcome)


def measured(outcome: Outcome) -> None:
    """Say what edits do, with random edits, and their side effects."""
    st.markdown("\n".join(f"- {markdown.plain(line)}" for line in (outcome.control_text, outcome.side_effects_text)))


def probabilities(words: Mapping[str, RandomControl]) -> None:
    """Show the probabilities of words as bars: without edits, with them, and with random edits, if there are any."""
    columns = {
        "without edits": {word: control.before for word, control in words.items()},
        "with edits": {word: control.after for word, control in words.items()},
    }
    if all(control.drawn for control in words.values()):
        columns["random edits (mean)"] = {word: fmean(control.drawn) for word, control in words.items()}
    st.caption("The next word")
    st.html(word_bars(columns))


def _edits(recipe: Recipe, record: FlipRecord) -> None:
    """Show a table of the edits, with the words that each of them alone raises and lowers."""
    neurons = {row.neuron: row for row in record.neurons}
    rows: list[dict[str, Any]] = []
    for edit in recipe.neuron_edits():
        row = neurons.get(edit.neuron)
        rows.append({"neuron": str(edit.neuron), "sign": edit.polarity})
        if edit.source is None:
            rows[-1] |= {"value": row and row.activation, "set to": edit.value}
        rows[-1]["at"] = edit.where
        if row:
            rows[-1] |= {"alone": row.alone, "raises": ", ".join(row.raises), "lowers": ", ".join(row.lowers)}
    formats = {name: st.column_config.NumberColumn(format="%+.2f") for name in ("value", "set to")}
    formats["alone"] = st.column_config.NumberColumn(format="%.3f")
    order = [name for name in rows[0] if name != "sign"]
    alone = f"Alone: the probability of {markdown.word(record.text)} with this edit alone."
    st.caption(f"{alone} Raises, lowers: {IN_PROMPT.lower()}, each edit alone, among the likely next words.")
    tables.neuron_table(pandas.DataFrame(rows), "flip_edits", column_order=order, column_config=formats)


def both_texts(prompt: Any, plain: str, edited: str) -> None:
    """Show both continuations, with marks on the words that only one of them has."""
    if not isinstance(prompt, str):
        prompt = "".join(f"{message['role']}: {message['content']}\n" for message in prompt) + "assistant: "
    names = ("without edits", "with edits")
    for column, name, html in zip(st.columns(2), names, differences(plain, edited), strict=True):
        with column.container(border=True, height="stretch"):
            st.caption(name)
            st.html(SIDE.format(prompt, html))


def differences(plain: str, edited: str) -> tuple[Markup, Markup]:
    """Return both texts as HTML, with marks on the words that only one of them has."""
    words = [re.findall(r"\s*\S+|\s+", text) for text in (plain, edited)]
    out: tuple[list[Markup], list[Markup]] = ([], [])
    for same, *bounds in difflib.SequenceMatcher(None, words[0], words[1], autojunk=False).get_opcodes():
        for side, (start, stop) in enumerate((bounds[:2], bounds[2:])):
            text = "".join(words[side][start:stop])
            space, word = text[: len(text) - len(text.lstrip())], text.lstrip()
            out[side].append(Markup("{}<mark>{}</mark>" if word and same != "equal" else "{}{}").format(space, word))
    return Markup().join(out[0]), Markup().join(out[1])
