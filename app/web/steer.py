"""Turn neurons while the model generates, plain and steered side by side."""

from __future__ import annotations

import difflib
import json
import re
import shlex
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import streamlit as st
from markupsafe import Markup

from icebear.app.cli.verbs.demo import PROMPT
from icebear.app.recipes import EXAMPLE_RECIPE
from icebear.app.web import charts
from icebear.app.web.state import (
    downloads,
    fitting,
    has_store,
    model,
    model_name,
    plain,
    read_prompt,
    store,
    store_path,
    typed,
)
from icebear.concepts.models.chat import Chat
from icebear.edits import PLACES, SYMBOLS, Edit, parse_edits
from icebear.recipe import Recipe
from icebear.steering.comparison import Comparison, compare

SIDE = Markup(
    '<div dir="auto" style="white-space:pre-wrap;overflow-wrap:anywhere"><span style="opacity:.6">{}</span>{}</div>'
)
UNITS = {"": "raw", "max": "times its max", "std": "times its std"}
RANGES = {"": 60.0, "max": 3.0, "std": 10.0}


def show() -> None:
    prompt = typed(st.text_area, "Prompt", "prompt", value=PROMPT, height=80)
    _recipes()
    lines = typed(
        st.text_area,
        "Edits, one a line",
        "edits",
        height=120,
        placeholder="L29.ffn.860*0\nL24.ffn.559+2std@last",
        help="As for icebear steer --edit; the sliders below write them.",
    )
    edits = parse_edits(line for line in lines.splitlines() if line.strip())
    _sliders(edits)
    columns = st.columns(4, vertical_alignment="bottom")
    count = typed(columns[0].number_input, "New tokens", "tokens", 1, 400, 24)
    temperature = typed(columns[1].number_input, "Temperature", "temperature", 0.0, 5.0, 0.0, 0.1, help="0: greedy")
    seed = typed(columns[2].number_input, "Seed", "seed", 0, 2**31, 0, disabled=not temperature)
    asked = (model_name(), prompt, tuple(map(str, edits)), count, temperature, seed)
    if columns[3].button("Generate", type="primary", icon=":material/play_arrow:", key="generate"):
        st.session_state["generated"] = (asked, _generate(prompt, edits, *asked[3:]))
    done, result = st.session_state.get("generated", (None, None))
    if result:
        if done != asked:
            st.caption("The text below is of other settings; generate again.")
        side_by_side(result)
    _as_code(prompt, edits, *asked[3:])


def _recipes() -> None:
    with st.expander("Recipes"):
        st.button("The ice bear's way to the desert", key="example_recipe", on_click=_take, args=(None,))
        uploaded = st.file_uploader("A saved recipe", "json", key="uploaded")
        if uploaded:
            recipe = Recipe.from_json(uploaded.getvalue().decode("utf-8", errors="replace"))
            recipe.check(model())
            st.button(f"Use {plain(recipe.name)}", key="use_recipe", on_click=_take, args=(recipe,))


def _take(recipe: Recipe | None) -> None:
    st.session_state["edits"] = "\n".join(map(str, recipe or Recipe.load(EXAMPLE_RECIPE)))


def _sliders(edits: list[Edit]) -> None:
    """A row of controls for each edit; each writes its line anew."""

    def write(number: int, changed: Edit | None) -> None:
        lines = [changed if place == number else edit for place, edit in enumerate(edits)]
        st.session_state["edits"] = "\n".join(str(edit) for edit in lines if edit)

    def change(number: int, key: str, field: str) -> None:
        value = st.session_state[key]
        unit = "" if (field, value) == ("op", "scale") else edits[number].unit
        write(number, replace(edits[number], **{"unit": unit, field: value}))

    known_units = list(UNITS) if has_store() else [""]
    for number, edit in enumerate(edits):
        columns = st.columns([2, 1.4, 4, 1.6, 1.8, 0.8], vertical_alignment="bottom")
        columns[0].markdown(f"**{edit.neuron}**")
        largest = max(RANGES[edit.unit], 2 * abs(edit.value))

        def told(field: str, number: int = number, edit: Edit = edit) -> dict[str, Any]:
            key = f"{field} {number} {edit}"
            return {"key": key, "on_change": change, "args": (number, key, field), "label_visibility": "collapsed"}

        units = list(dict.fromkeys([edit.unit, *known_units]))
        places = list(dict.fromkeys([edit.where, *PLACES]))
        ops = list(SYMBOLS)
        columns[1].selectbox("Do", ops, ops.index(edit.op), **told("op"))
        columns[2].slider("Value", -largest, largest, edit.value, **told("value"))
        columns[3].selectbox(
            "Unit", units, disabled=edit.op == "scale", format_func=lambda unit: UNITS[unit], **told("unit")
        )
        columns[4].selectbox("Where", places, **told("where"))
        columns[5].button(
            "",
            icon=":material/close:",
            key=f"remove {number} {edit}",
            on_click=write,
            args=(number, None),
            help="Remove this edit",
        )


def _generate(prompt: str, edits: list[Edit], count: int, temperature: float, seed: int) -> Comparison:
    bar = st.progress(0.0, "Generating")
    stop = st.empty()
    stop.button("Stop", key="stop_generating")  # any click ends this run at the next step of the bar

    def step(tokens: int) -> None:
        bar.progress(min(1.0, tokens / (2 * count)), "Generating")

    loaded, statistic = model(), None
    with ExitStack() as stack:
        if any(edit.unit for edit in edits):
            opened = stack.enter_context(store())
            fitting(opened)
            statistic = opened.neurons.statistic
        result = compare(loaded, read_prompt(prompt), edits, count, statistic, temperature, seed, step)
    bar.empty()
    stop.empty()
    return result


def side_by_side(result: Comparison) -> None:
    """Both texts, and the first token's probabilities."""
    sides = differences(result.plain.text, result.steered.text)
    for column, name, html in zip(st.columns(2), ("plain", "steered"), sides, strict=True):
        with column.container(border=True):
            st.caption(name)
            st.html(SIDE.format(_told(result.prompt), html))
    chart = charts.paired_bars(result.plain.next, result.steered.next)
    st.altair_chart(chart)
    downloads(
        "steered",
        {
            "json": lambda: json.dumps(result.to_dict(), ensure_ascii=False, indent=1),
            **charts.files(chart),
        },
    )


def _told(prompt: str | list[dict[str, Any]]) -> str:
    """A prompt, or the messages before an answer."""
    if isinstance(prompt, str):
        return prompt
    return "".join(f"{message['role']}: {message['content']}\n" for message in prompt) + "assistant: "


def differences(plain_text: str, steered: str) -> tuple[Markup, Markup]:
    """Both texts as HTML, the words that only one of them has marked."""
    words = [re.findall(r"\s*\S+|\s+", text) for text in (plain_text, steered)]
    out: tuple[list[Markup], list[Markup]] = ([], [])
    for same, *bounds in difflib.SequenceMatcher(None, words[0], words[1], autojunk=False).get_opcodes():
        for side, (first, last) in enumerate((bounds[:2], bounds[2:])):
            text = "".join(words[side][first:last])
            space, word = text[: len(text) - len(text.lstrip())], text.lstrip()
            out[side].append(Markup("{}<mark>{}</mark>" if word and same != "equal" else "{}{}").format(space, word))
    return Markup().join(out[0]), Markup().join(out[1])


def _as_code(prompt: str, edits: list[Edit], count: int, temperature: float, seed: int) -> None:
    with st.expander("Save it, or do it elsewhere"):
        name = st.text_input("Recipe's name", "my recipe", key="recipe_name", persist_state="session")
        if edits and any(edit.unit for edit in edits):
            st.caption("Its units need a store wherever it is used.")

        def save() -> str:
            return Recipe.for_model(model(), name, edits, prompt=prompt).to_json()

        st.download_button("Save recipe", save, "recipe.json", key="save_recipe", on_click="ignore", disabled=not edits)
        sampling = f" --temperature {temperature:g} --seed {seed}" if temperature else ""
        units = f" --store {shlex.quote(str(store_path()))}" if any(edit.unit for edit in edits) else ""
        named = f" --model {shlex.quote(model_name())}"
        options = "".join(f" --edit {shlex.quote(str(edit))}" for edit in edits)
        rest = f" --max-new-tokens {count}{sampling}{units}{named}"
        asked = read_prompt(prompt)
        if isinstance(asked, str):
            st.code(f"icebear steer {shlex.quote(prompt)}{options}{rest}", "bash", wrap_lines=True)
        drawn = f", temperature={temperature:g}, seed={seed}" if temperature else ""
        chat = "Chat, " if isinstance(asked, Chat) else ""
        lines = [
            f"from icebear import {chat}load_model, steer\n",
            f"model = load_model({model_name()!r})",
            f"with steer(model, {[str(edit) for edit in edits]!r}):",
            f"    print(model.generate({asked!r}, max_new_tokens={count}{drawn}))",
        ]
        if units:
            lines.insert(1, "from icebear import open_store\n")
            lines[3] = f"with open_store({str(store_path())!r}) as store, steer(model, " + (
                f"{[str(edit) for edit in edits]!r}, store.neurons.statistic):"
            )
        st.code("\n".join(lines), "python", wrap_lines=True)
