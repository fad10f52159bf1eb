"""Runs an evaluation sample by sample into a folder; interrupted, it goes on there."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from concepts.models import Model
from db.errors import InputError

OnProgress = Callable[[int, int], None]


def run(
    folder: str | Path, settings: dict[str, Any], items: Sequence[Any], measure: Callable[[Any], dict[str, Any]],
    on_progress: OnProgress | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """`measure` of each item, kept as lines of `samples.jsonl`; those that are there already are not measured again.

    Raises `InputError` where the folder holds an evaluation with other settings.
    """
    lines = prepare(folder, settings) / "samples.jsonl"
    done = read(lines)
    with lines.open("w", encoding="utf-8") as file:  # what was cut off in the middle of a line goes
        for line in done:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    for number, item in enumerate(items):
        if number >= len(done):
            done.append(measure(item))
            with lines.open("a", encoding="utf-8") as file:
                file.write(json.dumps(done[-1], ensure_ascii=False) + "\n")
        if on_progress:
            on_progress(number + 1, len(items))
    return done


def prepare(folder: str | Path, settings: dict[str, Any]) -> Path:
    """The folder, made if need be, with its settings. Raises `InputError` where it holds others."""
    place, said = Path(folder), json.dumps(settings, ensure_ascii=False, sort_keys=True, indent=1)
    try:
        place.mkdir(parents=True, exist_ok=True)
        file = place / "settings.json"
        if file.exists() and file.read_text(encoding="utf-8") != said:
            raise InputError(f"{folder} holds an evaluation with other settings; choose another --out, or remove it.")
        file.write_text(said, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{folder} cannot be written ({error.strerror}); choose another --out.") from None
    return place


def read(lines: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON."""
    found = []
    for line in lines.read_text(encoding="utf-8").splitlines() if lines.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def facts(model: Model, kind: str, methods: dict[str, Any], **rest: Any) -> dict[str, Any]:
    """Settings that decide an evaluation's numbers."""
    return {
        "evaluation": kind,
        "model": {"name": model.name, "fingerprint": model.fingerprint, "dtype": str(model.dtype)[6:]},
        "methods": {name: repr(method) for name, method in methods.items()},
        "versions": {name: version(name) for name in ("icebear", "torch", "transformers")},
        **rest,
    }
