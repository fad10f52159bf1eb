"""The verbs that explain a prediction: attribute, rank, project."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from icebear.app.cli.options import (
    CHAT,
    EXPLAIN,
    MODEL,
    conversation,
    known_of,
    likewise,
    load,
    method_named,
    options,
    print_json,
    stdout,
    store_if_any,
    taken,
    told_of,
    write_page,
)
from icebear.app.cli.progress import bar

if TYPE_CHECKING:
    from icebear.concepts.attribution.result import Relevance
    from icebear.concepts.models.model import Model


ASKED = (*EXPLAIN, "--method", "--image", *CHAT, "--span", "--max-new-tokens")


@click.command()
@click.argument("prompt", required=False)
@options(*ASKED)
@click.option(
    "--units",
    type=click.Choice(["word", "sentence", "turn", "document"]),
    help="Sum tokens to these.",
    show_default="token",
)
@options("--png", "--html", "--json", *MODEL)
def attribute(
    prompt: str | None,
    image: str | None,
    units: str | None,
    png: str | None,
    html: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Which tokens of PROMPT (or parts of an image) carried the prediction. --png writes the image under its relevance.

    With --span the model answers first, and words of its answer are explained.

    \b
    Example:
      icebear attribute "The ice bear lives in the" --contrast " desert"
      icebear attribute --chat "Where do ice bears live?" --span "the Arctic" --units sentence
    """
    from icebear.app.cli.terminal import explanation, units_table
    from icebear.concepts.attribution.units import units as summed

    _one_of({"a PROMPT": prompt, "--image": image, "--messages": given["messages"]})
    if png and not image:
        raise click.UsageError("--png goes with --image.")
    asked = _asked(given, prompt)
    relevance = _explained(load(**given), image, record="last", **asked)
    parts = summed(relevance, units) if units else []
    if html:
        write_page(html, relevance.to_html())
    if png:
        write_page(png, relevance.image.png())  # type: ignore[union-attr]
    if as_json:
        told = [{**vars(part), "relevance": value} for part, value in parts]
        print_json({**relevance.to_dict(), **({"units": told} if units else {})})
    elif units:
        stdout().print(explanation(relevance, units_table(parts)))
    else:
        stdout().print(explanation(relevance))


def _asked(given: dict[str, Any], prompt: str | None) -> dict[str, Any]:
    """The prompt, and the arguments of `icebear.concepts.attribute` that were given."""
    asked = taken(given, (*EXPLAIN, "--method", "--span", "--max-new-tokens"))
    asked["prompt"] = conversation(prompt, given)
    counterfactual, method = asked["counterfactual"], asked["method"]
    counterfactual = [likewise(asked["prompt"], other) for other in counterfactual]
    several = len(counterfactual) > 1
    asked["counterfactual"] = (counterfactual if several else counterfactual[0]) if counterfactual else None
    other = asked["base_model"]
    asked["base_model"] = other and load(**{**given, "model_name": other})  # what is left is how to load
    asked["method"] = method and method_named(method)
    return asked


def _one_of(choices: dict[str, Any]) -> None:
    if sum(value is not None for value in choices.values()) != 1:
        *names, last = choices
        raise click.UsageError(f"Give either {', '.join(names)} or {last}.")


def _explained(model: Model, image: str | None, **asked: Any) -> Relevance:
    """`attribute` of the prompt or the image, whichever the model reads; with a span of what it answers."""
    from icebear.concepts.attribution.attribute import attribute as run

    if model.task.reads_text is bool(image):
        raise click.UsageError(f"{model.name} reads {'images: give --image' if not image else 'text: give a PROMPT'}.")
    prompt, span, count = (asked.pop(name) for name in ("prompt", "span", "max_new_tokens"))
    if span is None:
        return run(model, image or prompt, **asked)
    return run(model, **answered(model, prompt, span, count), **asked)


def answered(model: Model, prompt: Any, span: str, count: int) -> dict[str, Any]:
    """The model's answer, and the span of it that is asked for."""
    room = model.context_length - len(model.ids(prompt))
    answer = model.answer(prompt, min(count, room))
    return {"prompt": answer, "span": None if span == "all" else span}


@click.command()
@click.argument("prompt", required=False)
@options(*ASKED)
@options("--file")
@options("--site", show_default="ffn and attn")
@click.option("--polarity", type=click.Choice(["+", "-"]), help="Only neurons whose activation has this sign.")
@click.option("--position", help="last, all, or a token's position.", show_default="last; with --counterfactual all")
@click.option("--include-sinks", is_flag=True, help="With --position all: rank sink positions too.")
@click.option("--include-template", is_flag=True, help="The same of what a chat's template wrote.")
@options("--ablate", "--top", "--store", "--json", *MODEL)
def rank(
    prompt: str | None,
    image: str | None,
    file: str | None,
    site: str | None,
    polarity: Any,
    position: str | None,
    include_sinks: bool,
    include_template: bool,
    ablate: bool,
    top: int,
    store_path: str,
    as_json: bool,
    **given: Any,
) -> None:
    """The neurons that carried the prediction after PROMPT, by signed relevance.

    With --counterfactual those that made the difference to another prompt, with --base-model to another model.
    --ablate then exchanges all others (of one site) for what they are there, and says how much of the difference is
    left.

    Where there is a store with labels that hold, they are told.

    With --file by their mean over many prompts, with a bootstrap over them; an object has a prompt and, if wanted, a
    target, a contrast and a counterfactual, which otherwise are those of the options.

    \b
    Example:
      icebear rank "The ice bear lives in the" --counterfactual "The wild camel lives in the" --site ffn --top 5
      --ablate
    """
    from icebear.app.cli.terminal import carried, explanation, meanings, ranking
    from icebear.concepts.attribution.controls import ablation
    from icebear.concepts.attribution.result import ranked_dict
    from icebear.concepts.vocabulary import projections

    _one_of({"a PROMPT": prompt, "--image": image, "--file": file, "--messages": given["messages"]})
    asked = _asked(given, prompt)
    if file:
        unsuited = [asked[name] for name in ("target_text", "prefix", "at", "span", "base_model")]
        if position or include_sinks or include_template or ablate or any(value is not None for value in unsuited):
            raise click.UsageError(
                "--file goes with --target, --contrast, --counterfactual, --site, --polarity and --top only."
            )
        _rank_behaviour(file, given, asked, as_json, k=top, site=site, polarity=polarity)
        return
    compares = bool(asked["counterfactual"] or asked["base_model"])
    if ablate and (not compares or site not in ("ffn", "head")):
        raise click.UsageError("--ablate goes with --counterfactual or --base-model, and --site ffn or head.")
    position = position or ("all" if compares else "last")
    model = load(**given)
    where = _position(position)
    kept = {} if ablate or include_sinks or include_template or polarity else _kept(top, where)
    relevance = _explained(model, image, sites=_recorded(site), **kept, **asked)
    found = relevance.top(top, site, polarity, where, include_sinks, include_template=include_template)
    words = projections(model, (row.neuron for row in found), 5)
    with store_if_any(store_path, model) as store:
        known = known_of(store, [(row.neuron, row.polarity) for row in found])
    ablated = [ablation(model, relevance, k, str(site)) for k in sorted({top, *SIZES})] if ablate else []
    if as_json:
        rows = [
            {**ranked_dict(row), "promotes": words[row.neuron].words(row.polarity) if row.neuron in words else None}
            for row in found
        ]
        carry = {"ablation": [vars(row) for row in ablated]} if ablate else {}
        print_json({**relevance.to_dict(0), "position": position, "ranking": rows, **told_of(known), **carry})
        return
    console = stdout()
    console.print(explanation(relevance))
    title = {"all": "at every token", "last": "where it is predicted"}.get(position, f"at position {position}")
    apart = f", attention sinks excluded: {list(relevance.sinks)}" if position == "all" and not include_sinks else ""
    apart += ", the chat template excluded" if position == "all" and relevance.turns and not include_template else ""
    console.print(ranking(found, relevance, words, f"Most relevant neurons {title}{apart}"))
    if known:
        console.print(meanings(known))
    if not relevance.counterfactual:
        console.print(relevance.meaning(), style="dim", markup=False)
    if ablated:
        console.print(carried(ablated))


SIZES = (100, 1000)
"""Of lists that are ablated, beside the one that is shown."""


def _rank_behaviour(file: str, given: dict[str, Any], asked: dict[str, Any], as_json: bool, **ranking: Any) -> None:
    from icebear.app.cli.terminal import behaviour_table
    from icebear.concepts.attribution.behaviour import Case, behaviour, read
    from icebear.concepts.models.provenance import provenance
    from icebear.concepts.vocabulary import projections

    names = ("target", "contrast", "counterfactual")
    cases = [Case(case.prompt, *(getattr(case, name) or asked[name] for name in names)) for case in read(file)]
    model, method = load(**given), asked["method"]
    with bar("prompts", len(cases)) as move:
        found = behaviour(model, cases, method=method, checkpoint=asked["checkpoint"], on_progress=move, **ranking)
    words = projections(model, (row.neuron for row in found), 5)
    if as_json:
        rows = [
            {**row.to_dict(), "promotes": words[row.neuron].words(row.polarity) if row.neuron in words else None}
            for row in found
        ]
        told = provenance(model, method=method and repr(method), seed=0)
        print_json({**told, "file": file, "prompts": len(cases), "ranking": rows})
    else:
        stdout().print(behaviour_table(found, words, len(cases)))


def _kept(top: int, position: Any) -> dict[str, Any]:
    """What a ranking needs of all neurons at all tokens."""
    if position == "all":
        return {"keep": "top", "k": top}
    return {"record": "last"} if position == "last" else {}


def _recorded(site: str | None) -> tuple[str, ...]:
    """The sites that a ranking needs."""
    return ("attn",) if site == "head" else (site,) if site else ("ffn", "attn")


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
@options("--base-model", "--top", "--json", *MODEL)
def project(neuron: str, base_model: str | None, top: int, as_json: bool, **given: Any) -> None:
    """The vocabulary that NEURON promotes and suppresses.

    With --base-model also there, and how alike are what it reads and what it writes.

    \b
    Example:
      icebear project L29.ffn.860 --top 5
    """
    from icebear.app.cli.terminal import projection
    from icebear.concepts.attribution.two_models import likeness
    from icebear.concepts.models.provenance import provenance
    from icebear.concepts.vocabulary import project as run
    from icebear.records import Neuron

    wanted = Neuron.parse(neuron)
    model = load(**given)
    other = load(**{**given, "model_name": base_model}) if base_model else None
    results = [run(one, wanted, top) for one in (model, other) if one]
    alike = likeness(model, other, wanted) if other is not None else {}
    if as_json:
        there = {"base_model": {**results[1].to_dict(), "cosines": alike}} if other else {}
        print_json({**results[0].to_dict(), **there, **provenance(model)})
        return
    stdout().print(projection(results[0]))
    if other:
        stdout().print(f"In {other.name}:", markup=False)
        stdout().print(projection(results[1]))
        stdout().print("Cosine of both: " + ", ".join(f"{what} {cosine:.4f}" for what, cosine in alike.items()))


VERBS = (attribute, rank, project)
