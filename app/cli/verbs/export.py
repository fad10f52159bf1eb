"""`icebear export`: write what other programs read."""

from __future__ import annotations

from pathlib import Path

import click

import icebear
from icebear.app.cli.options import Verbs, record, verb
from icebear.app.cli.output import show
from icebear.errors import InputError
from icebear.paths import read_text, write_file


@click.group(cls=Verbs)
def export() -> None:
    """Write what other programs read: a skill for coding agents.

    \b
    Example:
      icebear export skill --out .claude/skills/icebear
    """


HEAD = """---
name: icebear
description: Find the neurons and attention heads behind a language model's prediction, measure whether they matter,
  with random controls, and steer the model with them. Use it for questions about why a model says something, what a
  neuron does, or how to change an answer.
license: Apache-2.0
---

"""


@record
class Skill:
    out: str
    json: bool


@verb(Skill, export)
def skill(options: Skill) -> None:
    """Write SKILL.md, from which a coding agent learns to use icebear. Agents expect a folder of the name icebear.

    Example:
      icebear export skill --out .claude/skills/icebear
    """
    guide = read_text(Path(icebear.__file__).parent / "AGENTS.md")
    folder = Path(options.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"The folder {folder} cannot be made ({error.strerror}); choose another one.") from None
    write_file(folder / "SKILL.md", HEAD + guide)
    click.echo(f"Wrote {folder / 'SKILL.md'}", err=True)
    show(options.json, {"files": [str(folder / "SKILL.md")]})
