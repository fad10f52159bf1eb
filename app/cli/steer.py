"""The verbs that turn neurons: steer, flip, and recipe, which shows recipes, combines them, makes them permanent."""

from __future__ import annotations

from typing import Any

import click

from icebear.app.cli.options import (
    AT_LEAST_1,
    CHAT,
    FILE,
    MODEL,
    conversation,
    known_of,
    likewise,
    lines,
    load,
    options,
    print_json,
    stdout,
    store_if_any,
    told_of,
)
from icebear.app.cli.progress import bar


@click.command()
@click.argument("prompt", required=False)
@options(*CHAT)
@click.option("--edit", "edits", multiple=True, help="Such as L29.ffn.860*0, L29.ffn.490=-6.2, L24.ffn.559+5@last.")
@click.option("--recipe", type=FILE, help="A saved recipe.")
@options("--max-new-tokens")
@options("--temperature", "--seed", "--store", "--json", *MODEL)
def steer(
    prompt: str | None,
    edits: tuple[str, ...],
    recipe: str | None,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    store_path: str,
    as_json: bool,
    **given: Any,
) -> None:
    """Generate after PROMPT without and with edited neurons.

    \b
    Example:
      icebear steer "The ice bear lives in the" --edit "L29.ffn.860=-20" --max-new-tokens 10
    """
    from icebear.app.cli.terminal import side_by_side
    from icebear.edits import parse_edits
    from icebear.recipe import Recipe
    from icebear.steering.comparison import compare

    if bool(edits) == bool(recipe):
        raise click.UsageError("Give either --edit (as often as you like) or --recipe.")
    wanted: Any = Recipe.load(recipe) if recipe else parse_edits(edits)
    asked = _prompt(prompt, given)
    model = load(**given)
    with store_if_any(store_path, model) as store:  # it knows max and std, for edits in those units
        statistic = store.neurons.statistic if store else None
        result = compare(model, asked, wanted, max_new_tokens, statistic, temperature, seed)
    if as_json:
        print_json(result.to_dict())
    else:
        stdout().print(side_by_side(result))


def _prompt(prompt: str | None, given: dict[str, Any]) -> Any:
    asked = conversation(prompt, given)
    if asked is None:
        raise click.UsageError("Give either a PROMPT or --messages.")
    return asked


@click.command()
@click.argument("prompt", required=False)
@options(*CHAT)
@click.option("--to", help="The token, or the phrase, that shall come next.")
@options("--suppress")
@click.option("--suppress-phrase", help="Suppress this phrase, which comes now.")
@click.option("--top-k", type=AT_LEAST_1, help="With --suppress: how many first tokens it leaves.  [default: 5]")
@click.option("--source", help="A source prompt, which the wanted token follows.")
@options("--max-neurons")
@click.option("--neutral", type=FILE, help="Texts that the edits should leave alone: a file, a line each.")
@click.option("--budget", type=float, help="Say when it costs more KL than this at neutral places, in nats.")
@click.option(
    "--paraphrases", type=FILE, help="Prompts that say the same; it shall do it for all: a file, a line each."
)
@click.option("--unbounded", is_flag=True, help="Let neurons leave their activation range.")
@options("--save", "--store", "--json", *MODEL)
def flip(
    prompt: str | None,
    to: str | None,
    suppress: bool,
    suppress_phrase: str | None,
    top_k: int | None,
    source: str | None,
    max_neurons: int,
    neutral: str | None,
    budget: float | None,
    paraphrases: str | None,
    unbounded: bool,
    save: str | None,
    store_path: str,
    as_json: bool,
    **given: Any,
) -> None:
    """The few neurons that change the answer to PROMPT, a token or a phrase, and what it costs.

    Where there is a store, what it finds for the token is tried as well, and examples are told.

    \b
    Example:
      icebear flip "The ice bear lives in the" --to " desert" --source "The camel lives in the"
    """
    from icebear.app.cli.terminal import meanings, recipe_table
    from icebear.concepts.corpus import held_out
    from icebear.errors import DownloadError, InputError
    from icebear.steering.flipping.search import flip as run
    from icebear.steering.side_effects import NEUTRAL, side_effects, token_rows

    asked, gone = _prompt(prompt, given), suppress_phrase or suppress
    if (to is None) is not bool(gone) or (suppress and suppress_phrase):
        raise click.UsageError("Say either --to TOKEN, --suppress or --suppress-phrase PHRASE.")
    if top_k and not gone:
        raise click.UsageError("--top-k is for --suppress.")
    texts = lines(neutral) if neutral else NEUTRAL
    model = load(**given)
    token_rows(model, texts)
    try:
        held = held_out()
    except (DownloadError, InputError) as error:  # no network, or no package that finds sentences
        held = []
        click.echo(f"The perplexity is that of the neutral texts, not of Wikipedia. {error}", err=True)
    with store_if_any(store_path, model) as store, bar("flip", max_neurons) as advance:
        origin = None if source is None else likewise(asked, source)
        same = lines(paraphrases) if paraphrases else []
        found = run(
            model, asked, to, origin, max_neurons, gone, top_k or 5, store, advance, unbounded, paraphrases=same
        )
        known = known_of(store, [(edit.neuron, "+" if edit.value >= 0 else "-") for edit in found])
    with bar("side effects"):
        effects = side_effects(model, found, texts, held, budget=budget)
    found = found.noting(**effects.provenance())
    if not found:
        click.echo("It is so already: there is nothing to edit.", err=True)
    if as_json:
        print_json({**found.to_dict(), **told_of(known)})
    else:
        stdout().print(recipe_table(found), *([meanings(known)] if known else []))
    if save:  # last, so that a path that cannot be written loses nothing
        found.save(save)
        click.echo(f"Wrote {save}", err=True)


@click.group()
def recipe() -> None:
    """Look at recipes, combine them, make them permanent.

    \b
    Example:
      icebear recipe show examples/ice-bear-to-desert.json
    """


@recipe.command()
@click.argument("file", type=FILE)
@options("--json")
def show(file: str, as_json: bool) -> None:
    """What a recipe changes, and where it came from; needs no model.

    \b
    Example:
      icebear recipe show examples/ice-bear-to-desert.json
    """
    from icebear.app.cli.terminal import recipe_table
    from icebear.recipe import Recipe

    found = Recipe.load(file)
    if as_json:
        print_json(found.to_dict())
    else:
        stdout().print(recipe_table(found))


@recipe.command()
@click.argument("files", nargs=-1, required=True, type=FILE)
@options("--json", *MODEL)
def check(files: tuple[str, ...], as_json: bool, **given: Any) -> None:
    """Whether saved flips hold: run each on its prompt. Exits with 1 if one does not.

    \b
    Example:
      icebear recipe check examples/ice-bear-to-desert.json
    """
    from icebear.concepts.models.provenance import provenance
    from icebear.recipe import Recipe
    from icebear.steering.evaluations.flips import first_tokens

    found = [Recipe.load(file) for file in files]
    model = load(**given)
    rows = [{"file": file, **first_tokens(model, recipe)} for file, recipe in zip(files, found, strict=True)]
    if as_json:
        print_json({**provenance(model), "recipes": rows})
    else:
        for row in rows:
            first = ", ".join(f"{token['text']!r} {token['probability']:.3f}" for token in row["first"][:3])
            click.echo(f"{'holds' if row['holds'] else 'FAILS'}  {row['file']}  {row['prompt']} → {first}")
    if not all(row["holds"] for row in rows):
        raise SystemExit(1)


@recipe.command()
@click.argument("files", nargs=-1, required=True, type=FILE)
@click.option("--share", default=1.0, show_default=True, help="How much of its way each edit goes.")
@options("--save", required=True)
@options("--json")
def combine(files: tuple[str, ...], share: float, save: str, as_json: bool) -> None:
    """Several recipes as one, or one at another strength.

    \b
    Example:
      icebear recipe combine examples/ice-bear-to-desert.json --share 0.5 --save half.json
    """
    from icebear.recipe import Recipe

    first, *others = (Recipe.load(file) for file in files)
    total = sum(others, start=first)
    found = total * share if share != 1 else total
    found.save(save)
    click.echo(f"Wrote {save}", err=True)
    if as_json:
        print_json(found.to_dict())


@recipe.command()
@click.argument("file", type=FILE)
@options("--save", required=True)
@click.option("--check-on", default="The ice bear lives in the", show_default=True, help="A prompt to check it on.")
@options("--json", *MODEL)
def patch(file: str, save: str, check_on: str, as_json: bool, **given: Any) -> None:
    """The weights and biases that make a recipe permanent, where weights can express it, checked against steering.

    They are saved as .safetensors.

    \b
    Example:
      icebear recipe patch everywhere.json --save patch.safetensors
    """
    from icebear.concepts.models.provenance import provenance
    from icebear.errors import RecipeError
    from icebear.recipe import Recipe
    from icebear.steering.weight_patch import difference, new_biases, save_patch
    from icebear.steering.weight_patch import patch as run

    found, model = Recipe.load(file), load(**given)
    weights = run(model, found)
    off = difference(model, found, weights, check_on)
    if not off < 1e-3:
        raise RecipeError(
            f"The patch would differ from steering by {off:.1e} of the largest logit; nothing was written."
        )
    save_patch(model, weights, save)
    new = list(new_biases(model, weights))
    click.echo(
        f"Wrote {save}: {', '.join(weights)}; logits differ from steering's by {off:.1e} of the largest", err=True
    )
    if new:
        click.echo(
            f"The model has no {', '.join(new)}, and load_state_dict would leave it out: load the file with "
            "icebear.steering.apply_patch(net, file).",
            err=True,
        )
    if as_json:
        told = {"file": save, "weights": list(weights), "new_biases": new, "difference": off, "checked_on": check_on}
        print_json({**provenance(model), "recipe": found.name, **told})


VERBS = (steer, flip, recipe)
