"""`icebear recipe`: show saved recipes, combine them, export them as control vectors, and read these."""

from __future__ import annotations

from pathlib import Path

import click

import icebear
from icebear.app.cli.options import ModelOptions, Verbs, argument, option, record, verb
from icebear.app.cli.output import save, show


@click.group(cls=Verbs)
def recipe() -> None:
    """Show and combine recipes (saved edits), export one as a control vector, or read a control vector.

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
    save(combined, options.save, overwrite=True)
    show(options.json, combined.to_dict())


@record
class Export:
    file: str = argument(type="file")
    vector: str = argument(type="output")
    json: bool
    model: ModelOptions


@verb(Export, recipe)
def export(options: Export) -> None:
    """Write a recipe's vector to a .gguf file, which llama.cpp and repeng read, or to a .pt file, which hotwire reads.

    The recipe must hold a vector, as one of icebear concept steer NAME PROMPT --detector means --save FILE does.

    Example:
      icebear recipe export music-vector.json music.gguf
    """
    saved, model = icebear.Recipe.load(options.file), options.model.load()
    from icebear.steering.control_vector import save_control_vector

    layers = save_control_vector(model, saved, options.vector)
    file = Path(options.vector)
    use = f"llama.cpp -m MODEL.gguf --control-vector {file}"
    if file.suffix.lower() == ".pt":
        use = " ".join(f'{{"id": "{file.stem}", "layer": {layer}, "scale": 1}}' for layer in layers)
    click.echo(f"Wrote {file}: {use}", err=True)
    show(options.json, {**model.made_with, "recipe": saved.name, "file": options.vector, "layers": layers})


@record
class Import:
    vector: str = argument(type="file")
    file: str = argument(type="output")
    layer: int | None = option("The layer whose vector is used.", show_default="all layers")
    json: bool
    model: ModelOptions


@verb(Import, recipe)
def import_(options: Import) -> None:
    """Read a control vector (a .gguf file of llama.cpp or repeng, or a .pt file of hotwire) and save it as a recipe.

    Example:
      icebear recipe import music.gguf music.json
    """
    model = options.model.load()
    from icebear.app.cli.tables.steering import recipe_report
    from icebear.steering.control_vector import read_control_vector

    recipe = read_control_vector(model, options.vector, options.layer)
    save(recipe, options.file)
    show(options.json, recipe.to_dict(), recipe_report(recipe))
