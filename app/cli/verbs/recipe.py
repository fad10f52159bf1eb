"""`icebear recipe`: show saved recipes, combine them, export them to other software."""

from __future__ import annotations

import click

import icebear
from icebear.app.cli.options import ModelOptions, Verbs, argument, option, record, verb
from icebear.app.cli.output import show
from icebear.errors import RecipeError


@click.group(cls=Verbs)
def recipe() -> None:
    """Show and combine recipes (saved neuron edits), or export one to other software.

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
    patch: str = option(
        "Write weights and biases to this .safetensors file, for transformers.", type="output", required=True
    )
    check_on: str = option("Prompt after which the result is compared with steering.", "The ice bear lives in the")
    json: bool
    model: ModelOptions


@verb(Export, recipe)
def export(options: Export) -> None:
    """Turn the edits of a recipe into a file that other software loads, and compare the result with steering.

    --patch writes weights and biases, which can express only edits that act at all tokens. The command refuses edits
    that the file cannot express exactly.

    Example:
      icebear recipe export everywhere.json --patch patch.safetensors
    """
    from icebear.steering.weight_patch import difference, new_biases, patch, save_patch

    saved, model = icebear.Recipe.load(options.file), options.model.load()
    weights = patch(model, saved)
    off = difference(model, saved, weights, options.check_on)
    if not off < 1e-3:
        raise RecipeError(
            f"The export would differ from steering by {off:.1e} of the largest logit, so nothing was written; please "
            "report this."
        )
    save_patch(model, weights, options.patch)
    new, names = list(new_biases(model, weights)), list(weights)
    click.echo(
        f"Wrote {options.patch}: {', '.join(names)}; logits differ from steering by {off:.1e} of the largest", err=True
    )
    if new:
        click.echo(
            f"The model has no {', '.join(new)}, so load_state_dict would ignore it; load the file with "
            "icebear.apply_patch(net, file).",
            err=True,
        )
    result = {"file": options.patch, "weights": names, "new_biases": new, "difference": off}
    show(options.json, {**model.made_with, "recipe": saved.name, **result, "checked_on": options.check_on})
