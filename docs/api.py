"""Writes docs/api.md from the docstrings of the public names, without importing them.

python docs/api.py
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import griffe

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
ROOMS = {
    "explanation": "Explaining",
    "concepts": "Relevance",
    "models": "Models",
    "lrp": "Rules",
    "claims": "Claims",
    "actmax": "What neurons mean",
    "steering": "Turning neurons",
    "db": "Stores",
    "": "What all share",
}
"""The folders that public names come from, with their headings; the last is `icebear/` itself."""
HEAD = """# API

Every public name, from its docstring. All of them are in `icebear`:
`from icebear import load_model, attribute`. Shapes are in brackets: B prompts, T tokens, L layers, N neurons,
H heads, V vocabulary.
"""


def page() -> str:
    with TemporaryDirectory() as folder:  # laid as it is installed
        for room in sorted(ROOMS):
            shutil.copytree(ROOT / (room or "icebear"), Path(folder) / "icebear" / room, dirs_exist_ok=True)
        loader = griffe.GriffeLoader(search_paths=[folder])
        public = loader.load("icebear", try_relative_path=False)  # not the one that the working directory has
        loader.resolve_aliases(external=False)
    names = [name for name, found in public.members.items() if found.is_alias and found.target_path[:8] == "icebear."]
    parts = [HEAD]
    for room, heading in ROOMS.items():
        here = [name for name in names if _room(public[name].target_path) == room]
        parts.append(f"## {heading}\n")
        parts += [_entry(name, public[name].final_target) for name in sorted(here, key=_order)]
    return "\n".join(parts)


def _room(path: str) -> str:
    """Of a name's full path."""
    folder = path.split(".")[1]
    return folder if folder in ROOMS else ""


def _order(name: str) -> tuple[int, str]:
    """Functions, classes, constants."""
    return (0 if name[0].islower() else 2 if name.isupper() else 1), name


def _entry(name: str, found: griffe.Object) -> str:
    parts = [f"### {name}\n"]
    if found.is_attribute:
        parts.append(f"`{name} = {found.value}`\n")
    elif found.is_function:
        parts.append(_signature(found, name))
    elif (init := found.members.get("__init__")) and init.parameters:
        parts.append(_signature(init, name))
    parts.append(_text(found))
    if found.is_class:
        members = list(_members(found))
        parts.append("".join(_fact(one) for one in members if one.is_attribute))
        parts += [f"#### {name}.{one.name}\n\n{_signature(one)}\n{_text(one)}" for one in members if one.is_function]
    return "\n".join(part for part in parts if part)


def _members(found: griffe.Class) -> Iterator[griffe.Object]:
    """What a class says of its facts, its parents' first, and its own methods."""
    for owner in [*reversed(found.mro()), found]:
        for name, one in owner.members.items():
            if name.startswith("_") or one.is_alias or (owner is not found and name in found.members):
                continue
            told = one.docstring or "property" in one.labels
            if (one.is_attribute and told) or (one.is_function and owner is found):
                yield one


def _fact(one: griffe.Object) -> str:
    kind = f" (`{one.annotation}`)" if one.annotation else ""
    said = _text(one).strip().replace("\n", "\n  ")
    return f"- `{one.name}`{kind}" + (f": {said}" if said else "") + "\n"


def _signature(found: griffe.Function, name: str | None = None) -> str:
    """As a block; a line for each argument where one line is too short."""
    self = bool(found.parameters) and found.parameters[0].name in ("self", "cls")
    arguments: list[str] = []
    for one in list(found.parameters)[self:]:
        star = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}.get(one.kind, "")
        if one.kind is griffe.ParameterKind.keyword_only and not any(a.startswith("*") for a in arguments):
            arguments.append("*")
        hint = f": {one.annotation}" if one.annotation else ""
        default = "" if one.default is None or star else f" = {one.default}" if hint else f"={one.default}"
        arguments.append(f"{star}{one.name}{hint}{default}")
    gives = f" -> {found.returns}" if found.returns and found.name != "__init__" else ""
    line = f"{name or found.name}({', '.join(arguments)}){gives}"
    if len(line) > 100:
        inner = "".join(f"    {argument},\n" for argument in arguments)
        line = f"{name or found.name}(\n{inner}){gives}"
    return f"```text\n{line}\n```\n"


ARGUMENT = re.compile(r"^`?([a-z_]+(?:, [a-z_]+)*)`?: (.*(?:\n +\S.*)*)", re.MULTILINE)
"""A line of a docstring that begins with a name, and the indented lines that go on from it."""


def _text(found: griffe.Object) -> str:
    """The docstring as Markdown, its arguments as a list."""
    said = found.docstring.value.strip() if found.docstring else ""
    said = re.sub(r"``(.+?)``", r"`\1`", said)
    said = ARGUMENT.sub(lambda match: f"\n- `{match[1]}`: {match[2]}\n".replace("\n    ", "\n  "), said)
    said = re.sub(r"\n{3,}", "\n\n", said)
    said = re.sub(r"^(- .*(?:\n  .*)*)\n\n(?=- )", r"\1\n", said, flags=re.MULTILINE)
    return f"{said.strip()}\n" if said else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"Wrote {PAGE.relative_to(ROOT)}")
