"""`icebear index`: the sentences that activate each neuron most."""

from __future__ import annotations

from functools import partial

import click

import icebear
from icebear.app.cli.options import Choice, ModelOptions, argument, named, option, record, verb
from icebear.app.cli.output import show
from icebear.app.cli.progress import annotating, bar, indexing
from icebear.app.cli.stores import named_or_folder_store, neurons_named, store_or_shipped
from icebear.errors import InputError, need
from icebear.paths import local
from icebear.records import LENSES

WIKI = "wiki-summaries"
SITES = ("ffn", "attn", "q", "k", "v", "mixer", "head")


@record
class Options:
    neurons: tuple[str, ...] = argument(nargs=-1)
    corpus: str | None
    language: str = option(f"Language of the corpus; en, es or fr for {WIKI}.", "en", advanced=True)
    column: str = option("Column (or field) of a file or dataset that has the text.", "text", advanced=True)
    subset: str | None = option("Subset (configuration) of a Hugging Face dataset.", advanced=True)
    split: str | None = option("Split of a Hugging Face dataset.", show_default="train", advanced=True)
    revision: str | None = option("Revision of a Hugging Face dataset.", show_default="latest", advanced=True)
    limit: int | None = option(
        "Number of documents to read, a sample of the corpus. Run again with a larger number to extend the index.",
        type="count",
    )

    site: tuple[str, ...] = option(
        "Site of the neurons; head for attention heads.", ("ffn", "head"), multiple=True, type=Choice(SITES)
    )
    k: int = option("Number of examples for each neuron and polarity (sign of the activation).", 32, type="count")
    annotate: bool
    prompt: str | None
    top: int = option("With --prompt: number of neurons to annotate.", default=20, type="count")
    lens: bool = option(
        "Scan nothing; build the averaged Jacobian lens of the model. This needs no corpus. Do it once for each model."
    )
    status: bool = option("Scan nothing; show what the index has, and how far its scan is.")
    store: str = option(type="file")
    json: bool
    max_tokens: int = option(default=256, advanced=True)
    encoder: str = option(
        "Sentence encoder that says what the examples are about, for icebear search: minilm, a folder, or none.",
        "minilm",
        advanced=True,
    )
    model: ModelOptions


@verb(Options)
def index(options: Options) -> None:
    """Index the maximally activating sentences (the examples) of every neuron and attention head.

    You can interrupt the command at any time; run it again to resume.

    With --annotate, the command scans no text. It takes the examples of NEURONS (or, with --prompt, of the most
    relevant neurons) and attributes the neuron's activation in each example to the tokens of the example.

    With --lens, the command builds the averaged Jacobian lens of the model. The command "icebear neuron" then
    shows the words that a neuron promotes through the layers above, and how well these words predict measured effects.
    If there is a store, "icebear neuron" needs --effects to show these words, and "icebear search" uses them without
    any option.

    Example:
      icebear index --limit 20 --store wiki.db
      icebear index --annotate L29.ffn.860 --k 2 --store wiki.db
      icebear index --lens
    """
    modes = {"--status": options.status, "--annotate": options.annotate, "--lens": options.lens}
    chosen = [mode for mode, is_chosen in modes.items() if is_chosen]
    if len(chosen) > 1 or (chosen and options.corpus is not None):
        raise click.UsageError(f"{' and '.join([*chosen, '--corpus'][:2])} exclude each other; give one of them.")
    if options.status:
        return _status(options)
    if options.annotate:
        return _annotate(options)
    if options.neurons or options.prompt:
        raise click.UsageError("NEURONS and --prompt need --annotate; add it, or leave them out.")
    if options.lens:
        return _lens(options)
    need("index")
    from icebear.actmax.shipped.index_choice import replacement

    documents = icebear.read_corpus(
        WIKI if options.corpus is None else options.corpus,
        *(options.limit, options.language, options.column, options.subset, options.split, options.revision),
    )
    how = {"k": options.k, "sites": options.site, "max_tokens": options.max_tokens}
    encoder = _encoder(options.encoder) if options.encoder != "none" else None
    counts = indexing(options.model.load(), documents, options.store, encoder, **how)
    with icebear.open_store(options.store) as store:
        document = {**store.made_with(), "store": options.store, "counts": counts}
    lines = [f"{options.store}: {', '.join(f'{n:,} {what}' for what, n in counts.items())}"]
    lines += filter(None, [replacement(local(options.store), document["model"]["name"])])
    show(options.json, document, *lines)


def _encoder(name: str) -> icebear.Encoder | None:
    from icebear.models.loading.encoder import default_encoder

    return icebear.load_encoder(name) if named("encoder") else default_encoder(partial(click.echo, err=True))


def _status(options: Options) -> None:
    path = store_or_shipped(options.store, options.model.load, options.model.model)
    with icebear.open_store(path) as store:
        made_with, status = store.made_with(), store.status()
    facts = {"store": path, "model": made_with["model"]["name"], **made_with["index"], **status}
    texts = {name: f"{value:,}" if isinstance(value, int) else value for name, value in facts.items()}
    document = {**made_with, "store": path, "status": status}
    show(options.json, document, *(f"{name:<18} {text}" for name, text in texts.items()))


def _lens(options: Options) -> None:
    from icebear.actmax.index.neuron_vectors import ensure_vectors
    from icebear.app.cli.tables.cards import reliability_table
    from icebear.concepts.vocabulary.lens import WIDEST, build_mean_lens, mean_lens

    model = options.model.load()
    width, lens = model.config.hidden_size, mean_lens(model)
    if lens is None and width > WIDEST and model.device.type == "cpu":
        raise InputError(
            f"The lens of {model.name} takes {width:,} backward passes, too many without a GPU; use icebear neuron, "
            "which computes the words of one neuron in one backward pass."
        )
    if lens is None:
        with bar("steps") as move:
            lens = build_mean_lens(model, move)
    with named_or_folder_store(options.store, model) as store:
        if store:
            ensure_vectors(model, store)
    rows = [
        {"layer": layer, "lens": name, **reliability._asdict()}
        for layer, both in enumerate(zip(lens.direct, lens.reliability, strict=True))
        for name, reliability in zip(LENSES, both, strict=True)
        if reliability
    ]
    show(options.json, {**lens.made_with, "file": str(lens.file), "reliability": rows}, reliability_table(lens))


def _annotate(options: Options) -> None:
    if bool(options.neurons) == bool(options.prompt):
        raise click.UsageError("With --annotate give either NEURONS or --prompt.")
    path = store_or_shipped(options.store, options.model.load, options.model.model)
    with icebear.open_store(path) as store:
        model, neurons = neurons_named(store, options.neurons, options.prompt, options.top, options.model)
        count = annotating(model, store, neurons, options.k)
        document = {**store.made_with(), "neurons": list(map(str, neurons)), "attributed": count}
    show(options.json, document, f"Attributed {count} examples; earlier ones are unchanged.")
