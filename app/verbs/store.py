"""The verbs about a store: index, neuron, search, annotate, label."""

from __future__ import annotations

from typing import Any

import click

from app.options import AT_LEAST_1, MODEL, load, options, print_json, stdout, write_page
from icebear.extras import need

WIKI = "wiki-summaries"


@click.command()
@options("--corpus")
@click.option("--language", default="en", show_default=True, help=f"Of the corpus: en, es or fr for {WIKI}.")
@click.option("--column", default="text", show_default=True, help="Where files and data sets keep the text.")
@click.option("--config", help="Of a Hugging Face data set that has several.")
@click.option("--split", help="Of a Hugging Face data set; default: train.")
@click.option("--revision", help="Of a Hugging Face data set; default: the newest.")
@click.option("--limit", type=AT_LEAST_1, help="Documents to read; a larger one goes on from a smaller one.")
@options("--max-tokens", default=256)
@options(
    "--site",
    multiple=True,
    default=("ffn",),
    type=click.Choice(("ffn", "attn", "q", "k", "v")),
)
@options("--k")
@click.option(
    "--by",
    default="activation",
    show_default=True,
    type=click.Choice(("activation", "relevance")),
    help="Extreme in activation, or in relevance for the model's own predictions (RelMax; slower).",
)
@click.option("--engine", default="local", show_default=True, type=click.Choice(("local", "ray")))
@click.option("--workers", default=2, show_default=True, type=AT_LEAST_1, help="Of the engine ray.")
@click.option("--address", help="Of a running Ray cluster; default: one on this machine, for the scan.")
@options("--store", "--json", *MODEL)
def index(
    corpus: str | None,
    language: str,
    column: str,
    config: str | None,
    split: str | None,
    revision: str | None,
    limit: int | None,
    max_tokens: int,
    site: tuple[str, ...],
    k: int,
    by: str,
    engine: str,
    workers: int,
    address: str | None,
    store_path: str,
    as_json: bool,
    **given: Any,
) -> None:
    """Scan a corpus for the sentences that drive each neuron furthest. Interrupt it, run it again: it goes on.

    \b
    Example:
      icebear index --limit 20 --store wiki.db
    """
    from actmax.corpus import read_corpus
    from actmax.engines import local, on_ray
    from app.progress import indexing
    from db.store import open_store

    need("index")
    where = on_ray(workers, address) if engine == "ray" else local
    documents = read_corpus(corpus or WIKI, limit, language, column, config, split, revision)
    model = load(**given)
    counts = indexing(model, documents, store_path, k=k, sites=site, by=by, max_tokens=max_tokens, engine=where)
    if as_json:
        with open_store(store_path) as store:
            print_json({**store.made_with(), "store": store_path, "counts": counts})
    else:
        click.echo(f"{store_path}: {', '.join(f'{count:,} {what}' for what, count in counts.items())}")


@click.command()
@click.argument("neuron")
@options("--top")
@click.option("--annotate", "annotated", is_flag=True, help="Attribute the shown examples first, and keep that.")
@options("--html", "--store", "--json", *MODEL)
def neuron(
    neuron: str, top: int, annotated: bool, html: str | None, store_path: str, as_json: bool, **given: Any
) -> None:
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

    need("index")
    wanted = Neuron.parse(neuron)
    with open_store(store_path) as store:
        store.statistics(wanted)
        model = load(**given)
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
@options("--top", "--store", "--json")
def search(text: str, top: int, store_path: str, as_json: bool) -> None:
    """Which neurons know about TEXT: by what they write and by the sentences that drive them.

    \b
    Example:
      icebear search "Arctic ice" --store wiki.db --top 5
    """
    from app.terminal import hits
    from db.store import open_store

    with open_store(store_path) as store:
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
@options("--top", "--k", "--store", "--json", *MODEL)
def annotate(
    neurons: tuple[str, ...], prompt: str | None, top: int, k: int, store_path: str, as_json: bool, **given: Any
) -> None:
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
    with open_store(store_path) as store:
        sites = store.fact("sites")
        for name in wanted:
            store.statistics(name)
        model = load(**given)
        if prompt:
            relevance = run(model, prompt, sites=sites)
            wanted = [row.neuron for row in relevance.top(top)]
        done = annotating(model, store, wanted, k)
        if as_json:
            print_json({**store.made_with(), "neurons": list(map(str, wanted)), "attributed": done})
        else:
            click.echo(f"{done} examples attributed; those that were before are kept.")


@click.command()
@click.argument("neuron")
@click.argument("text")
@options("--store", "--json")
def label(neuron: str, text: str, store_path: str, as_json: bool) -> None:
    """Call NEURON by a name of your own; an empty TEXT removes it.

    \b
    Example:
      icebear label L29.ffn.860 "the far north" --store wiki.db
    """
    from db.store import open_store
    from icebear.records import Neuron

    named = Neuron.parse(neuron)
    with open_store(store_path) as store:
        store.set_label(named, text)
        if as_json:
            print_json({**store.made_with(), "neuron": str(named), "label": store.label(named)})


VERBS = (index, neuron, search, annotate, label)
