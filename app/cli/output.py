"""Where results go: the console, one JSON document, a file, a file of claims; messages go to stderr."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TextIO, cast

import click

import icebear
from icebear.app.cli.progress import waiting
from icebear.app.cli.streams import CONTROL_PICTURES, unfiltered
from icebear.errors import NumericalError
from icebear.paths import write_file
from icebear.points import Naming, in_names
from icebear.values import plural

if TYPE_CHECKING:
    from rich.console import Console

    from icebear.claims.kind import Draft


class _OnStderr(logging.Handler):
    """Looks up stderr for each message, because tests and notebooks replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(self.format(record), err=True)


def log_to_stderr(form: str = "%(message)s") -> None:
    """Send the messages of icebear's loggers, from INFO on, to stderr. A second call changes their form."""
    handler = _OnStderr()
    handler.setFormatter(logging.Formatter(form))
    ours = logging.getLogger("icebear")
    ours.handlers[:] = [handler]
    ours.setLevel(logging.INFO)


def stdout() -> Console:
    from icebear.app.cli.console import SafeConsole

    if sys.stdout.isatty():
        return SafeConsole(highlight=False, file=unfiltered(sys.stdout))
    wanted = os.environ.get("COLUMNS", "")
    width = int(wanted) if re.fullmatch("[1-9][0-9]{1,2}", wanted) else 110
    others = {name: value for name, value in os.environ.items() if name != "COLUMNS"}  # rich reads it as well
    return SafeConsole(highlight=False, width=width, file=cast(TextIO, _Trimmed()), _environ=others)


class _Trimmed:
    """stdout without trailing spaces, which fill the lines of tables."""

    def write(self, text: str) -> int:
        return unfiltered(sys.stdout).write(re.sub(" +\n", "\n", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)


def show(as_json: bool, document: Any, *renderables: Any, names: Naming = "icebear") -> None:
    """Print a result: as one JSON document, or as tables and lines below each other; texts are not wrapped.

    names: the library in whose names neurons and heads are written.

    Raises `NumericalError` for NaN and infinity, which JSON does not have.
    """
    if names != "icebear":
        from icebear.app.cli.tables.naming import renamed, renamed_document

        document, renderables = renamed_document(document, in_names(names)), renamed(renderables, in_names(names))
    if as_json:
        try:
            text = json.dumps(document, ensure_ascii=False, indent=1, allow_nan=False)
        except ValueError:
            raise NumericalError("A number of the result is NaN or infinite; try --dtype float32.") from None
        return click.echo(text.translate({code: f"\\u{code:04x}" for code in CONTROL_PICTURES if code > 32}))
    for renderable in renderables:
        stdout().print(renderable, markup=False, emoji=False, soft_wrap=isinstance(renderable, str))


def write_page(path: str | None, content: Callable[[], str | bytes]) -> None:
    """Write what `content` returns to a file, if a path is given."""
    if path:
        write_file(path, content())
        click.echo(f"Wrote {path}", err=True)


def save(result: Any, path: str | None, **options: Any) -> None:
    """Save a result to a file, if a path is given. options: the other arguments of its `save`."""
    if path:
        result.save(path, **options)
        click.echo(f"Wrote {path}", err=True)


def claim(path: str, model: icebear.Model, drafts: Callable[[], Iterable[Draft]]) -> None:
    """Measure claims, append them to a file, and name those that were refused. Raises `InputError`."""
    from icebear.claims.claims_files import append_drafts

    with waiting("Measuring claims"):
        claims, refused, before = append_drafts(model, path, drafts())
    for sentence in refused:
        click.echo(f"Not claimed: {sentence}", err=True)
    had = f", after the {before} that it had" if before else ""
    click.echo(f"{'Added' if before else 'Wrote'} {plural(len(claims), 'claim')} to {path}{had}", err=True)
