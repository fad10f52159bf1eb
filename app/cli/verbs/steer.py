"""`icebear steer`: generate with edited neurons."""

from __future__ import annotations

from typing import Any

import click

import icebear
from icebear.app.cli.options import (
    ModelOptions,
    PromptOptions,
    asked_by_examples,
    check_input,
    exactly_one,
    option,
    record,
    verb,
)
from icebear.app.cli.output import show
from icebear.app.cli.progress import waiting
from icebear.app.cli.stores import STORE_IF_ANY, store_if_any
from icebear.edits import parse_edits


@record
class Options:
    prompt: PromptOptions
    image: str | None
    examples: str | None
    others: str | None
    edit: tuple[str, ...] = option(
        "Edit of a neuron: L29.ffn.860=-20 sets the activation, L29.ffn.860*0 multiplies it, L29.ffn.860+5 adds to it. "
        "L29.ffn.860=-20@last edits only at the last token. 'L23.head.4<-\"The capital of Italy is\"@last' (a swap) "
        "gives a neuron or head its value after another prompt. Give --edit several times for several edits.",
        multiple=True,
    )
    recipe: str | None = option("Recipe (file of saved edits) to apply.", type="file")
    max_new_tokens: int
    temperature: float
    seed: int
    store: str = option(show_default=STORE_IF_ANY)
    json: bool
    model: ModelOptions


@verb(Options)
def steer(options: Options) -> None:
    """Generate text after PROMPT, once without and once with edited neurons, and show the likely next tokens of both.
    The control makes the same edits in random other neurons. Of an --image, show its likely labels.

    Example:
      icebear steer "My friend lost" --edit "L21.ffn.780+5" --max-new-tokens 12
      icebear steer "The capital of France is" --edit 'L23.head.4<-"The capital of Japan is"@last'
      icebear steer --image bear.png --edit "L3.ffn.7*0" --model my-vit
    """
    exactly_one({"a PROMPT": options.prompt.prompt, "--image": options.image, "--messages": options.prompt.messages})
    if bool(options.edit) == bool(options.recipe):
        raise click.UsageError("Give either --edit (repeatable) or --recipe.")
    edits: Any = (
        icebear.Recipe.load(options.recipe) if options.recipe else parse_edits(options.edit, options.model.model)
    )
    prompt = options.prompt.read_or(options.image)
    model = options.model.load()
    from rich.text import Text

    from icebear.app.cli.tables.steering import comparison_table
    from icebear.steering.comparison import compare
    from icebear.steering.outcome import outcome_of_steering

    check_input(model, options.image)
    answering = asked_by_examples(model, options.image, options.examples, options.others)
    with store_if_any(options.store, model) as store:  # it knows max and std, for edits in those units
        statistic = store.neurons.statistic if store else None
        result = compare(answering, prompt, edits, options.max_new_tokens, statistic, options.temperature, options.seed)
        with waiting("Measuring random edits"):
            outcome = outcome_of_steering(answering, prompt, edits, statistic)
    measured = outcome.to_dict()
    document = {**result.to_dict(), **{name: measured[name] for name in ("before", "after", "control")}}
    show(options.json, document, comparison_table(result), Text(outcome.control_text))
