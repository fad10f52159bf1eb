"""`icebear rank`: the neurons behind a prediction."""

from __future__ import annotations

from typing import Any, Literal

import click

from icebear.app.cli.explained import Explained, method_named, position_of, recorded
from icebear.app.cli.options import ModelOptions, exactly_one, option, record, shared, verb
from icebear.app.cli.output import print_json, stdout, write_page
from icebear.app.cli.progress import bar
from icebear.app.cli.stores import store_if_any
from icebear.errors import InputError

SIZES = (100, 1000)
"""Lengths of the lists that --ablate measures beside the one that is shown."""


@record
class Options:
    explained: Explained
    site: str | None = shared(show_default="ffn and attn")
    position: str | None
    top: int
    ablate: bool
    store: str
    html: str | None
    json: bool
    file: str | None = shared(advanced=True)
    polarity: Literal["+", "-"] | None = option(
        "Only neurons whose activation has this sign.", type=click.Choice(["+", "-"]), advanced=True
    )
    include_sinks: bool = option("With --position all: rank sink positions too.", False, is_flag=True, advanced=True)
    include_template: bool = option("The same of a chat template's tokens.", False, is_flag=True, advanced=True)
    model: ModelOptions

    @property
    def compares(self) -> bool:
        return bool(self.explained.counterfactual or self.explained.base_model)


@verb(Options)
def rank(options: Options) -> None:
    """Rank neurons by how much they contribute to the prediction after PROMPT.

    With --counterfactual they are ranked by the difference to another prompt, with --base-model to another model.
    --ablate measures how much of it these nodes alone recover. If the store has significant labels, they are shown.

    \b
    Example:
      icebear rank "The ice bear lives in the" --counterfactual "The wild camel lives in the" --site ffn --top 5
      --ablate
    """
    explained = options.explained
    prompt = explained.prompt
    exactly_one(
        {"a PROMPT": prompt.prompt, "--image": explained.image, "--file": options.file, "--messages": prompt.messages}
    )
    if options.file:
        return _rank_file(options)
    if options.ablate and (not options.compares or options.site not in ("ffn", "head")):
        raise click.UsageError("--ablate goes with --counterfactual or --base-model, and --site ffn or head.")
    from icebear.actmax.explanation import Explanation
    from icebear.app.cli.terminal import investigation
    from icebear.concepts.attribution.attribute import attribute
    from icebear.concepts.attribution.ranking import Ranking

    position: Any = position_of(options.position) or ("all" if options.compares else "last")
    ranking = Ranking(
        options.top,
        options.site,
        options.polarity,
        position,
        include_sinks=options.include_sinks,
        include_template=options.include_template,
    )
    sizes = sorted({options.top, *SIZES}) if options.ablate else []
    everything = options.ablate or options.polarity or options.include_sinks or options.include_template
    kept = recorded(options.site, options.top, None if everything else position)
    model, arguments = explained.arguments(options.model)
    relevance = attribute(model, **arguments, **kept)
    if not relevance.sites:
        raise InputError(f"{relevance.method!r} scores the tokens of {model.name}, no neurons; use icebear explain.")
    with store_if_any(options.store, model) as store:
        explanation = Explanation.of(model, relevance, ranking, store=store, sizes=sizes)
    if options.html:
        write_page(options.html, explanation.to_html())
    if options.json:
        print_json(explanation.to_dict())
    else:
        stdout().print(investigation(explanation))


def _rank_file(options: Options) -> None:
    """Neurons by their mean over the prompts of a file."""
    from icebear.app.cli.terminal import behaviour_table
    from icebear.concepts.attribution.behaviour import behaviour, read
    from icebear.concepts.vocabulary import projections

    explained = options.explained
    names = ("target_text", "prefix", "at", "span", "base_model", "number")
    unsuited = [getattr(explained, name) for name in names]
    flags = (
        explained.prompt.chat,
        explained.prompt.system,
        options.position,
        options.include_sinks,
        options.include_template,
        options.ablate,
        options.html,
    )
    if any(flags) or any(value is not None for value in unsuited) or len(explained.counterfactual) > 1:
        raise click.UsageError(
            "--file goes with --target, --contrast, one --counterfactual, --site, --polarity and --top only."
        )
    method = method_named(explained.method)
    counterfactual = (*explained.counterfactual, None)[0]
    cases = read(str(options.file), target=explained.target, contrast=explained.contrast, counterfactual=counterfactual)
    model = options.model.load()
    with bar("prompts", len(cases)) as move:
        rows = behaviour(
            model,
            cases,
            options.top,
            options.site,
            options.polarity,
            method=method,
            checkpoint=explained.checkpoint,
            on_progress=move,
        )
    words = projections(model, (row.neuron for row in rows), 5)
    if options.json:
        shown = [
            {**row.to_dict(), "promotes": words[row.neuron].words(row.polarity) if row.neuron in words else None}
            for row in rows
        ]
        made = {**model.made_with, "method": method and repr(method), "seed": 0}
        print_json({**made, "file": options.file, "prompts": len(cases), "ranking": shown})
    else:
        stdout().print(behaviour_table(rows, words, len(cases)))
