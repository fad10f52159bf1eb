"""Many prompts: their cases, read from a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from icebear.errors import InputError
from icebear.models.objective import Token
from icebear.paths import read_text
from icebear.values import one_of


@dataclass(frozen=True)
class Case:
    """A prompt and its target, see `icebear.attribute`."""

    prompt: Any
    target: Token | None = None
    contrast: Token | None = None
    counterfactual: Any = None


def read_cases(path: str | Path, needs_counterfactual: bool = False, **defaults: Any) -> list[Case]:
    """Read a file of JSON lines, objects with prompt and, optionally, target, contrast and counterfactual, or a .txt
    file of prompts.

    needs_counterfactual: whether each must have a counterfactual. defaults: values for missing fields. Raises
        `InputError`.
    """
    return [case_of(row, where, needs_counterfactual, **defaults) for row, where in rows_of_file(path)]


def rows_of_file(path: str | Path) -> Iterator[tuple[Any, str]]:
    """Yield the rows of a file of JSON lines, with their names in messages; of a .txt file other lines are prompts."""
    lines = [(number, line) for number, line in enumerate(read_text(path).split("\n"), 1) if line.strip()]
    if not lines:
        raise InputError(f"{path} has no prompt; give a JSON object with a prompt on each line.")
    for number, line in lines:
        try:
            row = json.loads(line, object_pairs_hook=_with_single_keys)
        except (ValueError, RecursionError):
            row = {"prompt": line.strip()} if str(path).endswith(".txt") else None
        yield row, f"line {number} of {path}"


def case_of(row: Any, where: str, needs_counterfactual: bool = False, **defaults: Any) -> Case:
    """Return the case of a mapping; an empty text is a missing field. where: its name in messages. Raises
    `InputError`."""
    fields = row.items() if isinstance(row, Mapping) else ()
    values = defaults | {name: value for name, value in fields if not isinstance(value, str | None) or value}
    wanted = ["prompt", *(["counterfactual"] if needs_counterfactual else [])]
    if any(values.get(name) is None for name in wanted):
        what = " and a ".join(wanted)
        raise InputError(f"{where[0].upper()}{where[1:]} is not a JSON object with a {what}; correct it.")
    names = ("prompt", "target", "contrast", "counterfactual")
    for name, _ in fields:
        one_of(name, f"key in {where}", names)
    return Case(*(values.get(name) for name in names))


def _with_single_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises `ValueError` for a key that it has twice."""
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError("a key stands twice")
    return row
