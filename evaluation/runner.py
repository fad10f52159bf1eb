"""Runs an evaluation part by part, sample by sample, into its folder; an interrupted run resumes there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from icebear.convert import read_json
from icebear.errors import IcebearError, InputError, NumericalError, need
from icebear.evaluation import report
from icebear.evaluation.protocol import Evaluation, Line, Part
from icebear.evaluation.results import Results
from icebear.models.model import versions
from icebear.paths import append, existing, locked, read_text, write_file
from icebear.steps import OnProgress, unwatched

Progress = Callable[[str], AbstractContextManager[OnProgress]]
"""Name of a part -> context."""
KEY = "sample_number"
"""The key of a sample's number in a line of samples.jsonl."""
SAMPLES = "samples.jsonl"
DAMAGED = "{} is damaged, or of an older icebear; delete the broken line and all lines after it, or change --out."


@dataclass(frozen=True)
class PartResult:
    """The results of a part."""

    name: str
    folder: Path
    settings: dict[str, Any]
    tables: dict[str, Results]
    """By name, each in a folder of its name; the name of a part's only table is empty."""
    listings: Mapping[str, list[dict[str, Any]]]
    notes: Sequence[str]
    unable: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return the results as JSON-ready data."""
        return {
            "part": self.name,
            "settings": self.settings,
            "notes": list(self.notes),
            "unable": dict(self.unable),
            "tables": [{"table": name, "rows": table.rows()} for name, table in self.tables.items()],
            "listings": dict(self.listings),
        }


def run(
    evaluation: Evaluation, model: Any, out: str | Path, progress: Progress = lambda part: nullcontext(unwatched)
) -> Iterator[PartResult]:
    """Measure and report each part; a folder that has all samples of a part is only reported again.

    model: the `Model`; None for an evaluation that makes its own. Raises `InputError` if a package for figures is
    missing, or if a folder cannot be written, is in use by another process, or holds an evaluation with other settings;
    and `NumericalError` if a number is NaN or infinite.
    """
    need("figures")
    make_folder(out)
    with locked(out):
        for part in evaluation.parts(model):
            yield _measured(evaluation, model, Path(out) / part.name, part, progress)


def make_folder(out: str | Path) -> Path:
    """Return a folder, made if need be. Raises `InputError`."""
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{out} cannot be written ({error.strerror}); choose another --out.") from None
    return Path(out)


def _measured(evaluation: Evaluation, model: Any, folder: Path, part: Part, progress: Progress) -> PartResult:
    methods = {name: repr(part.methods.get(name)) for name in (*part.methods, *part.unable)}
    settings = {
        "evaluation": evaluation.name,
        **(model.made_with if model else {"versions": versions()}),
        "methods": methods,
        **({"part": part.name} if part.name else {}),
        **evaluation.settings(),
        **part.settings,
    }
    resumed = (folder / SAMPLES).exists()
    with progress(part.name or evaluation.name) as advance:
        lines = resume(folder, settings, part, advance)
    with _damage_of(folder / SAMPLES) if resumed else nullcontext():
        return _reported(part, folder, settings, lines)


def _reported(part: Part, folder: Path, settings: dict[str, Any], lines: Sequence[Line]) -> PartResult:
    methods = settings["methods"]
    notes, tables = list(part.notes(lines)), {}
    for name, table in part.of(lines).items():
        measured = list(table.lines[0]["methods"]) if table.lines else []
        shown = {method: methods.get(method, "") for method in (*(measured or methods), *part.unable)}
        tables[name] = Results(
            {**settings, "methods": shown}, dict(table.columns), notes, dict(part.unable), list(table.lines)
        )
        (folder / name).mkdir(exist_ok=True)
        report.write(folder / name, tables[name])
    part.write(folder, lines)
    return PartResult(part.name, folder, settings, tables, part.listings(lines), notes, part.unable)


@contextmanager
def _damage_of(path: Path) -> Iterator[None]:
    """Explain what fails on lines that somebody changed."""
    try:
        yield
    except IcebearError:
        raise
    except (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError) as error:
        raise InputError(DAMAGED.format(path)) from error


def resume(folder: str | Path, settings: dict[str, Any], part: Part, on_progress: OnProgress = unwatched) -> list[Line]:
    """Return a line for each sample of a part, kept in `samples.jsonl` with the sample's number; finished samples are
    not measured again.

    Killed at any moment, it keeps every finished sample, or batch of samples that are measured together.
    """
    path = prepare(folder, settings) / SAMPLES
    lines = finished(path, len(part.samples))
    while True:
        if lines:
            on_progress(len(lines), len(part.samples))
        missing = (number for number in range(len(part.samples)) if number not in lines)
        batch = list(islice(missing, part.batch_size or 1))
        if not batch:
            return [line for _, line in sorted(lines.items())]
        samples = [part.samples[number] for number in batch]
        results = part.measure(samples) if part.batch_size else [part.measure(samples[0])]
        measured = dict(zip(batch, results, strict=True))
        try:
            texts = [json.dumps({KEY: n, **x}, ensure_ascii=False, allow_nan=False) + "\n" for n, x in measured.items()]
        except ValueError:
            raise NumericalError("A sample's result is NaN or infinite; try --dtype float32.") from None
        append(path, "".join(texts).encode())
        lines |= measured


def prepare(folder: str | Path, settings: dict[str, Any]) -> Path:
    """Return the folder, made if need be, with its settings. Raises `InputError` where it holds others."""
    path, text = make_folder(folder), json.dumps(settings, ensure_ascii=False, sort_keys=True, indent=1)
    file = path / "settings.json"
    if not file.exists():
        write_file(file, text)
    elif read_text(file) != text:
        raise InputError(
            f"The folder {folder} holds an evaluation with other settings; choose another --out, or delete this folder."
        )
    return path


def finished(path: Path, samples: int) -> dict[int, Line]:
    """Return the lines of a JSON lines file by the number of their sample, the first of each, and cut a last line off
    that was only partly written. Raises `InputError` for a file that no evaluation of so many samples has written."""
    text = existing(path).read_bytes() if os.path.lexists(path) else b""
    complete = text.rfind(b"\n") + 1
    if complete < len(text):
        os.truncate(path, complete)
    lines: dict[int, Line] = {}
    try:
        for row in text[:complete].splitlines():
            line = read_json(row)
            lines.setdefault(range(samples)[line.pop(KEY)], line)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise InputError(DAMAGED.format(path)) from None
    return lines
