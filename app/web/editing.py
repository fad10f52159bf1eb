"""Steer neurons while the model generates; the plain and the steered text side by side."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import streamlit as st

from icebear.app.cli.verbs.demo import PROMPT
from icebear.app.recipes import EXAMPLE_RECIPE
from icebear.app.web import continuations, ui
from icebear.concepts.models.chat import Chat
from icebear.edits import PLACES, SYMBOLS, Edit, parse_edits
from icebear.recipe import Recipe
from icebear.steering.comparison import Comparison, compare

UNITS = {"": "raw", "max": "times its max", "std": "times its std"}
RANGES = {"": 60.0, "max": 3.0, "std": 10.0}


def show() -> None:
    prompt = ui.typed(st.text_area, "Prompt", "prompt", value=PROMPT, height=80)
    _recipes()
    lines = ui.typed(
        st.text_area,
        "Edits, one a line: L29.ffn.860*0 scales, L29.ffn.860=-20 sets, L24.ffn.559+2std@last adds",
        "edits",
        height=120,
        help="The syntax of icebear steer --edit; the controls below write it.",
    )
    edits = parse_edits(line for line in lines.splitlines() if line.strip())
    _controls(edits)
    columns = st.columns(4, vertical_alignment="bottom")
    count = ui.typed(columns[0].number_input, "New tokens", "tokens", 1, 400, 24)
    temperature = ui.typed(columns[1].number_input, "Temperature", "temperature", 0.0, 5.0, 0.0, 0.1, help="0: greedy")
    seed = ui.typed(columns[2].number_input, "Seed", "seed", 0, 2**31, 0, disabled=not temperature)
    settings = (ui.model_name(), prompt, tuple(map(str, edits)), count, temperature, seed)
    pressed = columns[3].button("Generate", type="primary", icon=":material/play_arrow:", key="generate")
    result = last_result("generated", settings, pressed, lambda: _generate(prompt, edits, *settings[3:]))
    if result:
        side_by_side(result)
    _export(prompt, edits, *settings[3:])


def _recipes() -> None:
    with st.expander("Recipes"):
        st.button("Make the ice bear live in the desert", key="example_recipe", on_click=_take, args=(None,))
        uploaded = st.file_uploader("A saved recipe", "json", key="uploaded")
        if uploaded:
            recipe = Recipe.from_json(uploaded.getvalue().decode("utf-8", errors="replace"))
            recipe.check(ui.model())
            st.button(f"Use {ui.plain(recipe.name)}", key="use_recipe", on_click=_take, args=(recipe,))


def _take(recipe: Recipe | None) -> None:
    st.session_state["edits"] = "\n".join(map(str, recipe or Recipe.load(EXAMPLE_RECIPE)))


def _controls(edits: list[Edit]) -> None:
    """Draw a row of controls for each edit; each control rewrites its line."""

    def write(number: int, changed: Edit | None) -> None:
        lines = [changed if place == number else edit for place, edit in enumerate(edits)]
        st.session_state["edits"] = "\n".join(str(edit) for edit in lines if edit)

    def change(number: int, key: str, field: str) -> None:
        value = st.session_state[key]
        unit = "" if (field, value) == ("op", "scale") else edits[number].unit
        write(number, replace(edits[number], **{"unit": unit, field: value}))

    known_units = list(UNITS) if ui.has_store() else [""]
    for number, edit in enumerate(edits):
        columns = st.columns([2, 1.4, 4, 1.6, 1.8, 0.8], vertical_alignment="bottom")
        columns[0].markdown(f"**{edit.neuron}**")
        largest = max(RANGES[edit.unit], 2 * abs(edit.value))

        def options(field: str, number: int = number, edit: Edit = edit) -> dict[str, Any]:
            key = f"{field} {number} {edit}"
            return {"key": key, "on_change": change, "args": (number, key, field), "label_visibility": "collapsed"}

        units = list(dict.fromkeys([edit.unit, *known_units]))
        places = list(dict.fromkeys([edit.where, *PLACES]))
        operations = list(SYMBOLS)
        columns[1].selectbox("Operation", operations, operations.index(edit.op), **options("op"))
        columns[2].slider("Value", -largest, largest, edit.value, **options("value"))
        scales = edit.op == "scale"
        columns[3].selectbox("Unit", units, disabled=scales, format_func=UNITS.__getitem__, **options("unit"))
        columns[4].selectbox("Where", places, **options("where"))
        remove: dict[str, Any] = {"key": f"remove {number} {edit}", "on_click": write, "args": (number, None)}
        columns[5].button("", icon=":material/close:", help="Remove this edit", **remove)


def last_result(key: str, settings: tuple, pressed: bool, make: Callable[[], Any]) -> Any:
    """Return the result of `make` at the last press of a button, or None; the page says if the settings changed."""
    if pressed:
        st.session_state[key] = (settings, make())
    made_with, result = st.session_state.get(key, (settings, None))
    if made_with != settings:
        st.caption("The text below was made with other settings; generate again.")
    return result


def _generate(prompt: str, edits: list[Edit], count: int, temperature: float, seed: int) -> Comparison:
    loaded, statistic = ui.model(), None
    with ui.progress("Generating") as step, ExitStack() as stack:
        if any(edit.unit for edit in edits):
            opened = stack.enter_context(ui.store())
            ui.fitting(opened)
            statistic = opened.neurons.statistic

        def on_token(tokens: int) -> None:
            step(tokens, 2 * count)

        return compare(loaded, ui.read_prompt(prompt), edits, count, statistic, temperature, seed, on_token)


def side_by_side(result: Comparison) -> None:
    """Show both texts, and the first token's probabilities."""
    continuations.texts(result.prompt, result.plain.text, result.steered.text)
    st.markdown("**Next token**")
    columns, number = next_tokens(result)
    continuations.bars(columns, number)
    ui.downloads("steered", {"json": partial(json.dumps, result.to_dict(), ensure_ascii=False, indent=1)})


def next_tokens(result: Comparison) -> tuple[dict[str, dict[str, float | None]], str]:
    """Return the next tokens' probabilities (or a model's logits) without and with edits, and the number's name."""
    number = "logit" if any(token.probability is None for token in result.plain.next) else "probability"
    sides = {"without edits": result.plain.next, "with edits": result.steered.next}
    return {name: {token.text: getattr(token, number) for token in side} for name, side in sides.items()}, number


def _export(prompt: str, edits: list[Edit], count: int, temperature: float, seed: int) -> None:
    """Offer the recipe as a file, and the same as a command and in Python."""
    with st.expander("Save or export"):
        name = st.text_input("Recipe's name", "my recipe", key="recipe_name", persist_state="session")
        in_units = any(edit.unit for edit in edits)
        if in_units:
            st.caption("Its units need an index wherever it is used.")

        def save() -> str:
            return Recipe.for_model(ui.model(), name, edits, prompt=prompt).to_json()

        st.download_button("Save recipe", save, "recipe.json", key="save_recipe", on_click="ignore", disabled=not edits)
        parsed, path, lines = ui.read_prompt(prompt), str(ui.store_path()), list(map(str, edits))
        if isinstance(parsed, str):
            words = ["icebear", "steer", prompt, *(word for line in lines for word in ("--edit", line))]
            words += ["--max-new-tokens", str(count)]
            words += ["--temperature", f"{temperature:g}", "--seed", str(seed)] if temperature else []
            words += ["--store", path] if in_units else []
            st.code(shlex.join([*words, "--model", ui.model_name()]), "bash", wrap_lines=True)
        chat = "Chat, " if isinstance(parsed, Chat) else ""
        sampling = f", temperature={temperature:g}, seed={seed}" if temperature else ""
        opened, statistic = ("", "")
        if in_units:
            opened, statistic = f"open_store({path!r}) as store, ", ", store.neurons.statistic"
        st.code(
            f"from icebear import {chat}load_model{', open_store' if in_units else ''}, steer\n\n"
            f"model = load_model({ui.model_name()!r})\n"
            f"with {opened}steer(model, {lines!r}{statistic}):\n"
            f"    print(model.generate({parsed!r}, max_new_tokens={count}{sampling}))",
            "python",
            wrap_lines=True,
        )
