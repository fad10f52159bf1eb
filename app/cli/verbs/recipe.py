"""`icebear recipe`: show saved recipes, check them, combine them, write them into weights."""

from __future__ import annotations

import click

import icebear
from icebear.app.cli.options import FILE, ModelOptions, argument, option, record, verb
from icebear.app.cli.output import show
from icebear.errors import RecipeError


@click.group()
def recipe() -> None:
    """Show, check and combine recipes, or write one into the weights.

    \b
    Example:
      icebear recipe show examples/ice-bear-to-desert.json
    """


@record
class Show:
    file: str = argument(type=FILE)
    json: bool


@verb(Show, recipe)
def show_(options: Show) -> None:
    """Show what a recipe changes and where it comes from. It needs no model.

    Example:
      icebear recipe show examples/ice-bear-to-desert.json
    """
    from icebear.app.cli.terminal import recipe_report

    saved = icebear.Recipe.load(options.file)
    show(options.json, saved.to_dict(), recipe_report(saved))


@record
class Check:
    files: tuple[str, ...] = argument(nargs=-1, required=True, type=FILE)
    json: bool
    model: ModelOptions


@verb(Check, recipe)
def check(options: Check) -> None:
    """Check whether saved flips hold: run each on its prompt. The exit code is 1 if one fails.

    Example:
      icebear recipe check examples/ice-bear-to-desert.json
    """
    from icebear.steering.evaluations.flips import first_tokens

    recipes = {file: icebear.Recipe.load(file) for file in options.files}
    model = options.model.load()
    rows = [{"file": file, **first_tokens(model, saved)} for file, saved in recipes.items()]
    lines = []
    for row in rows:
        first = ", ".join(f"{token['text']!r} {token['probability']:.3f}" for token in row["first"][:3])
        lines.append(f"{'holds' if row['holds'] else 'FAILS'}  {row['file']}  {row['prompt']} → {first}")
    show(options.json, {**model.made_with, "recipes": rows}, *lines)
    if not all(row["holds"] for row in rows):
        raise SystemExit(1)


@record
class Combine:
    files: tuple[str, ...] = argument(nargs=-1, required=True, type=FILE)
    share: float = option("Scale each edit by this share, 0 to 1.", 1.0)
    save: str = option(required=True)
    json: bool


@verb(Combine, recipe)
def combine(options: Combine) -> None:
    """Combine recipes into one, or scale one.

    Example:
      icebear recipe combine examples/ice-bear-to-desert.json --share 0.5 --save half.json
    """
    first, *others = (icebear.Recipe.load(file) for file in options.files)
    total = sum(others, start=first)
    combined = total * options.share if options.share != 1 else total
    combined.save(options.save)
    click.echo(f"Wrote {options.save}", err=True)
    show(options.json, combined.to_dict())


@record
class Patch:
    file: str = argument(type=FILE)
    save: str = option(required=True)
    check_on: str = option("Prompt on which to check the patch.", "The ice bear lives in the")
    json: bool
    model: ModelOptions


@verb(Patch, recipe)
def patch(options: Patch) -> None:
    """Turn the edits of a recipe into weights and biases (a .safetensors file), and compare the result with steering.

    Weights can express only edits that act at all tokens.

    Example:
      icebear recipe patch everywhere.json --save patch.safetensors
    """
    from icebear.steering.weight_patch import difference, new_biases, patch, save_patch

    saved, model = icebear.Recipe.load(options.file), options.model.load()
    weights = patch(model, saved)
    off = difference(model, saved, weights, options.check_on)
    if not off < 1e-3:
        raise RecipeError(f"The patch differs from steering by {off:.1e} of the largest logit, so it was not written.")
    save_patch(model, weights, options.save)
    new, names = list(new_biases(model, weights)), list(weights)
    logits = f"logits differ from steering by {off:.1e} of the largest"
    click.echo(f"Wrote {options.save}: {', '.join(names)}; {logits}", err=True)
    if new:
        click.echo(
            f"The model has no {', '.join(new)}, so load_state_dict would ignore it; load the file with "
            "icebear.apply_patch(net, file).",
            err=True,
        )
    result = {"file": options.save, "weights": names, "new_biases": new, "difference": off}
    show(options.json, {**model.made_with, "recipe": saved.name, **result, "checked_on": options.check_on})
