"""Measure the sources of an answer: its progress, and Ctrl-C, which keeps what is measured."""

from __future__ import annotations

from typing import Any

import click

import icebear
from icebear.app.cli.progress import bar
from icebear.stopping import interruptible

SAY_FROM_SECONDS = 5.0
"""Seconds from which on the expected time is printed."""


def measured_sources(model: icebear.Model, answer: Any, **options: Any) -> icebear.Sources:
    """Call `sources` with progress on stderr. Ctrl-C ends it, and what is measured is the result."""
    with bar("sources removed") as move, interruptible():
        return icebear.sources(model, answer, **options, on_progress=move, on_expected=_say)


def _say(seconds: float) -> None:
    if seconds >= SAY_FROM_SECONDS:
        about = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
        click.echo(f"Removing sources takes about {about}; Ctrl-C keeps what is measured.", err=True)
