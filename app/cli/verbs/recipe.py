"""`icebear recipe`: show saved recipes, combine them, export them to llama.cpp."""

from __future__ import annotations

import click

import icebear
from icebear.app.cli.options import ModelOptions, Verbs, argument, option, record, verb
from icebear.app.cli.output import show


@click.group(cls=Verbs)
def recipe() -> None:
    """Show and combine recipes (saved edits), or export one to llama.cpp.

    \b
    Example:
      icebear recipe show examples/ice-bear-to-desert.json
    """


@record
class Show:
    file: str = argument(type="file")
    json: bool


@verb(Show, recipe)
def show_(options: Show) -> None:
    """Show what a recipe changes and where it comes from. It needs no model.

    Example:
      icebear recipe show examples/ice-bear-to-desert.json
    """
    from icebear.app.cli.tables.steering import recipe_report

    saved = icebear.Recipe.load(options.file)
    show(options.json, saved.to_dict(), recipe_report(saved))


@record
class Combine:
    files: tuple[str, ...] = argument(nargs=-1, required=True, type="file")
    share: float = option("Scale each edit by this share, 0 to 1.", 1.0)
    save: str = option(required=True)
    json: bool


@verb(Combine, recipe)
def combine(options: Combine) -> None:
    """Combine recipes into one, or scale one.

    Example:
      icebear recipe combine examples/ice-bear-to-desert.json --share 0.5 --save half.json
    """
    recipe, *others = (icebear.Recipe.load(file) for file in options.files)
    total = sum(others, start=recipe)
    combined = total * options.share if options.share != 1 else total
    combined.save(options.save, overwrite=True)
    click.echo(f"Wrote {options.save}", err=True)
    show(options.json, combined.to_dict())


@record
class Export:
    file: str = argument(type="file")
    gguf: str = argument(type="output")
    json: bool
    model: ModelOptions


@verb(Export, recipe)
def export(options: Export) -> None:
    """Write a recipe's vector to a .gguf file, which llama.cpp adds with --control-vector.

    The recipe is one of icebear concept steer NAME PROMPT --detector means --save FILE.

    Example:
      icebear recipe export music-vector.json music.gguf
    """
    from icebear.steering.control_vector import save_control_vector

    saved, model = icebear.Recipe.load(options.file), options.model.load()
    layers = save_control_vector(model, saved, options.gguf)
    click.echo(f"Wrote {options.gguf}: llama.cpp -m MODEL.gguf --control-vector {options.gguf}", err=True)
    show(options.json, {**model.made_with, "recipe": saved.name, "file": options.gguf, "layers": layers})
