"""Edit neurons: the text without and with edits, and a line for each edit."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import streamlit as st

from icebear.app.recipes import EXAMPLE_RECIPE
from icebear.app.web import neuron_card
from icebear.app.web.shared import counterfactuals, jobs, links, markdown, pictures, question, served
from icebear.app.web.shared.background_job import Job
from icebear.app.web.steering import flips
from icebear.edits import SYMBOLS, TOKEN_GROUPS, Edit, parse_edits
from icebear.errors import InputError
from icebear.models.text.chat import Chat
from icebear.recipe import Recipe
from icebear.steering.comparison import Comparison, compare
from icebear.steering.outcome import answer_outcomes
from icebear.steering.provenance import Outcome
from icebear.values import plural

UNITS = {"": "raw", "max": "times its max", "std": "times its std"}
RANGES = {"": 60.0, "max": 3.0, "std": 10.0}
WHERE = {
    "all": "everywhere",
    "prompt": "in the prompt",
    "last": "at the last token",
    "generated": "at new tokens",
    "answer": "from the last token on",
}
SYNTAX = """\
- `L29.ffn.860*0` multiplies the activation by 0, which switches the neuron off
- `L29.ffn.860=-20` sets it to -20
- `L24.ffn.559+2std` adds 2 standard deviations (or `max`: times its largest activation; both need an index)
- `L23.head.4<-"The capital of Italy is"` sets a head or a neuron to its value after another prompt
- `@last`, `@prompt`, `@generated` or `@answer` after it limits the tokens that are edited"""


def show() -> None:
    prompt = links.bound(
        st.text_area, "Prompt", "prompt", value=question.PROMPT, height=80, on_change=counterfactuals.forget
    )
    with st.container(horizontal=True):
        pressed = st.button("Generate", type="primary", icon=":material/play_arrow:", key="generate")
        with st.popover("Settings", icon=":material/tune:"):
            count = links.bound(st.number_input, "New tokens", "tokens", 1, 400, 24)
            temperature = links.bound(
                st.number_input, "Temperature", "temperature", 0.0, 5.0, 0.0, 0.1, help="0: greedy"
            )
            seed = links.bound(st.number_input, "Seed", "seed", 0, 2**31, 0, disabled=not temperature)
        _recipes()
    result_place = st.container()
    edits = _edits()
    raw = in_raw_units(edits)
    settings = (served.model_name(), prompt, tuple(map(str, edits)), count, temperature, seed)
    _export(prompt, edits, *settings[3:])
    with result_place:
        if raw:
            _live(served.model_name(), prompt, tuple(raw))
        result = result_on_press("edits", settings, pressed, lambda: _generate(prompt, raw, *settings[3:]))
        if result:
            flips.both_texts(result.prompt, result.plain.text, result.steered.text)
            download(result)


def _recipes() -> None:
    with st.popover("Recipes", icon=":material/menu_book:"):
        st.button(
            "Make the ice bear live in the desert",
            key="example_recipe",
            on_click=lambda: flips.edit(Recipe.load(EXAMPLE_RECIPE)),
        )
        uploaded = st.file_uploader("A saved recipe", "json", key="uploaded")
        if uploaded:
            recipe = Recipe.from_json(uploaded.getvalue().decode("utf-8", errors="replace"))
            recipe.check(jobs.model())
            recipe.neuron_edits()  # raises for a vector, which has no line here
            st.button(f"Use {markdown.plain(recipe.name)}", key="use_recipe", on_click=flips.edit, args=(recipe,))


# --- the edits ------------------------------------------------------------------------------------------


def _edits() -> list[Edit]:
    """Show a line for each edit, with its controls folded, and the edits as text."""
    lines = st.container(gap="xxsmall")
    written = links.bound(st.text_area, "Edits, one a line", "edits", height=120, placeholder="L29.ffn.860=-20")
    st.caption(SYNTAX)
    edits = parse_edits((line for line in written.splitlines() if line.strip()), served.model_name())
    with lines:
        if edits:
            st.markdown(f"## {plural(len(edits), 'edit')}")
        for number, edit in enumerate(edits):
            with st.container(horizontal=True, wrap=False, vertical_alignment="center", gap="small"):
                card: dict[str, Any] = {
                    "on_click": links.open_card,
                    "args": (str(edit.neuron), edit.polarity),
                    "type": "tertiary",
                }
                st.button(f"**{edit.neuron}**", help="Its card", key=f"card {number}", **card)
                st.markdown(sentence(edit), width="stretch")
                with st.popover("Edit", type="tertiary", width=96):
                    _controls(edits, number)
                remove: dict[str, Any] = {"on_click": _write, "args": (edits, number, None), "type": "tertiary"}
                key = f"remove {number} {edit}"
                st.button("", icon=":material/close:", help="Remove this edit", key=key, **remove)
            with st.container(horizontal=True, vertical_alignment="center"):
                _strength(edits, number)
                st.caption(_about(edit))
    return edits


def _about(edit: Edit) -> str:
    """Return the words of an edit, as Markdown: those that the flip that it is from raises by it; else the neuron's
    label, or the tokens at which it is strongest, of the index."""
    words = st.session_state.get("edit_words", {}).get(edit.neuron)
    if words or not served.has_store(edit.neuron.site):
        return markdown.plain(words or "")
    with served.store(edit.neuron.site) as opened:
        neuron_card.check(opened, edit.neuron)
        side = "+" if edit.neuron.site == "head" else edit.polarity
        label = opened.labels.shown(edit.neuron, side)
        return markdown.plain(label) if label else neuron_card.peaks(opened.examples(edit.neuron, side, 8))


def _strength(edits: list[Edit], number: int) -> None:
    """Draw the slider of an edit: of what is added, in either direction; else of its share."""
    edit = edits[number]
    if edit.op == "add":
        return _added(edits, number)
    key = f"share {number} {replace(edit, share=1.0)}"
    st.session_state[key] = round(100 * edit.share)

    def change() -> None:
        _write(edits, number, replace(edit, share=st.session_state[key] / 100))

    st.slider(
        f"Strength of {edit.neuron}, in percent",
        0,
        100,
        step=5,
        format="%d %%",
        key=key,
        on_change=change,
        width=240,
        label_visibility="collapsed",
    )


def _added(edits: list[Edit], number: int) -> None:
    edit = edits[number]
    value, unit = edit.value * edit.share, edit.unit or "activation"
    key = f"added {number} {replace(edit, value=1.0, share=1.0)}"
    largest = max(RANGES[edit.unit], abs(value))
    st.session_state[key] = value

    def change() -> None:
        _write(edits, number, replace(edit, value=st.session_state[key], share=1.0))

    st.slider(
        f"Added to {edit.neuron}, in {unit}",
        -largest,
        largest,
        step=largest / 120,
        format=f"%+.3g {unit}",
        key=key,
        on_change=change,
        width=240,
        label_visibility="collapsed",
    )


def sentence(edit: Edit) -> str:
    """Return what an edit does, as Markdown: "set to -20 everywhere"."""
    size, unit = f"{edit.value:.4g}", f" {UNITS[edit.unit]}" * bool(edit.unit)
    source = f"a prompt of {len(edit.source)} tokens" if isinstance(edit.source, tuple) else repr(edit.source)
    what = {
        "set": f"set to {size}{unit}",
        "scale": f"multiplied by {size}",
        "add": f"{edit.value:+.4g}{unit} added",
        "swap": f"set to its value after {source}",
    }[edit.op]
    what = "switched off" if (edit.op, edit.value) == ("scale", 0) else what
    where = WHERE.get(edit.where, f"at {edit.where}")
    decay = f", {edit.decay:g} times as much at each further token" if edit.decay != 1 else ""
    share = f", at {edit.share:.0%} of its strength" if edit.share != 1 else ""
    return f"{markdown.plain(what)} {markdown.plain(where + decay + share)}"


def _write(edits: list[Edit], number: int, changed: Edit | None) -> None:
    """Replace or remove an edit; for callbacks."""
    lines = [changed if index == number else edit for index, edit in enumerate(edits)]
    st.session_state["edits"] = "\n".join(str(edit) for edit in lines if edit)


def _controls(edits: list[Edit], number: int) -> None:
    """Draw the controls of an edit; each of them rewrites its line."""
    edit = edits[number]
    largest = max(RANGES[edit.unit], 2 * abs(edit.value))

    def change(key: str, field: str) -> None:
        value = st.session_state[key]
        unit = "" if (field, value) == ("op", "scale") else edit.unit
        _write(edits, number, replace(edit, **{"unit": unit, field: value}))

    def options(field: str) -> dict[str, Any]:
        key = f"{field} {number} {edit}"
        return {"key": key, "on_change": change, "args": (key, field)}

    units = list(dict.fromkeys([edit.unit, *(UNITS if served.has_readable_store() else [""])]))
    wheres = list(dict.fromkeys([edit.where, *TOKEN_GROUPS]))
    if isinstance(edit.source, str):
        st.text_input("Its value after", edit.source, **options("source"))
    elif edit.op != "swap":
        st.selectbox("Operation", list(SYMBOLS), list(SYMBOLS).index(edit.op), **options("op"))
        st.slider("Value", -largest, largest, edit.value, **options("value"))
    if edit.op not in ("scale", "swap"):
        st.selectbox("Unit", units, format_func=UNITS.__getitem__, **options("unit"))
    st.selectbox("Where", wheres, format_func=lambda where: WHERE.get(where, where), **options("where"))


# --- the result -----------------------------------------------------------------------------------------


def result_on_press(section: str, settings: tuple, pressed: bool, make: Callable[[], Any]) -> Any:
    """Return what `make` returned at the last press of a button, None before the first; it is called at a press. Say
    on the page if the settings have changed since.

    A link to the result (?run=section) presses the button once.
    """
    key = f"{section} result"
    if pressed or (links.from_url("run") == section and key not in st.session_state):
        links.to_url(run=section)
        st.session_state[key] = (settings, None)  # so that a link presses only once
        st.session_state[key] = (settings, make())
    made_with, result = st.session_state.get(key, (settings, None))
    if result is not None and made_with != settings:
        st.caption("The text below was made with other settings; generate again.")
    return result


def _live(name: str, prompt: str, edits: tuple[Edit, ...]) -> None:
    """Show what edits do to the answer at once, from one pass; then also random edits and the side effects."""
    read = markdown.read_prompt(prompt)
    at_once = next(answer_outcomes(jobs.model(), read, edits))
    job = jobs.cached_job(_measured, name, prompt, edits)

    def draw(outcome: Outcome | None) -> None:
        shown = outcome or at_once
        flips.probabilities({control.number: control for control in (shown.old, shown.control) if control})
        if outcome:
            flips.measured(outcome)

    if jobs.works_for_visitor(job):
        jobs.show_progress(job, draw)
    else:
        draw(job.result)


@st.cache_resource(max_entries=64, show_spinner=False)
def _measured(name: str, prompt: str, edits: tuple[Edit, ...]) -> Job:
    """Return the job that measures edits, in raw units, and random edits, for all visitors."""
    model, read = jobs.model(), markdown.read_prompt(prompt)

    def work(job: Job) -> Outcome:
        for job.result in islice(answer_outcomes(model, read, edits), 1, None):  # the page has the first one
            job.check()
        return job.result

    return Job("Measuring random edits and side effects", work)


def in_raw_units(edits: list[Edit]) -> list[Edit]:
    """Return edits in raw activation; the index has the units."""
    if not any(edit.unit for edit in edits):
        return edits
    if not served.has_store():
        raise InputError("These edits are in units of max or std, which need an index. Write plain numbers.")
    with served.store() as opened:
        jobs.model_of_index(opened)
        return [edit.in_raw_units(opened.neurons.statistic) for edit in edits]


def _generate(prompt: str, edits: list[Edit], count: int, temperature: float, seed: int) -> Comparison:
    with jobs.progress("Generating") as step:

        def on_token(tokens: int) -> None:
            step(tokens, 2 * count)

        return compare(jobs.model(), markdown.read_prompt(prompt), edits, count, None, temperature, seed, on_token)


def download(result: Comparison, recipe: Recipe | None = None) -> None:
    files: dict[str, Any] = {"json": partial(json.dumps, result.to_dict(), ensure_ascii=False, indent=1)}
    pictures.downloads("steered", files | ({"recipe.json": recipe.to_json} if recipe else {}))


def _export(prompt: str, edits: list[Edit], count: int, temperature: float, seed: int) -> None:
    """Offer the recipe as a file, and the same as a command and in Python."""
    with st.expander("Save or export"):
        name = st.text_input("Recipe's name", "my recipe", key="recipe_name", persist_state="session")
        in_units = any(edit.unit for edit in edits)
        if in_units:
            st.caption("Its units need an index wherever it is used.")

        def save() -> str:
            return Recipe.for_model(jobs.model(), name, edits, prompt=prompt).to_json()

        st.download_button("Save recipe", save, "recipe.json", key="save_recipe", on_click="ignore", disabled=not edits)
        parsed, path, lines = markdown.read_prompt(prompt), str(served.store_path()), list(map(str, edits))
        if isinstance(parsed, str):
            words = ["icebear", "steer", prompt, *(word for line in lines for word in ("--edit", line))]
            words += ["--max-new-tokens", str(count)]
            words += ["--temperature", f"{temperature:g}", "--seed", str(seed)] if temperature else []
            words += ["--store", path] if in_units else []
            st.code(shlex.join([*words, "--model", served.model_name()]), "bash", wrap_lines=True)
        chat = "Chat, " if isinstance(parsed, Chat) else ""
        sampling = f", temperature={temperature:g}, seed={seed}" if temperature else ""
        opened, statistic = ("", "")
        if in_units:
            opened, statistic = f"open_store({path!r}) as store, ", ", store.neurons.statistic"
        st.code(
            f"from icebear import {chat}load_model{', open_store' if in_units else ''}, steer\n\n"
            f"model = load_model({served.model_name()!r})\n"
            f"with {opened}steer(model, {lines!r}{statistic}):\n"
            f"    print(model.generate({parsed!r}, max_new_tokens={count}{sampling}))",
            "python",
            wrap_lines=True,
        )
