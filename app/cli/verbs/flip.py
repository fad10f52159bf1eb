"""`icebear flip`: few edits that change the answer."""

from __future__ import annotations

import click

import icebear
from icebear.app.cli.options import ModelOptions, PromptOptions, option, read_lines, record, verb
from icebear.app.cli.output import claim, save, show
from icebear.app.cli.progress import bar, waiting
from icebear.app.cli.stores import STORE_IF_ANY, significant_labels, store_if_any
from icebear.models.text.chat import other_prompt
from icebear.points import Naming


@record
class Options:
    prompt: PromptOptions
    to: str | None = option("Token or phrase that should come next.")
    suppress: bool = option("Instead of --to: move the current answer out of the most probable tokens.")
    suppress_phrase: str | None = option(
        "Instead of --to: a phrase that the model generates now and must not generate after the edits."
    )
    source: str | None = option(
        "Prompt after which the model predicts the wanted token; heads take their outputs after it, or neurons move "
        "towards their activations in it."
    )
    max_neurons: int
    save: str | None
    store: str = option(show_default=STORE_IF_ANY)
    json: bool
    names: Naming
    top_k: int | None = option(
        "With --suppress: the answer must not be among the K most probable tokens. This option is K.",
        type="count",
        show_default="5",
        advanced=True,
    )
    held_out: str | None = option(
        "File of contexts, one per line, in which side effects are measured.", type="file", advanced=True
    )
    claim: str | None
    unbounded: bool = option(
        "Allow activations outside the range that the neuron has on the calibration texts (fixed texts that come with "
        "icebear).",
        advanced=True,
    )
    no_heads: bool = option("Swap no heads, and set only neurons.", advanced=True)
    model: ModelOptions


@verb(Options)
def flip(options: Options) -> None:
    """Find a small set of edits that changes the next token after PROMPT, and report their side effects. With --source,
    heads are swapped, if that suffices; else FFN neurons are set. The control makes the same edits to random other
    heads or neurons.

    If there is a store, flip also tries the neurons that the command "icebear search" finds for the wanted token. flip
    also shows sentences that activate the edited neurons.

    Example:
      icebear flip "The ice bear lives in the" --to " desert" --source "The camel lives in the"
    """
    prompt, suppress = options.prompt.read(), options.suppress_phrase or options.suppress
    if (options.to is None) is not bool(suppress) or (options.suppress and options.suppress_phrase):
        raise click.UsageError("Give exactly one of --to TOKEN, --suppress and --suppress-phrase PHRASE.")
    if options.top_k and not suppress:
        raise click.UsageError(
            "--top-k works only with --suppress or --suppress-phrase; add one of them, or leave it out."
        )
    held_out = read_lines(options.held_out) if options.held_out else None
    model = options.model.load()
    from icebear.app.cli.tables.cards import labels_table
    from icebear.app.cli.tables.steering import recipe_report
    from icebear.steering.outcome import outcome_of
    from icebear.steering.side_effects import HELD_OUT_TEXTS, HeldOutContexts, token_rows

    texts = held_out or HELD_OUT_TEXTS
    token_rows(model, texts)
    with store_if_any(options.store, model) as store, bar("flip") as advance:
        recipe = icebear.flip(
            model,
            prompt,
            options.to,
            other_prompt(prompt, options.source),
            options.max_neurons,
            suppress,
            options.top_k or 5,
            store,
            advance,
            options.unbounded,
            not options.no_heads,
        )
        labels = significant_labels(store, [(edit.neuron, edit.polarity) for edit in recipe.neuron_edits()])
    if recipe:
        with waiting("Measuring side effects and random edits"):
            recipe = recipe.noting(**outcome_of(model, recipe, HeldOutContexts(model, texts)).provenance())
    else:
        click.echo("The model already answers this, so no edits are needed.", err=True)
    document = recipe.to_dict()
    if labels:
        document["meanings"] = [label.to_dict() for label in labels]
    show(
        options.json, document, recipe_report(recipe), *([labels_table(labels)] if labels else []), names=options.names
    )
    save(recipe, options.save, overwrite=True)  # last, so that a path that cannot be written loses nothing
    if options.claim:
        from icebear.claims.kinds.edits import FlipClaim

        claim(options.claim, model, lambda: FlipClaim.of(recipe))
