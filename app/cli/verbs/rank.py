"""`icebear rank`: the neurons behind a prediction."""

from __future__ import annotations

from typing import Any, Literal

import click

import icebear
from icebear.app.cli.options import AttributionOptions, ModelOptions, exactly_one, option, record, recorded, verb
from icebear.app.cli.output import claim, show, write_page
from icebear.app.cli.progress import waiting
from icebear.app.cli.stores import STORE_IF_ANY, store_if_any
from icebear.errors import InputError
from icebear.points import Naming


@record
class Options:
    attribution: AttributionOptions
    site: str | None = option(show_default="ffn and attn")
    position: Any
    top: int
    ablate: bool
    store: str = option(show_default=STORE_IF_ANY)
    html: str | None
    json: bool
    names: Naming
    polarity: Literal["+", "-"] | None = option(
        "List only neurons of this polarity: the sign of the activation, or with --counterfactual the sign of the "
        "activation minus the counterfactual activation.",
        advanced=True,
    )
    words: Literal["effects", "direct"] = option(
        "Words to show for each neuron: the likely next words that it raises and lowers (effects, measured), or the "
        "words that its W_out row promotes (direct, the logit lens).",
        default="effects",
        advanced=True,
    )
    by: Literal["positive", "negative", "absolute"] = option(
        "Order: positive relevance (the most relevant first), negative relevance (neurons that oppose the answer), or "
        "absolute relevance.",
        default="positive",
        advanced=True,
    )
    include_sinks: bool = option("With --position all: include sink tokens.", advanced=True)
    claim: str | None
    include_template: bool = option("With --position all: include the chat template's tokens.", advanced=True)
    model: ModelOptions


@verb(Options)
def rank(options: Options) -> None:
    """Rank neurons by how much they contribute to the prediction after PROMPT.

    With --counterfactual, rank by the contribution to the difference between two prompts. With several
    counterfactuals, all results are means over them. With --base-model, show which weights caused the difference
    between the predictions of two models, and through which neurons. --ablate measures sufficiency and necessity of
    three sets of nodes (neurons at a token) of each site: the first 100, the first 1,000 and the first --top nodes; of
    heads, the first 1, 2, 5 and 10. Significant labels in the store are shown.

    Example:
      icebear rank "The ice bear lives in the" --counterfactual "The wild camel lives in the" --site ffn --top 5
      --ablate
    """
    attribution = options.attribution
    prompt = attribution.prompt
    exactly_one({"a PROMPT": prompt.prompt, "--image": attribution.alone, "--messages": prompt.messages})
    compared = bool(attribution.counterfactual or attribution.counterfactual_image or attribution.base_model)
    if options.ablate and options.site not in (None, "ffn", "attn", "head"):
        raise click.UsageError("--ablate works only for ffn, attn and head; leave out --site for the first two.")
    position: Any = options.position or ("all" if compared or attribution.alone else "last")
    sinks, template = options.include_sinks, options.include_template
    everything = options.ablate or options.polarity or sinks or template
    model, arguments = attribution.load_for_attribute(options.model)
    from icebear.app.cli.tables.explanations import explanation_report
    from icebear.concepts.results.ranking import Ranking
    from icebear.explanation.explanation import ablation_sizes, with_changes

    ranking = Ranking(
        options.top, options.site, options.polarity, position, sinks, options.by, include_template=template
    )
    recording = recorded(options.site, options.top, None if everything else position)
    relevance = icebear.attribute(model, **arguments, **recording)
    if not relevance.sites:
        raise InputError(
            f"{relevance.method!r} scores the tokens of {model.name}, not its neurons; use icebear explain."
        )
    sizes = ablation_sizes(options.site, options.top) if options.ablate else []
    with store_if_any(options.store, model) as store, waiting("Measuring effects"):
        explanation = with_changes(icebear.Explanation.of(model, relevance, ranking, store=store, sizes=sizes))
    write_page(options.html, explanation.to_html)
    show(options.json, explanation.to_dict(), explanation_report(explanation, words=options.words), names=options.names)
    if options.claim:
        from icebear.claims.kinds.predictions import of_ranking

        claim(options.claim, model, lambda: of_ranking(model, explanation))
