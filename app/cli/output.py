"""Where results go: the console, one JSON document, a file."""

from __future__ import annotations

import json
import os
import re
import sys
from typing import TYPE_CHECKING, Any, TextIO, cast

import click

from icebear.errors import NumericalError
from icebear.paths import write_file

if TYPE_CHECKING:
    from rich.console import Console


def stdout() -> Console:
    from rich.console import Console

    if sys.stdout.isatty():
        return Console(highlight=False)
    wanted = os.environ.get("COLUMNS", "")
    width = int(wanted) if re.fullmatch("[1-9][0-9]{1,2}", wanted) else 110
    others = {name: value for name, value in os.environ.items() if name != "COLUMNS"}  # rich reads it as well
    return Console(highlight=False, width=width, file=cast(TextIO, _Trimmed()), _environ=others)


class _Trimmed:
    """stdout, without the spaces that fill a table's lines up."""

    def write(self, text: str) -> int:
        return sys.stdout.write(re.sub(" +\n", "\n", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)


def print_json(value: Any) -> None:
    """Strictly: JSON knows neither NaN nor infinity."""
    try:
        click.echo(json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False))
    except ValueError:
        raise NumericalError("A number of the result is NaN or infinite; try --dtype float32.") from None


def write_page(path: str, content: str | bytes) -> None:
    write_file(path, content)
    click.echo(f"Wrote {path}", err=True)
