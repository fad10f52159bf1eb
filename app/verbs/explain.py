"""The verbs that explain a prediction: attribute, rank, project."""

from __future__ import annotations

from typing import Any

import click

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


@click.command()
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


@click.command()
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


@click.command()
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


VERBS = (attribute, rank, project)
