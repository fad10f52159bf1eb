"""Runs an evaluation sample by sample into a folder; interrupted, it goes on there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icebear.concepts.models.provenance import provenance
from icebear.errors import InputError, NumericalError
from icebear.paths import read_text, write_file

if TYPE_CHECKING:
    from icebear.concepts.models.model import Model

OnProgress = Callable[[int, int], None]


def run(
    folder: str | Path,
    settings: dict[str, Any],
    items: Sequence[Any],
    measure: Callable[[Any], dict[str, Any]],
    on_progress: OnProgress | None = None,
) -> list[dict[str, Any]]:
    """`run_together` of items one by one."""
    return run_together(folder, settings, items, lambda group: [measure(group[0])], 1, on_progress)


def run_together(
    folder: str | Path,
    settings: dict[str, Any],
    items: Sequence[Any],
    measure: Callable[[Sequence[Any]], list[dict[str, Any]]],
    size: int,
    on_progress: OnProgress | None = None,
) -> list[dict[str, Any]]:
    """`measure` of groups of items, kept as lines of `samples.jsonl`; those there already are not measured again.

    Killed at any moment, it keeps every finished group. Raises `InputError` where the folder holds an evaluation with
    other settings, `NumericalError` for a measure that is NaN or infinite.
    """
    lines = prepare(folder, settings) / "samples.jsonl"
    done = finished(lines)
    while True:
        if on_progress and done:
            on_progress(len(done), len(items))
        group = items[len(done) : len(done) + size]
        if not group:
            return done
        found = measure(group)
        with lines.open("ab") as file:
            file.write(b"".join(map(_line, found)))
        done += found


def prepare(folder: str | Path, settings: dict[str, Any]) -> Path:
    """The folder, made if need be, with its settings. Raises `InputError` where it holds others."""
    place, said = Path(folder), json.dumps(settings, ensure_ascii=False, sort_keys=True, indent=1)
    try:
        place.mkdir(parents=True, exist_ok=True)
        file = place / "settings.json"
        if not file.exists():
            write_file(file, said)
        elif read_text(file) != said:
            raise InputError(f"{folder} holds an evaluation with other settings; choose another --out, or remove it.")
    except OSError as error:
        raise InputError(f"{folder} cannot be written ({error.strerror}); choose another --out.") from None
    return place


def finished(lines: Path) -> list[dict[str, Any]]:
    """What a file of JSON lines holds; a last line that was cut off while it was written is cut from the file."""
    if not lines.exists():
        return []
    text = lines.read_bytes()
    whole = text.rfind(b"\n") + 1
    if whole < len(text):
        os.truncate(lines, whole)
    try:
        return [json.loads(line) for line in text[:whole].splitlines()]
    except ValueError:
        raise InputError(f"{lines} is damaged; choose another --out, or remove all from its broken line on.") from None


def _line(measured: dict[str, Any]) -> bytes:
    try:
        said = json.dumps(measured, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise NumericalError("A sample's result is NaN or infinite; try --dtype float32.") from None
    return said.encode() + b"\n"


def facts(model: Model, kind: str, methods: dict[str, Any], **rest: Any) -> dict[str, Any]:
    """Settings that decide an evaluation's numbers."""
    return {
        "evaluation": kind,
        **provenance(model),
        "methods": {name: repr(method) for name, method in methods.items()},
        **rest,
    }
