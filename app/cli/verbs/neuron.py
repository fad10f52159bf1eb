"""`icebear neuron`: what a neuron means."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import icebear
from icebear.app.cli.options import ModelOptions, argument, exactly_one, excluded, is_given, option, record, verb
from icebear.app.cli.output import show, write_page
from icebear.app.cli.progress import annotating, bar, waiting
from icebear.app.cli.stores import named_or_folder_store, store_alone, store_beside, store_or_shipped
from icebear.errors import StoreError
from icebear.points import Naming
from icebear.records import Neuron

STORE_ALONE = (
    "From the store alone. --effects loads the model and adds the words through the layers above and the effects "
    "measured at these sentences."
)
IMAGES_ALONE = "From the store alone. --html FILE loads the model and shows the crops of these images."
NOT_MEASURED = "icebear index --lens measures how well these words predict what the neuron does."


@record
class Options:
    neuron: str | None = argument(required=False)
    significant: bool = option(
        "Instead of NEURON: list the labels that are significant at a false discovery rate of 10 %, best first."
    )
    base_model: str | None
    lens_file: str | None = option(
        "Project through a lens that other software saved: the .pt file of a Jacobian lens, or the folder of a tuned "
        "lens. Its agreement with measured effects is shown.",
        type="path",
        advanced=True,
    )
    top: int
    effects: bool = option(
        "Load the model. Add the neuron's measured effects, and the words that it promotes through the layers above."
    )
    annotate: bool
    crop: Literal["patch", "relevance"] = option(
        "With --html, for an index of images: show the patch with its surroundings, or the square with half of the "
        "relevance of the activation, which is measured first and saved in the store.",
        "patch",
    )
    more: int | None = option(
        "Load the model. Read so many more sentences of the index's corpus for this neuron, and show the strongest.",
        type="count",
        advanced=True,
    )
    html: str | None
    store: str
    json: bool
    names: Naming
    model: ModelOptions


@verb(Options)
def neuron(options: Options) -> None:
    """Show what NEURON (or an attention head) means: the tokens that it promotes or, if there is a store, its card.

    The command "icebear index" makes the store. The card has the sentences with the largest positive and negative
    activations, and the label with its score. The card needs only the store, not the model. With --effects, the card
    also has the next words that the neuron raises and lowers at these sentences, measured in the model. The card of
    an attention head always loads the model: it has the tokens that the head attends to in its sentences, and the words
    that it raises and lowers there. With
    --base-model, the command shows the tokens that the neuron promotes in each of the two models. It also shows
    the cosine between the neuron's W_in row in one model and its W_in row in the other, and likewise for W_out.
    The card from an index of images has files and patches; with --html it shows a crop of each.

    Example:
      icebear neuron L29.ffn.860 --top 5
      icebear neuron L29.ffn.860 --store wiki.db
      icebear neuron L23.head.4 --top 4
      icebear neuron L25.ffn.504 --lens-file jacobian_lens.pt
    """
    exactly_one({"a NEURON": options.neuron, "--significant": options.significant or None})
    if options.neuron is None:
        return _significant(options)
    wanted = Neuron.parse(options.neuron, options.model.model)
    if options.lens_file:
        return _through_lens_file(wanted, options.lens_file, options)
    if options.base_model is None:
        model_options = options.model
        path = store_or_shipped(
            options.store, model_options.load, model_options.model, required=False, site=wanted.site
        )
        options = replace(options, store=path)
    if not (_measures(options, wanted) or options.more or options.base_model is not None):
        with store_alone(options.store, options.model.model) as store:
            if store and not (store.is_of_images and options.html):  # whose crops need the model
                return _card(None, wanted, store, options)
    model = options.model.load()
    if options.base_model is not None:
        return _vocabulary(model, wanted, options)
    with named_or_folder_store(options.store, model) as store:
        if store:
            _card(model, wanted, store, options)
        elif wanted.site == "head":
            raise StoreError("The card of a head needs a store; build one with icebear index.")
        elif options.html or options.annotate or options.effects or options.more:
            raise StoreError("--html, --annotate, --effects and --more need a store; build one with icebear index.")
        else:
            _vocabulary(model, wanted, options)


def _measures(options: Options, wanted: Neuron) -> bool:
    """Return whether the card has what is measured in the model."""
    return options.effects or options.annotate or wanted.site == "head"


def _card(model: icebear.Model | None, wanted: Neuron, store: icebear.Store, options: Options) -> None:
    from icebear.app.cli.tables.cards import card_report

    store.neurons.statistics(wanted)
    has_crops = store.is_of_images and bool(options.html)
    if model and (options.annotate or (has_crops and options.crop == "relevance")):
        annotating(model, store, [wanted], options.top)
    measures = _measures(options, wanted) or has_crops
    other = store_beside(options.store, store.facts.get("model"))
    with other as beside, waiting("Measuring effects") if measures else nullcontext():
        reading = model if measures else None
        crop = options.crop if has_crops else None
        card = icebear.describe(store, wanted, reading, options.top, search_vectors=True, beside=beside, crop=crop)
    if model and options.more:
        with bar("sentences") as move:
            more = icebear.more_examples(model, store, wanted, options.more, options.top, on_progress=move)
        card = replace(card, beside=(*card.beside, more.beside))
    write_page(options.html, card.to_html)
    report = card_report(card, ("--store", options.store) if is_given("store") else ())
    alone = IMAGES_ALONE if store.is_of_images else STORE_ALONE
    show(options.json, card.to_dict(), report, *([] if measures else [alone]), names=options.names)


def _through_lens_file(wanted: Neuron, path: str, options: Options) -> None:
    from icebear.app.cli.tables.cards import projections_report

    excluded("--lens-file", ("base_model", "effects", "annotate", "more", "html"))
    model = options.model.load()
    with waiting("Measuring effects"):
        words = icebear.project(model, wanted, options.top, Path(path))
    direct = words.direct_correlation
    beside = [] if direct is None else [f"The direct path (logit lens) has a correlation of {direct:.2f}."]
    document = {"neuron": str(wanted), "vocabulary": words.to_dict(), **model.made_with}
    show(options.json, document, *projections_report([words]), *beside, names=options.names)


def _vocabulary(model: icebear.Model, wanted: Neuron, options: Options) -> None:
    from icebear.app.cli.tables.cards import projection_table, projections_report
    from icebear.concepts.vocabulary.projection import both_projections
    from icebear.concepts.weights.changed_weights import neuron_similarity

    words = both_projections(model, wanted, options.top)
    projection, other = (*(projection.to_dict() for projection in words), None)[:2]
    document: dict[str, Any] = {"neuron": str(wanted), "vocabulary": projection, "other_lens": other}
    tables: list[Any] = [*projections_report(words), *([] if words[0].reliability else [NOT_MEASURED])]
    if options.base_model is not None:
        base = options.model.load(options.base_model)
        base_words, cosines = icebear.project(base, wanted, options.top), neuron_similarity(model, base, wanted)
        document["base_model"] = {**base_words.to_dict(), "cosines": cosines}
        line = "Cosines between the models: " + ", ".join(f"{what} {cosine:.4f}" for what, cosine in cosines.items())
        tables += [f"In {base.name}:", projection_table(base_words), line]
    show(options.json, {**document, **model.made_with}, *tables, names=options.names)


def _significant(options: Options) -> None:
    from icebear.actmax.labels.significance import most_significant
    from icebear.app.cli.tables.cards import labels_table

    excluded("--significant", ("lens_file",))
    path = store_or_shipped(options.store, options.model.load, options.model.model)
    with icebear.open_store(path) as store:
        tried, made_with = store.labels.all_automatic(), store.made_with()
    if not tried:
        raise StoreError(f"{path} has no automatic labels yet; make them with icebear label --auto.")
    labels = most_significant(tried)
    rows = labels[: options.top]
    pairs = f"{len(labels):,} of {len(tried):,} pairs of neuron and sign"
    title = f"{pairs} have a significant label; false discovery rate 10 %"
    document = {**made_with, "tried": len(tried), "significant": [meaning.to_dict() for meaning in rows]}
    show(options.json, document, labels_table(rows, title), names=options.names)
