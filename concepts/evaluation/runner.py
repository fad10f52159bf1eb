"""Runs an evaluation part by part, sample by sample, into its folder; interrupted, it resumes there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icebear.concepts.evaluation import report
from icebear.concepts.models.provenance import provenance
from icebear.concepts.statistics import Cells
from icebear.errors import InputError, NumericalError
from icebear.paths import read_text, write_file

if TYPE_CHECKING:
    from icebear.concepts.evaluation.protocol import Evaluation, Line, Lines, Part
    from icebear.concepts.models.model import Model

OnProgress = Callable[[int, int], None]
Progress = Callable[[str, int], AbstractContextManager[OnProgress | None]]
"""Of a part's name and its number of samples."""


@dataclass(frozen=True)
class TableResult:
    """A table that was written."""

    name: str
    """Empty for a part's only one."""
    folder: Path
    columns: Mapping[str, str]
    cells: Cells


@dataclass(frozen=True)
class PartResult:
    """What came of a part."""

    name: str
    settings: dict[str, Any]
    tables: list[TableResult]
    listings: Mapping[str, list[dict[str, Any]]]
    notes: Sequence[str]
    unable: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "part": self.name,
            "settings": self.settings,
            "notes": list(self.notes),
            "unable": dict(self.unable),
            "tables": [{"table": one.name, "rows": report.rows(one.cells)} for one in self.tables],
            "listings": dict(self.listings),
        }


def run(
    evaluation: Evaluation, model: Model, out: str | Path, progress: Progress = lambda *_: nullcontext()
) -> Iterator[PartResult]:
    """Measure and report each part; a folder that has all of a part's samples is only reported again.

    Raises
    ------
    InputError
        If a folder cannot be written, or holds an evaluation with other settings.
    NumericalError
        If a number is NaN or infinite.
    """
    for part in evaluation.parts(model):
        folder = Path(out) / part.name
        settings = settings_of(evaluation, model, part)
        with progress(part.name or evaluation.name, len(part.samples)) as advance:
            lines = resume(folder, settings, part, advance)
        yield _reported(part, folder, settings, lines)


def settings_of(evaluation: Evaluation, model: Model, part: Part) -> dict[str, Any]:
    """What decides a part's numbers."""
    return {
        "evaluation": evaluation.name,
        **provenance(model),
        "methods": {name: repr(part.methods.get(name)) for name in (*part.methods, *part.unable)},
        **({"part": part.name} if part.name else {}),
        **evaluation.settings(),
        **part.settings,
        "steps": list(evaluation.steps),
    }


def _reported(part: Part, folder: Path, settings: dict[str, Any], lines: Lines) -> PartResult:
    notes, tables = list(part.notes(lines)), []
    for name, table in part.of(lines).items():
        measured = [method for line in table.lines[:1] for method in line["methods"]]
        methods = {method: settings["methods"].get(method, "") for method in (measured or settings["methods"])}
        methods |= {method: settings["methods"][method] for method in part.unable}
        place = folder / name
        place.mkdir(exist_ok=True)
        cells = report.write(place, table.lines, table.columns, {**settings, "methods": methods}, part.unable, notes)
        tables.append(TableResult(name, place, table.columns, cells))
    part.write(folder, lines)
    return PartResult(part.name, settings, tables, part.listings(lines), notes, part.unable)


def resume(
    folder: str | Path, settings: dict[str, Any], part: Part, on_progress: OnProgress | None = None
) -> list[Line]:
    """A line for each sample of a part, kept in `samples.jsonl`; samples that are there are not measured again.

    Killed at any moment, it keeps every finished sample, or group of samples that are measured together.
    """
    path = prepare(folder, settings) / "samples.jsonl"
    lines = finished(path)
    while True:
        if on_progress and lines:
            on_progress(len(lines), len(part.samples))
        group = part.samples[len(lines) : len(lines) + (part.together or 1)]
        if not group:
            return lines
        measured = part.measure(group) if part.together else [part.measure(group[0])]
        with path.open("ab") as file:
            file.write(b"".join(map(_line, measured)))
        lines += measured


def prepare(folder: str | Path, settings: dict[str, Any]) -> Path:
    """The folder, made if need be, with its settings. Raises `InputError` where it holds others."""
    place, text = Path(folder), json.dumps(settings, ensure_ascii=False, sort_keys=True, indent=1)
    try:
        place.mkdir(parents=True, exist_ok=True)
        file = place / "settings.json"
        if not file.exists():
            write_file(file, text)
        elif read_text(file) != text:
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
        text = json.dumps(measured, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise NumericalError("A sample's result is NaN or infinite; try --dtype float32.") from None
    return text.encode() + b"\n"
