"""The `icebear` command: each verb is thin over the library."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from db.errors import IcebearError

if TYPE_CHECKING:
    from rich.console import Console

    from concepts.models import Model

EXAMPLE_RECIPE = Path(__file__).parent / "recipes" / "ice-bear-to-desert.json"


class Group(click.Group):
    """Shows the toolkit's errors as one sentence, keeps the verbs in the order they are written."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except IcebearError as error:
            click.echo(f"icebear: {error}", err=True)
            sys.exit(1)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="icebear")
def main() -> None:
    """Find the neurons a language model used, see what they mean, and turn them."""
    from app.roots import check_roots

    check_roots()


def model_options(command: Callable) -> Callable:
    for option in (
        click.option("--accept-terms", is_flag=True, help="Accept the terms of a preset that has them."),
        click.option("--dtype", help="float32, bfloat16, float16; default: what suits the device."),
        click.option("--device", default="auto", show_default=True, help="cuda, mps or cpu."),
        click.option("--model", "model_name", default="smollm2-135m", show_default=True,
                     help="A preset, hub id, folder or .gguf file."),
    ):  # fmt: skip
        command = option(command)
    return command


json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")


def _load(model_name: str, device: str, dtype: str | None, accept_terms: bool) -> Model:
    from concepts.models import load_model

    return load_model(model_name, device=device, dtype=dtype, accept_terms=accept_terms)


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=110)


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, ensure_ascii=False, indent=1))


@main.command()
def demo() -> None:
    """The ice bear, end to end, in a terminal.

    \b
    Example:
      icebear demo
    """
    from app.demo import run

    run(_console())


@main.command()
@json_option
def models(as_json: bool) -> None:
    """List presets, families and what is cached.

    \b
    Example:
      icebear models
    """
    from concepts.families import FAMILIES
    from concepts.presets import PRESETS
    from db.fetch import cache_folder, cached

    presets = [
        {"name": p.name, "about": p.about, "download_mb": p.download // 1_000_000, "cached": cached(p.folder)}
        for p in PRESETS.values()
    ]
    if as_json:
        _print_json({"presets": presets, "families": list(FAMILIES), "cache": str(cache_folder())})
        return
    for preset in presets:
        state = "cached" if preset["cached"] else f"{preset['download_mb']} MB to fetch"
        click.echo(f"{preset['name']:<14} {preset['about']} [{state}]")
    click.echo(f"families: {', '.join(FAMILIES)}")
    click.echo(f"cache: {cache_folder()}")


def explain_options(command: Callable) -> Callable:
    for option in (
        click.option("--method", default="attnlrp", show_default=True, help="attnlrp or cp-lrp."),
        click.option("--contrast", help="Explain the target against this token."),
        click.option("--target", help="The next token to explain; default: the most probable one."),
    ):
        command = option(command)
    return command


def _method(name: str) -> Any:
    from concepts.lrp.method import METHODS
    from db.errors import UnknownName

    if name not in METHODS:
        raise UnknownName("method", name, METHODS, f"The methods are {', '.join(METHODS)}.")
    return METHODS[name]


@main.command()
@click.argument("prompt")
@explain_options
@click.option("--target-text", help="Explain a whole continuation instead of one token.")
@click.option("--checkpoint", is_flag=True, help="Less memory for long prompts, more time.")
@click.option("--html", type=click.Path(dir_okay=False), help="Write a self-contained heatmap page.")
@json_option
@model_options
def attribute(
    prompt: str, target: str | None, contrast: str | None, method: str, target_text: str | None,
    checkpoint: bool, html: str | None, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Which tokens of PROMPT carried the prediction.

    \b
    Example:
      icebear attribute "The ice bear lives in the" --contrast " desert"
    """
    from app.terminal import explanation
    from concepts.attribution import attribute as run

    chosen = _method(method)
    relevance = run(
        _load(**options), prompt, target, contrast, target_text=target_text, method=chosen, checkpoint=checkpoint
    )
    if html:
        try:
            Path(html).write_text(relevance.to_html(), encoding="utf-8")
        except OSError as error:
            raise IcebearError(f"{html} cannot be written ({error.strerror}); choose another path.") from None
        click.echo(f"Wrote {html}", err=True)
    if as_json:
        click.echo(relevance.to_json())
    else:
        _console().print(explanation(relevance))


@main.command()
@click.argument("prompt")
@explain_options
@click.option("--site", help="ffn, attn, q, k, v or head; default: ffn and attn.")
@click.option("--polarity", type=click.Choice(["+", "-"]), help="Only neurons whose activation has this sign.")
@click.option("--top", default=20, show_default=True, type=click.IntRange(min=1))
@click.option("--position", default="last", show_default=True, help="last, all, or a token's position.")
@click.option("--include-sinks", is_flag=True, help="With --position all: rank sink positions too.")
@json_option
@model_options
def rank(
    prompt: str, target: str | None, contrast: str | None, method: str, site: str | None, polarity: Any,
    top: int, position: str, include_sinks: bool, as_json: bool, **options: Any,
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

    chosen = _method(method)
    model = _load(**options)
    sites = {None: ("ffn", "attn"), "head": ("attn",)}.get(site, (site,))
    relevance = run(model, prompt, target, contrast, method=chosen, sites=sites)
    found = relevance.top(top, site, polarity, _position(position), include_sinks)  # type: ignore[arg-type]
    writers = [row.neuron for row in found if row.neuron.site in ("ffn", "attn")]
    words = dict(zip(writers, project_many(model, writers, 5), strict=True))
    if as_json:
        rows = [
            {**ranked_dict(row), "promotes": words[row.neuron].words(row.polarity) if row.neuron in words else None}
            for row in found
        ]
        _print_json({**relevance.to_dict(0), "position": position, "ranking": rows})
        return
    console = _console()
    console.print(explanation(relevance))
    where = {"all": "at every token", "last": "at the last position"}.get(position, f"at position {position}")
    apart = f", sinks {list(relevance.sinks)} apart" if position == "all" and not include_sinks else ""
    console.print(ranking(found, relevance, words, f"Most relevant neurons {where}{apart}"))


def _position(text: str) -> Any:
    from db.errors import InputError

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
    from concepts.vocabulary import project as run
    from db.records import Neuron

    wanted = Neuron.parse(neuron)
    result = run(_load(**options), wanted, top)
    if as_json:
        _print_json(result.to_dict())
    else:
        _console().print(projection(result))


@main.command()
@click.argument("prompt")
@click.option("--edit", "edits", multiple=True, help="Such as L29.ffn.860*0, L29.ffn.490=-6.2, L24.ffn.559+5@last.")
@click.option("--recipe", type=click.Path(), help="A saved recipe.")
@click.option("--max-new-tokens", default=40, show_default=True, type=click.IntRange(min=1))
@json_option
@model_options
def steer(
    prompt: str, edits: tuple[str, ...], recipe: str | None, max_new_tokens: int, as_json: bool, **options: Any
) -> None:
    """Generate after PROMPT without and with edited neurons.

    \b
    Example:
      icebear steer "The ice bear lives in the" --edit "L29.ffn.860=-20" --max-new-tokens 10
    """
    from app.sidebyside import compare
    from app.terminal import side_by_side
    from steering.edits import parse_edits
    from steering.recipe import Recipe

    if bool(edits) == bool(recipe):
        raise click.UsageError("Give either --edit (as often as you like) or --recipe.")
    wanted: Any = Recipe.load(recipe) if recipe else parse_edits(edits)
    result = compare(_load(**options), prompt, wanted, max_new_tokens)
    if as_json:
        _print_json(result)
    else:
        _console().print(side_by_side(prompt, result["plain"], result["steered"]))


@main.command()
@json_option
@model_options
def doctor(as_json: bool, **options: Any) -> None:
    """Versions, import roots, cache, and whether the model works.

    \b
    Example:
      icebear doctor
    """
    from app.doctor import examine

    facts = examine(lambda: _load(**options))
    if as_json:
        _print_json(facts)
    else:
        for name, value in facts.items():
            click.echo(f"{name:<12} {value}")
    if "error" in facts:
        sys.exit(1)


if __name__ == "__main__":
    main()
