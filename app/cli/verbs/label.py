"""`icebear label`: labels of neurons, your own or automatic, with scores."""

from __future__ import annotations

from dataclasses import replace

import click

import icebear
from icebear.app.cli.options import ModelOptions, argument, is_given, option, record, verb
from icebear.app.cli.output import claim, show
from icebear.app.cli.progress import bar
from icebear.app.cli.stores import neurons_named, store_or_shipped
from icebear.errors import need
from icebear.records import POLARITIES, AutomaticLabel, Neuron


@record
class Options:
    words: tuple[str, ...] = argument(nargs=-1, metavar="NEURON TEXT | [NEURON ...]")
    auto: bool = option("Find labels for the named neurons, and score these labels.")
    score: bool = option("Score TEXT as a label of NEURON.")
    writer: str | None = option(
        "Ask this server (OpenAI's API: vLLM, llama.cpp, Ollama, ...) for descriptions, such as "
        "http://localhost:8000/v1, and score them. Its key is read from OPENAI_API_KEY."
    )
    writer_model: str | None = option("Model of the server.", show_default="its first one")
    prompt: str | None
    all: bool = option("With --auto: label all neurons and heads in the store. This takes an hour or more.")
    top: int = option("With --prompt: number of neurons to label.", default=20, type="count")
    claim: str | None
    store: str
    json: bool
    model: ModelOptions


@verb(Options)
def label(options: Options) -> None:
    """Label NEURON with your own TEXT, or find labels (--auto) and score them on held-out sentences.

    An empty TEXT removes your label. With --auto --prompt "The ice bear lives in the", the command labels the 20 most
    relevant neurons for this prompt in about a minute. --auto needs an index of about 1,200 sentences, such as 300
    summaries. You can interrupt the command at any time; run it again to resume.

    With --writer, a language model of your choice describes each neuron from half of its sentences. The score says how
    well the description separates the other half from sentences that do not activate the neuron. Only descriptions
    that pass are shown.

    Example:
      icebear label L29.ffn.860 "the far north" --store wiki.db
      icebear label L29.ffn.860 --writer http://localhost:8000/v1
    """
    if options.writer:
        return _written(options)
    if options.auto:
        if options.score or bool(options.words) + bool(options.prompt) + options.all != 1:
            raise click.UsageError("With --auto, give exactly one of NEURONS, --prompt and --all, and no --score.")
        return _automatic(options)
    if len(options.words) != 2 or options.prompt or options.all:
        raise click.UsageError("Give a NEURON and a TEXT, or --auto.")
    if options.claim and not (options.score and options.words[1].strip()):
        raise click.UsageError("--claim needs a score: give a TEXT and --score, or --auto.")
    from icebear.app.cli.tables.cards import own_label_table

    name = options.model.model if options.score or is_given("model") else None
    neuron, text = Neuron.parse(options.words[0], name), options.words[1]
    options = _with_store(options, name)
    with icebear.open_store(options.store) as store:
        store.neurons.statistics(neuron)
        scores: list[AutomaticLabel] = []
        if options.score and text.strip():
            model = options.model.load()
            from icebear.actmax.labels.descriptions import score_label

            with bar("sentences") as move:
                scores = score_label(model, store, neuron, text, on_progress=move)
        store.labels.set_manual(neuron, text, scores)
        scored = {"scores": [meaning.to_dict() for meaning in scores]} if options.score else {}
        document = {**store.made_with(), "neuron": str(neuron), "label": store.labels.manual(neuron)[0], **scored}
    title = f"{neuron} as {text!r}, on held-out sentences"
    saved = f"{neuron} is labeled {text.strip()!r}." if text.strip() else f"{neuron} has no label of yours any more."
    show(options.json, document, saved, *([own_label_table(scores, title)] if scores else []))
    if options.claim:
        _claim(options, model, scores)


def _with_store(options: Options, name: str | None) -> Options:
    """Return the options with the store whose cards show the labels. name: of the model; None: the folder's."""
    return replace(options, store=store_or_shipped(options.store, options.model.load, name))


def _automatic(options: Options) -> None:
    from icebear.app.cli.tables.cards import labels_table

    need("index")
    neurons = [Neuron.parse(name, options.model.model) for name in options.words]
    options = _with_store(options, options.model.model)
    with icebear.open_store(options.store) as store:
        model, neurons = neurons_named(store, neurons, options.prompt, options.top, options.model)
        neurons = neurons or store.neurons.all_with_heads()
        from icebear.actmax.labels.auto import label_neurons

        with bar("sentences and neurons") as move:
            label_neurons(model, store, neurons, on_progress=move)
        labels, made_with = store.labels.automatic(neurons), store.made_with()
    rows = [labels[name, polarity] for name in neurons for polarity in POLARITIES]
    significant = sum(meaning.significant for meaning in rows)
    title = f"{significant} of {len(rows)} pairs of neuron and sign have a significant label"
    document = {**made_with, "meanings": [meaning.to_dict() for meaning in rows]}
    show(options.json, document, labels_table(rows[: max(2 * options.top, 40)], title))
    if options.claim:
        _claim(options, model, [meaning for meaning in rows if meaning.significant])


def _written(options: Options) -> None:
    """Ask a writer for descriptions of neurons, and show those that pass."""
    from icebear.actmax.labels.descriptions import calls_left, describe_neurons
    from icebear.actmax.labels.writer import Writer
    from icebear.app.cli.tables.cards import labels_table

    if options.score or options.all or options.claim or bool(options.words) == bool(options.prompt):
        raise click.UsageError("With --writer, give NEURONS or --prompt, and no --score, --all or --claim.")
    need("index")
    neurons = [Neuron.parse(name, options.model.model) for name in options.words]
    writer, options = Writer.at(str(options.writer), options.writer_model), _with_store(options, options.model.model)
    with icebear.open_store(options.store) as store:
        model, neurons = neurons_named(store, neurons, options.prompt, options.top, options.model)
        count = calls_left(store, neurons, writer)
        click.echo(f"{count} calls to {writer}; what was answered before is not asked again.", err=True)
        with bar("descriptions and sentences") as move:
            rows = describe_neurons(model, store, neurons, writer, on_progress=move)
        made_with = store.made_with()
    title = f"{sum(row.significant for row in rows)} of {len(rows)} descriptions by {writer} pass"
    document = {**made_with, "writer": str(writer), "meanings": [meaning.to_dict() for meaning in rows]}
    show(options.json, document, labels_table(rows, title))


def _claim(options: Options, model: icebear.Model, meanings: list[AutomaticLabel]) -> None:
    from icebear.claims.kinds.meanings import LabelClaim

    claim(str(options.claim), model, lambda: LabelClaim.of(options.store, meanings))
