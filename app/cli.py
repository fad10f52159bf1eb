"""The `icebear` command: each verb is thin over the library."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from app.evaluate import evaluate
from app.flip_verbs import VERBS as FLIP_VERBS
from app.options import (
    explain_options,
    html_option,
    json_option,
    load,
    method_named,
    model_options,
    print_json,
    stdout,
    write_page,
)
from app.store_verbs import VERBS as STORE_VERBS
from icebear.errors import IcebearError, out_of_memory

EXAMPLE_RECIPE = Path(__file__).parent / "recipes" / "ice-bear-to-desert.json"


class Group(click.Group):
    """Shows the toolkit's errors as one sentence, keeps the verbs in the order they are written."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            known = error if isinstance(error, IcebearError) else out_of_memory(error)
            if known is None:
                raise
            click.echo(f"icebear: {known}", err=True)
            sys.exit(1)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="icebear")
def main() -> None:
    """Find the neurons a language model used, see what they mean, and turn them."""


@main.command()
def demo() -> None:
    """The ice bear, end to end, in a terminal.

    \b
    Example:
      icebear demo
    """
    from app.demo import run

    run(stdout())


@main.command()
@json_option
def models(as_json: bool) -> None:
    """List presets, families and what is cached.

    \b
    Example:
      icebear models
    """
    from concepts.models.families import FAMILIES
    from concepts.models.presets import PRESETS
    from icebear.cache import cache_folder, cached

    presets = [
        {"name": p.name, "about": p.about, "download_mb": p.download // 1_000_000, "cached": cached(p.folder)}
        for p in PRESETS.values()
    ]
    if as_json:
        print_json({"presets": presets, "families": list(FAMILIES), "cache": str(cache_folder())})
        return
    for preset in presets:
        state = "cached" if preset["cached"] else f"{preset['download_mb']} MB to fetch"
        click.echo(f"{preset['name']:<19} {preset['about']} [{state}]")
    click.echo(f"families: {', '.join(FAMILIES)}")
    click.echo(f"cache: {cache_folder()}")


@main.command()
@click.argument("prompt", required=False)
@explain_options
@click.option("--target-text", help="Explain a whole continuation instead of one token.")
@click.option("--checkpoint", is_flag=True, help="Less memory for long prompts, more time.")
@click.option("--image", type=click.Path(), help="An image instead of PROMPT, for an image classifier.")
@click.option("--png", type=click.Path(dir_okay=False), help="With --image: write the image under its relevance.")
@html_option
@json_option
@model_options
def attribute(
    prompt: str | None, target: str | None, contrast: str | None, prefix: str | None, at: int | None, method: str,
    target_text: str | None, checkpoint: bool, image: str | None, png: str | None, html: str | None, as_json: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Which tokens of PROMPT (or parts of an image) carried the prediction.

    \b
    Example:
      icebear attribute "The ice bear lives in the" --contrast " desert"
    """
    from app.terminal import explanation
    from concepts.attribution import attribute as run

    if (prompt is None) == (image is None):
        raise click.UsageError("Give either a PROMPT or --image.")
    if png and not image:
        raise click.UsageError("--png goes with --image.")
    chosen = method_named(method)
    model = load(**options)
    if model.task.reads_text is bool(image):
        raise click.UsageError(f"{model.name} reads {'images: give --image' if not image else 'text: give a PROMPT'}.")
    what: Any = image or prompt
    relevance = run(
        model, what, target, contrast, target_text=target_text, method=chosen, prefix=prefix, at=at,
        checkpoint=checkpoint,
    )  # fmt: skip
    if html:
        write_page(html, relevance.to_html())
    if png:
        write_page(png, relevance.image.png())  # type: ignore[union-attr]
    if as_json:
        print_json(relevance.to_dict())
    else:
        stdout().print(explanation(relevance))


@main.command()
@click.argument("prompt")
@explain_options
@click.option("--site", help="ffn, attn, q, k, v, head, cross or router; default: ffn and attn.")
@click.option("--polarity", type=click.Choice(["+", "-"]), help="Only neurons whose activation has this sign.")
@click.option("--top", default=20, show_default=True, type=click.IntRange(min=1))
@click.option("--position", default="last", show_default=True, help="last, all, or a token's position.")
@click.option("--include-sinks", is_flag=True, help="With --position all: rank sink positions too.")
@json_option
@model_options
def rank(
    prompt: str, target: str | None, contrast: str | None, prefix: str | None, at: int | None, method: str,
    site: str | None, polarity: Any, top: int, position: str, include_sinks: bool, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """The neurons that carried the prediction after PROMPT, by signed relevance.

    \b
    Example:
      icebear rank "The ice bear lives in the" --contrast " desert" --site ffn --top 5
    """
    from app.terminal import explanation, ranking
    from concepts.attribution import attribute as run
    from concepts.relevance import ranked_dict
    from concepts.vocabulary import project_many

    chosen = method_named(method)
    model = load(**options)
    sites = ("attn",) if site == "head" else (site,) if site else ("ffn", "attn")
    relevance = run(model, prompt, target, contrast, method=chosen, sites=sites, prefix=prefix, at=at)
    found = relevance.top(top, site, polarity, _position(position), include_sinks)  # type: ignore[arg-type]
    writers = [row.neuron for row in found if row.neuron.site in ("ffn", "attn", "cross")]
    words = dict(zip(writers, project_many(model, writers, 5), strict=True))
    if as_json:
        rows = [
            {**ranked_dict(row), "promotes": words[row.neuron].words(row.polarity) if row.neuron in words else None}
            for row in found
        ]
        print_json({**relevance.to_dict(0), "position": position, "ranking": rows})
        return
    console = stdout()
    console.print(explanation(relevance))
    where = {"all": "at every token", "last": "where it is predicted"}.get(position, f"at position {position}")
    apart = f", sinks {list(relevance.sinks)} apart" if position == "all" and not include_sinks else ""
    console.print(ranking(found, relevance, words, f"Most relevant neurons {where}{apart}"))


def _position(text: str) -> Any:
    from icebear.errors import InputError

    if text in ("last", "all"):
        return text
    try:
        return int(text)
    except ValueError:
        raise InputError(f"--position {text!r} is not last, all or a number.") from None


@main.command()
@click.argument("neuron")
@click.option("--top", default=10, show_default=True, type=click.IntRange(min=1))
@json_option
@model_options
def project(neuron: str, top: int, as_json: bool, **options: Any) -> None:
    """The vocabulary that NEURON promotes and suppresses.

    \b
    Example:
      icebear project L29.ffn.860 --top 5
    """
    from app.terminal import projection
    from concepts.models.provenance import provenance
    from concepts.vocabulary import project as run
    from icebear.records import Neuron

    wanted = Neuron.parse(neuron)
    model = load(**options)
    result = run(model, wanted, top)
    if as_json:
        print_json({**result.to_dict(), **provenance(model)})
    else:
        stdout().print(projection(result))


@main.command()
@click.argument("prompt")
@click.option("--edit", "edits", multiple=True, help="Such as L29.ffn.860*0, L29.ffn.490=-6.2, L24.ffn.559+5@last.")
@click.option("--recipe", type=click.Path(), help="A saved recipe.")
@click.option("--max-new-tokens", default=40, show_default=True, type=click.IntRange(min=1))
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(min=0), help="0: greedy.")
@click.option("--seed", default=0, show_default=True, help="Of the draws at a temperature above 0.")
@click.option("--store", "store_path", help="The index that knows max and std, for edits in those units.")
@json_option
@model_options
def steer(
    prompt: str, edits: tuple[str, ...], recipe: str | None, max_new_tokens: int, temperature: float, seed: int,
    store_path: str | None, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Generate after PROMPT without and with edited neurons.

    \b
    Example:
      icebear steer "The ice bear lives in the" --edit "L29.ffn.860=-20" --max-new-tokens 10
    """
    from app.sidebyside import compare
    from app.terminal import side_by_side
    from db.store import open_store
    from steering.edits import parse_edits
    from steering.recipe import Recipe

    if bool(edits) == bool(recipe):
        raise click.UsageError("Give either --edit (as often as you like) or --recipe.")
    wanted: Any = Recipe.load(recipe) if recipe else parse_edits(edits)
    model = load(**options)
    with ExitStack() as stack:
        statistic = None
        if store_path:
            store = stack.enter_context(open_store(store_path, create=False))
            store.check(model.fingerprint, model.name)
            statistic = store.statistic
        result = compare(model, prompt, wanted, max_new_tokens, statistic, temperature, seed)
    if as_json:
        print_json(result)
    else:
        stdout().print(side_by_side(result))


for verb in (*FLIP_VERBS, *STORE_VERBS, evaluate):
    main.add_command(verb)


@main.command()
@json_option
@model_options
@click.option("--checksum", type=click.Path(dir_okay=False), help="Print the checksum of this store's results only.")
@click.option("--store", "store_path", help="Say whether this index fits the model.")
def doctor(as_json: bool, checksum: str | None, store_path: str | None, **options: Any) -> None:
    """Versions, import roots, cache, a self-test of the model, and whether a store fits it.

    \b
    Example:
      icebear doctor --model smollm2-135m
    """
    from app.doctor import examine
    from db.store import open_store

    if checksum:
        with open_store(checksum, create=False) as store:
            value = store.checksum()
        click.echo(json.dumps({"checksum": value}) if as_json else value)
        return
    facts = examine(lambda: load(**options), store_path)
    if as_json:
        print_json(facts)
    else:
        for name, value in facts.items():
            click.echo(f"{name:<12} {value}")
    if "error" in facts:
        sys.exit(1)


if __name__ == "__main__":
    main()
