"""`icebear export`: write what other programs read."""

from __future__ import annotations

import hashlib
import os
from importlib.metadata import version
from pathlib import Path

import click

import icebear
from icebear.app.cli.options import ModelOptions, Verbs, argument, record, verb
from icebear.app.cli.output import show
from icebear.app.cli.progress import bar
from icebear.app.cli.stores import store_or_shipped
from icebear.errors import InputError
from icebear.paths import read_text, write_file
from icebear.records import Neuron


@click.group(cls=Verbs)
def export() -> None:
    """Write what other programs read: an index as Neuronpedia's dashboards, or a skill for coding agents.

    \b
    Example:
      icebear export neuronpedia --store wiki.db --out dashboards
    """


@record
class Neuronpedia:
    neurons: tuple[str, ...] = argument(nargs=-1)
    out: str
    store: str
    json: bool
    model: ModelOptions


@verb(Neuronpedia, export)
def neuronpedia(options: Neuronpedia) -> None:
    """Write dashboards of NEURONS, or of all neurons of an index, for Neuronpedia's upload.

    A source is a layer at a polarity, such as 29-ffn-plus. Each file has at most 128 neurons of a source: density,
    logits, labels with their scores, and the maximally activating sentences. The index keeps only the largest
    activation of each sentence, so all its other tokens have the value 0. The model is loaded only to prepare the index
    that comes with icebear.

    Example:
      icebear export neuronpedia --store wiki.db --out dashboards
      icebear export neuronpedia L29.ffn.860 L21.ffn.780 --out two
    """
    from icebear.actmax.neuronpedia_export import estimated_size, export_dashboards, neurons_of

    named = [Neuron.parse(name, options.model.model) for name in options.neurons] or None
    path = store_or_shipped(options.store, options.model.load, options.model.model)
    with icebear.open_store(path) as store:
        neurons = neurons_of(store, named)
        size = estimated_size(store, neurons)
        about = f"{size / 1e6:,.0f} MB" if size > 1e6 else f"{size / 1e3:,.0f} kB"
        click.echo(f"Writing dashboards of {len(neurons):,} neurons, about {about}", err=True)
        with bar("neurons") as move:
            counts, made_with = export_dashboards(store, options.out, move, named), store.made_with()
    numbers = ", ".join(f"{count:,} {what}" for what, count in counts.items())
    show(options.json, {**made_with, "folder": options.out, "counts": counts}, f"Wrote {options.out}: {numbers}")


HEAD = """---
name: icebear
description: Find the neurons and attention heads behind a language model's prediction, measure whether they matter,
  with random controls, and steer the model with them. Use it for questions about why a model says something, what a
  neuron does, or how to change an answer.
license: Apache-2.0
compatibility: Needs Python 3.11 or later and the package icebear (pip install icebear).
metadata:
  version: "VERSION"
---

"""


SEAL = "\n<!-- icebear replaces this file while it is as written: {} -->\n"
"""The end of the file, with the digest of what is before it."""


def _as_written(text: str) -> bool:
    written, mark, _ = text.rpartition(SEAL.partition("{")[0])
    return bool(mark) and text == written + SEAL.format(_digest(written))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@record
class Skill:
    out: str
    json: bool


@verb(Skill, export)
def skill(options: Skill) -> None:
    """Write SKILL.md, from which a coding agent learns to use icebear. Agents expect a folder of the name icebear.

    The file of an earlier version is replaced, unless you changed it.

    Example:
      icebear export skill --out .claude/skills/icebear
    """
    text = HEAD.replace("VERSION", version("icebear")) + read_text(Path(icebear.__file__).parent / "AGENTS.md")
    folder = Path(options.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"The folder {folder} cannot be made ({error.strerror}); choose another one.") from None
    file = folder / "SKILL.md"
    if not Path(os.path.realpath(file)).is_relative_to(os.path.realpath(folder)):
        raise InputError(f"{file} is a link out of the folder; remove the link, or choose another folder.")
    if os.path.lexists(file) and not _as_written(read_text(file)):
        raise InputError(f"{file} exists, and is not as icebear wrote it; rename it, or choose another folder.")
    write_file(file, f"{text}{SEAL.format(_digest(text))}")
    click.echo(f"Wrote {file}", err=True)
    show(options.json, {"files": [str(file)]})
