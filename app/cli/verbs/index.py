"""`icebear index`: the sentences that activate each neuron most."""

from __future__ import annotations

from typing import Literal

import click

import icebear
from icebear.app.cli.options import AT_LEAST_1, ModelOptions, argument, option, record, verb
from icebear.app.cli.output import show
from icebear.app.cli.progress import annotating, indexing
from icebear.app.cli.stores import neurons_named
from icebear.extras import need

WIKI, SITES = "wiki-summaries", ("ffn", "attn", "q", "k", "v")


@record
class Options:
    neurons: tuple[str, ...] = argument(nargs=-1)
    corpus: str | None
    language: str = option(f"Language of the corpus; en, es or fr for {WIKI}.", "en", advanced=True)
    column: str = option("Column or field of files and datasets that has the text.", "text", advanced=True)
    config: str | None = option("Configuration of a Hugging Face dataset.", advanced=True)
    split: str | None = option("Split of a Hugging Face dataset.", show_default="train", advanced=True)
    revision: str | None = option("Revision of a Hugging Face dataset.", show_default="latest", advanced=True)
    limit: int | None = option("Documents to read; run again with more to extend the index.", type=AT_LEAST_1)

    site: tuple[str, ...] = option("Site of the neurons.", ("ffn",), multiple=True, type=click.Choice(SITES))
    k: int = option("Number of examples for each neuron and polarity.", 32, type=AT_LEAST_1)
    annotate: bool
    prompt: str | None
    top: int
    store: str
    json: bool
    max_tokens: int = option(default=256, advanced=True)
    by: Literal["activation", "relevance"] = option(
        "Rank examples by activation, or by relevance (RelMax; slower).", "activation", advanced=True
    )
    engine: Literal["local", "ray"] = option("Engine that runs the scan.", "local", advanced=True)
    workers: int = option("Number of Ray workers.", 2, type=AT_LEAST_1, advanced=True)
    address: str | None = option("Address of a Ray cluster.", show_default="a new one on this machine", advanced=True)
    model: ModelOptions


@verb(Options)
def index(options: Options) -> None:
    """Index the maximally activating sentences of every neuron.

    You can interrupt it at any time; run it again to resume.

    With --annotate, no text is scanned. The activations in the examples of NEURONS (or, with --prompt, of the most
    relevant neurons) are attributed to the tokens of their sentences.

    Example:
      icebear index --limit 20 --store wiki.db
      icebear index --annotate L29.ffn.860 --k 2 --store wiki.db
    """
    if options.annotate:
        return _annotate(options)
    if options.neurons or options.prompt:
        raise click.UsageError("NEURONS and --prompt need --annotate.")
    from icebear.actmax.index.engines import in_process, on_ray

    need("index")
    engine = on_ray(options.workers, options.address) if options.engine == "ray" else in_process
    documents = icebear.read_corpus(
        WIKI if options.corpus is None else options.corpus,
        *(options.limit, options.language, options.column, options.config, options.split, options.revision),
    )
    how = {"k": options.k, "sites": options.site, "by": options.by, "max_tokens": options.max_tokens}
    counts = indexing(options.model.load(), documents, options.store, **how, engine=engine)
    with icebear.open_store(options.store) as store:
        document = {**store.made_with(), "store": options.store, "counts": counts}
    show(options.json, document, f"{options.store}: {', '.join(f'{n:,} {what}' for what, n in counts.items())}")


def _annotate(options: Options) -> None:
    if bool(options.neurons) == bool(options.prompt):
        raise click.UsageError("With --annotate give either NEURONS or --prompt.")
    with icebear.open_store(options.store) as store:
        model, neurons = neurons_named(store, options.neurons, options.prompt, options.top, options.model)
        count = annotating(model, store, neurons, options.k)
        document = {**store.made_with(), "neurons": list(map(str, neurons)), "attributed": count}
    show(options.json, document, f"Attributed {count} examples; earlier ones are unchanged.")
