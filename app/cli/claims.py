"""`--claim FILE`: append what a verb measured to a file of claims."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

import icebear
from icebear.app.cli.progress import waiting

if TYPE_CHECKING:
    from icebear.claims.kind import Draft


def claim(path: str, model: icebear.Model, drafts: Callable[[], Iterable[Draft]], seed: int = 0) -> None:
    """Measure claims, append them to a file, and name those that were refused. Raises `InputError`."""
    from icebear.claims.files import append_drafts

    with waiting("Measuring claims"):
        claims, refused = append_drafts(model, path, drafts(), seed)
    for sentence in refused:
        click.echo(f"Not claimed: {sentence}", err=True)
    click.echo(f"Wrote {len(claims)} claim{'s' * (len(claims) != 1)} to {path}", err=True)


def models_of(claims: Iterable[Any], default: str) -> dict[str, list[Any]]:
    """Return the claims by the name of the model that they were made with."""
    groups: dict[str, list[Any]] = {}
    for one in claims:
        groups.setdefault(one.provenance.model if one.provenance else default, []).append(one)
    return groups
