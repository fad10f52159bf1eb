"""`icebear app`: everything in the browser."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from icebear.app.cli.options import ModelOptions, option, record, verb
from icebear.extras import need


@record
class Options:
    store: str
    port: int = option("The port on this machine.", 8501, type=click.IntRange(1, 65535), advanced=True)
    model: ModelOptions


@verb(Options)
def app(options: Options) -> None:
    """Explain, search and steer in the browser, on this machine only.

    \b
    Example:
      icebear app --store wiki.db
    """
    from icebear.app.cli.launch import launch

    need("app")
    settings = {"store": options.store, **asdict(options.model)}
    launch(options.port, {f"ICEBEAR_APP_{name.upper()}": _as_text(value) for name, value in settings.items()})


def _as_text(value: Any) -> str:
    """For a variable of the environment: nothing is empty, a flag is 0 or 1."""
    return "" if value is None else str(int(value)) if isinstance(value, bool) else str(value)
