"""`icebear label`: names for neurons, your own or found, with scores."""

from __future__ import annotations

import click

import icebear
from icebear.app.cli.options import ModelOptions, argument, option, record, verb
from icebear.app.cli.output import show
from icebear.app.cli.progress import bar
from icebear.app.cli.stores import neurons_named
from icebear.extras import need
from icebear.records import Meaning, Neuron


@record
class Options:
    words: tuple[str, ...] = argument(nargs=-1, metavar="NEURON TEXT | [NEURON ...]")
    auto: bool = option("Find labels of NEURONS, and score them.")
    score: bool = option("Score TEXT as what the neuron means.")
    prompt: str | None
    all: bool = option("With --auto: all neurons of the store; hours.")
    top: int
    store: str
    json: bool
    model: ModelOptions


@verb(Options)
def label(options: Options) -> None:
    """Call NEURON by a name of your own (an empty TEXT removes it); or find labels, with scores, and keep them.

    With --auto --prompt "The ice bear lives in the" the 20 neurons that matter most there: about two minutes, with an
    index of at least 300 summaries. Interrupt it, run it again: it goes on.

    Example:
      icebear label L29.ffn.860 "the far north" --store wiki.db
    """
    from icebear.app.cli.terminal import labels_table

    if options.auto:
        if options.score or bool(options.words) + bool(options.prompt) + options.all != 1:
            raise click.UsageError("With --auto give NEURONS, --prompt or --all.")
        return _automatic(options)
    if len(options.words) != 2 or options.prompt or options.all:
        raise click.UsageError("Give a NEURON and a TEXT, or --auto.")
    neuron, text = Neuron.parse(options.words[0]), options.words[1]
    with icebear.open_store(options.store) as store:
        store.neurons.statistics(neuron)
        scores = _scores(store, neuron, text, options.model) if options.score and text.strip() else []
        store.labels.set_own(neuron, text, scores)
        scored = {"scores": [meaning.to_dict() for meaning in scores]} if options.score else {}
        document = {**store.made_with(), "neuron": str(neuron), "label": store.labels.own(neuron)[0], **scored}
    title = f"{neuron} as {text!r}, by sentences it was not made from"
    show(options.json, document, *([labels_table(scores, title)] if scores else []))


def _scores(store: icebear.Store, neuron: Neuron, text: str, loading: ModelOptions) -> list[Meaning]:
    from icebear.actmax.labels.auto import score_label

    with bar("sentences") as move:
        return score_label(loading.load(), store, neuron, text, on_progress=move)


def _automatic(options: Options) -> None:
    from icebear.actmax.labels.auto import label_neurons
    from icebear.app.cli.terminal import labels_table

    need("index")
    with icebear.open_store(options.store) as store:
        model, neurons = neurons_named(store, options.words, options.prompt, options.top, options.model)
        neurons = neurons or store.neurons.all()
        with bar("sentences and neurons") as move:
            label_neurons(model, store, neurons, on_progress=move)
        labels, made_with = store.labels.meanings(neurons), store.made_with()
    rows = [labels[name, polarity] for name in neurons for polarity in "+-"]
    title = f"{sum(meaning.significant for meaning in rows)} of {len(rows)} (neuron, sign) have a clear meaning"
    document = {**made_with, "meanings": [meaning.to_dict() for meaning in rows]}
    show(options.json, document, labels_table(rows[: max(2 * options.top, 40)], title))
