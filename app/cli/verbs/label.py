"""`icebear label`: names for neurons, your own or found, with scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from icebear.app.cli.options import ModelOptions, argument, option, record, verb
from icebear.app.cli.output import print_json, stdout
from icebear.app.cli.progress import bar
from icebear.extras import need

if TYPE_CHECKING:
    from icebear.db.store import Store
    from icebear.records import Meaning, Neuron


@record
class Options:
    words: tuple[str, ...] = argument(nargs=-1, metavar="NEURON TEXT | [NEURON ...]")
    auto: bool = option("Find labels of NEURONS, and score them.", False, is_flag=True)
    score: bool = option("Score TEXT as what the neuron means.", False, is_flag=True)
    prompt: str | None
    all: bool = option("With --auto: all neurons of the store; hours.", False, is_flag=True)
    top: int
    store: str
    json: bool
    model: ModelOptions


@verb(Options)
def label(options: Options) -> None:
    """Call NEURON by a name of your own (an empty TEXT removes it); or find labels, with scores, and keep them.

    With --auto --prompt "The ice bear lives in the" the 20 neurons that matter most there: about two minutes, with an
    index of at least 300 summaries. Interrupt it, run it again: it goes on.

    \b
    Example:
      icebear label L29.ffn.860 "the far north" --store wiki.db
    """
    from icebear.app.cli.terminal import meanings
    from icebear.db.store import open_store
    from icebear.records import Neuron

    if options.auto:
        if options.score or bool(options.words) + bool(options.prompt) + options.all != 1:
            raise click.UsageError("With --auto give NEURONS, --prompt or --all.")
        return _automatic(options)
    if len(options.words) != 2 or options.prompt or options.all:
        raise click.UsageError("Give a NEURON and a TEXT, or --auto.")
    neuron, text = Neuron.parse(options.words[0]), options.words[1]
    with open_store(options.store) as store:
        store.neurons.statistics(neuron)
        scores = _scores(store, neuron, text, options.model) if options.score and text.strip() else []
        store.labels.set_own(neuron, text, scores)
        if options.json:
            scored = {"scores": [meaning.to_dict() for meaning in scores]} if options.score else {}
            print_json({**store.made_with(), "neuron": str(neuron), "label": store.labels.own(neuron), **scored})
        elif scores:
            stdout().print(meanings(scores, f"{neuron} as {text!r}, by sentences it was not made from"))


def _scores(store: Store, neuron: Neuron, text: str, loading: ModelOptions) -> list[Meaning]:
    from icebear.actmax.labels.auto import score_label

    with bar("sentences") as move:
        return score_label(loading.load(), store, neuron, text, on_progress=move)


def _automatic(options: Options) -> None:
    from icebear.actmax.labels.auto import label_neurons
    from icebear.app.cli.stores import neurons_named
    from icebear.app.cli.terminal import meanings
    from icebear.db.store import open_store

    need("index")
    with open_store(options.store) as store:
        model, neurons = neurons_named(store, options.words, options.prompt, options.top, options.model)
        neurons = neurons or store.neurons.all()
        with bar("sentences and neurons") as move:
            label_neurons(model, store, neurons, on_progress=move)
        labels, made_with = store.labels.meanings(neurons), store.made_with()
    rows = [labels[name, polarity] for name in neurons for polarity in "+-"]
    if options.json:
        print_json({**made_with, "meanings": [meaning.to_dict() for meaning in rows]})
    else:
        significant = sum(meaning.clear for meaning in rows)
        title = f"{significant} of {len(rows)} (neuron, sign) have a clear meaning"
        stdout().print(meanings(rows[: max(2 * options.top, 40)], title))
