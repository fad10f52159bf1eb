"""`icebear neuron`: what a neuron means."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from icebear.app.cli.options import ModelOptions, argument, option, record, verb
from icebear.app.cli.output import print_json, stdout, write_page
from icebear.app.cli.stores import store_if_any
from icebear.errors import StoreError

if TYPE_CHECKING:
    from icebear.concepts.models.model import Model
    from icebear.db.store import Store
    from icebear.records import Neuron


@record
class Options:
    neuron: str | None = argument(required=False)
    clear: bool = option("Instead of one: the neurons with significant labels, the best first.", False, is_flag=True)
    base_model: str | None
    top: int
    annotate: bool
    html: str | None
    store: str
    json: bool
    model: ModelOptions


@verb(Options)
def neuron(options: Options) -> None:
    """Show what NEURON means: the vocabulary that it promotes, and with a store (see icebear index) its card.

    The card has the sentences that activate it most, of both signs, and its label with its score. With --base-model
    the vocabulary is also another model's, with how alike are what the neuron reads and what it writes.

    \b
    Example:
      icebear neuron L29.ffn.860 --top 5
      icebear neuron L29.ffn.860 --store wiki.db
    """
    from icebear.records import Neuron

    if (options.neuron is None) != options.clear:
        raise click.UsageError("Give either a NEURON or --clear.")
    if options.neuron is None:
        return _clearest(options)
    wanted = Neuron.parse(options.neuron)
    if wanted.site == "head":
        return _head(wanted, options)
    model = options.model.load()
    if options.base_model:
        return _vocabulary(model, wanted, options)
    with store_if_any(options.store, model) as store:
        if store:
            _card(model, wanted, store, options)
        elif options.html or options.annotate:
            raise StoreError("--html and --annotate need a store; make one with icebear index.")
        else:
            _vocabulary(model, wanted, options)


def _card(model: Model, wanted: Neuron, store: Store, options: Options) -> None:
    from icebear.actmax.card import describe
    from icebear.app.cli.progress import annotating
    from icebear.app.cli.terminal import card

    store.neurons.statistics(wanted)
    if options.annotate:
        annotating(model, store, [wanted], options.top)
    result = describe(store, wanted, model, options.top, whole=True)
    if options.html:
        write_page(options.html, result.to_html())
    if options.json:
        print_json(result.to_dict())
    else:
        stdout().print(card(result))


def _vocabulary(model: Model, wanted: Neuron, options: Options) -> None:
    """The vocabulary that a neuron promotes and suppresses, also in the base model."""
    from icebear.app.cli.terminal import projection
    from icebear.concepts.attribution.two_models import likeness
    from icebear.concepts.vocabulary import project

    words = project(model, wanted, options.top)
    base = options.model.load(options.base_model) if options.base_model else None
    base_words = project(base, wanted, options.top) if base else None
    cosines = likeness(model, base, wanted) if base else {}
    if options.json:
        compared = {"base_model": {**base_words.to_dict(), "cosines": cosines}} if base_words else {}
        print_json({"neuron": str(wanted), "vocabulary": words.to_dict(), **compared, **model.made_with})
        return
    stdout().print(projection(words))
    if base and base_words:
        stdout().print(f"In {base.name}:", markup=False)
        stdout().print(projection(base_words))
        stdout().print("Cosine of both: " + ", ".join(f"{what} {cosine:.4f}" for what, cosine in cosines.items()))


def _head(head: Neuron, options: Options) -> None:
    """What is known of an attention head: its label, of the tokens that it attends to."""
    from icebear.actmax.card import held_out
    from icebear.app.cli.terminal import meaning_told
    from icebear.db.store import open_store

    with open_store(options.store) as store:
        labels, made_with = list(store.labels.meanings([head]).values())[:1], store.made_with()
        if not labels:
            raise StoreError(f"{head} has no label yet; make one with icebear label --auto {head}.")
        rows = meaning_told("+ (attends to)", labels[0], held_out(store, labels[0]))
    if options.json:
        print_json({**made_with, "neuron": str(head), "meaning": labels[0].to_dict()})
    else:
        stdout().print(*rows, sep="\n")


def _clearest(options: Options) -> None:
    from icebear.actmax.labels.scores import clearest
    from icebear.app.cli.terminal import meanings
    from icebear.db.store import open_store

    with open_store(options.store) as store:
        tried, made_with = store.labels.all_meanings(), store.made_with()
    if not tried:
        raise StoreError(f"{options.store} has no automatic labels yet; make them with icebear label --auto.")
    labels = clearest(tried)
    shown = labels[: options.top]
    if options.json:
        print_json({**made_with, "tried": len(tried), "clear": [meaning.to_dict() for meaning in shown]})
    else:
        title = f"{len(labels):,} of {len(tried):,} (neuron, sign) have a clear meaning, at most 5 % of them by chance"
        stdout().print(meanings(shown, title))
