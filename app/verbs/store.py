"""The verbs about a store: index, neuron, search, annotate, label."""

from __future__ import annotations

from typing import Any

import click

from app.options import html_option, json_option, load, model_options, print_json, stdout, store_option, write_page


@click.command()
@click.option(
    "--corpus",
    default="wiki-summaries",
    show_default=True,
    help="Or a .txt, .jsonl, .csv, .parquet, or the id of a Hugging Face data set.",
)
@click.option("--language", default="en", show_default=True, help="Of the corpus: en, es or fr for wiki-summaries.")
@click.option("--column", default="text", show_default=True, help="Where files and data sets keep the text.")
@click.option("--config", help="Of a Hugging Face data set that has several.")
@click.option("--split", help="Of a Hugging Face data set; default: train.")
@click.option("--revision", help="Of a Hugging Face data set; default: the newest.")
@click.option("--limit", type=click.IntRange(min=1), help="Documents to read; a larger one goes on from a smaller one.")
@click.option("--max-tokens", default=256, show_default=True, help="Of a sentence; the rest of it is not read.")
@click.option(
    "--site",
    "sites",
    multiple=True,
    default=("ffn",),
    show_default=True,
    type=click.Choice(("ffn", "attn", "q", "k", "v")),
    help="Repeat it for several.",
)
@click.option("--k", default=32, show_default=True, type=click.IntRange(min=1), help="Examples a neuron and sign.")
@click.option(
    "--by",
    default="activation",
    show_default=True,
    type=click.Choice(("activation", "relevance")),
    help="Extreme in activation, or in relevance for the model's own predictions (RelMax; slower).",
)
@click.option("--engine", default="local", show_default=True, type=click.Choice(("local", "ray")))
@click.option("--workers", default=2, show_default=True, type=click.IntRange(min=1), help="Of the engine ray.")
@click.option("--address", help="Of a running Ray cluster; default: one on this machine, for the scan.")
@store_option
@model_options
def index(
    corpus: str, language: str, column: str, config: str | None, split: str | None, revision: str | None,
    limit: int | None, max_tokens: int, sites: tuple[str, ...], k: int, by: str, engine: str, workers: int,
    address: str | None, store_path: str, **options: Any,
) -> None:  # fmt: skip
    """Scan a corpus for the sentences that drive each neuron furthest. Interrupt it, run it again: it goes on.

    \b
    Example:
      icebear index --limit 20 --store wiki.db
    """
    from actmax.corpus import read_corpus
    from actmax.engines import local, on_ray
    from app.progress import indexing

    where = on_ray(workers, address) if engine == "ray" else local
    documents = read_corpus(corpus, limit, language, column, config, split, revision)
    indexing(load(**options), documents, store_path, k=k, sites=sites, by=by, max_tokens=max_tokens, engine=where)


@click.command()
@click.argument("neuron")
@click.option("--top", default=8, show_default=True, type=click.IntRange(min=1), help="Examples and words to show.")
@click.option("--annotate", "annotated", is_flag=True, help="Attribute the shown examples first, and keep that.")
@html_option
@json_option
@store_option
@model_options
def neuron(
    neuron: str, top: int, annotated: bool, html: str | None, as_json: bool, store_path: str, **options: Any
) -> None:  # fmt: skip
    """What NEURON means: its vocabulary and the sentences that drive it, both signs.

    \b
    Example:
      icebear neuron L29.ffn.860 --store wiki.db
    """
    from actmax.card import describe
    from app.progress import annotating
    from app.terminal import card
    from db.store import open_store
    from icebear.records import Neuron

    wanted = Neuron.parse(neuron)
    with open_store(store_path, create=False) as store:
        store.statistics(wanted)
        model = load(**options)
        store.check(model.fingerprint, model.name)
        if annotated:
            annotating(model, store, [wanted], top)
        found = describe(store, wanted, model, top)
    if html:
        write_page(html, found.to_html())
    if as_json:
        print_json(found.to_dict())
    else:
        stdout().print(card(found))


@click.command()
@click.argument("text")
@click.option("--top", default=20, show_default=True, type=click.IntRange(min=1))
@json_option
@store_option
def search(text: str, top: int, as_json: bool, store_path: str) -> None:
    """Which neurons know about TEXT: by what they write and by the sentences that drive them.

    \b
    Example:
      icebear search "Arctic ice" --store wiki.db --top 5
    """
    from app.terminal import hits
    from db.store import open_store

    with open_store(store_path, create=False) as store:
        found = store.search(text, top)
        labels, made_with = {hit.neuron: store.label(hit.neuron) for hit in found}, store.made_with()
    if as_json:
        rows = [{**vars(hit), "neuron": str(hit.neuron), "label": labels[hit.neuron]} for hit in found]
        print_json({**made_with, "hits": rows})
    else:
        stdout().print(hits(found, labels))


@click.command()
@click.argument("neurons", nargs=-1)
@click.option("--prompt", help="The neurons that matter most to what follows this prompt.")
@click.option("--top", default=50, show_default=True, type=click.IntRange(min=1), help="How many of them.")
@click.option("--k", default=8, show_default=True, type=click.IntRange(min=1), help="Examples a neuron and sign.")
@store_option
@model_options
def annotate(neurons: tuple[str, ...], prompt: str | None, top: int, k: int, store_path: str, **options: Any) -> None:
    """Attribute the examples of NEURONS to their tokens, and keep that in the store.

    \b
    Example:
      icebear annotate L29.ffn.860 --store wiki.db --k 2
    """
    from app.progress import annotating
    from concepts.attribution import attribute as run
    from db.store import open_store
    from icebear.records import Neuron

    if bool(neurons) == bool(prompt):
        raise click.UsageError("Give either NEURONS or --prompt.")
    wanted = [Neuron.parse(name) for name in neurons]
    with open_store(store_path, create=False) as store:
        for name in wanted:
            store.statistics(name)
        model = load(**options)
        if prompt:
            relevance = run(model, prompt, sites=store.fact("sites"))
            wanted = [row.neuron for row in relevance.top(top)]
        annotating(model, store, wanted, k)


@click.command()
@click.argument("neuron")
@click.argument("text")
@store_option
def label(neuron: str, text: str, store_path: str) -> None:
    """Call NEURON by a name of your own; an empty TEXT removes it.

    \b
    Example:
      icebear label L29.ffn.860 "the far north" --store wiki.db
    """
    from db.store import open_store
    from icebear.records import Neuron

    with open_store(store_path, create=False) as store:
        store.set_label(Neuron.parse(neuron), text)


VERBS = (index, neuron, search, annotate, label)
