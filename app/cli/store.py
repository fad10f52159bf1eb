"""The verbs about a store: index, neuron, search, annotate, label."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from icebear.app.cli.options import AT_LEAST_1, MODEL, load, options, print_json, stdout, write_page
from icebear.errors import StoreError
from icebear.extras import need

if TYPE_CHECKING:
    from icebear.db.store import Store
    from icebear.records import Meaning, Neuron

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
    from icebear.actmax.index.engines import local, on_ray
    from icebear.app.cli.progress import indexing
    from icebear.concepts.corpus import read_corpus
    from icebear.db.store import open_store

    need("index")
    where = on_ray(workers, address) if engine == "ray" else local
    documents = read_corpus(WIKI if corpus is None else corpus, limit, language, column, config, split, revision)
    model = load(**given)
    counts = indexing(model, documents, store_path, k=k, sites=site, by=by, max_tokens=max_tokens, engine=where)
    if as_json:
        with open_store(store_path) as store:
            print_json({**store.made_with(), "store": store_path, "counts": counts})
    else:
        click.echo(f"{store_path}: {', '.join(f'{count:,} {what}' for what, count in counts.items())}")


@click.command()
@click.argument("neuron", required=False)
@click.option("--clear", is_flag=True, help="Instead of one: the neurons whose automatic labels hold, clearest first.")
@options("--top")
@click.option("--annotate", "annotated", is_flag=True, help="Attribute the shown examples first, and keep that.")
@options("--html", "--store", "--json", *MODEL)
def neuron(
    neuron: str | None,
    clear: bool,
    top: int,
    annotated: bool,
    html: str | None,
    store_path: str,
    as_json: bool,
    **given: Any,
) -> None:
    """What NEURON means: its vocabulary and the sentences that drive it, both signs; its label with its score.

    \b
    Example:
      icebear neuron L29.ffn.860 --store wiki.db
    """
    from icebear.actmax.card import describe
    from icebear.app.cli.progress import annotating
    from icebear.app.cli.terminal import card
    from icebear.db.store import open_store
    from icebear.records import Neuron

    if (neuron is None) != clear:
        raise click.UsageError("Give either a NEURON or --clear.")
    need("index")
    if neuron is None:
        return _clearest(store_path, top, as_json)
    wanted = Neuron.parse(neuron)
    if wanted.site == "head":
        return _head(wanted, store_path, as_json)
    with open_store(store_path) as store:
        store.neurons.statistics(wanted)
        model = load(**given)
        store.check(model.fingerprint, model.name)
        if annotated:
            annotating(model, store, [wanted], top)
        found = describe(store, wanted, model, top, whole=True)
    if html:
        write_page(html, found.to_html())
    if as_json:
        print_json(found.to_dict())
    else:
        stdout().print(card(found))


def _head(head: Neuron, store_path: str, as_json: bool) -> None:
    """What is known of an attention head: its label, of the tokens that it attends to."""
    from icebear.actmax.card import held_out
    from icebear.app.cli.terminal import meaning_told
    from icebear.db.store import open_store

    with open_store(store_path) as store:
        found, made_with = list(store.labels.meanings([head]).values())[:1], store.made_with()
        if not found:
            raise StoreError(f"{head} has no label yet; make one with icebear label --auto {head}.")
        told = meaning_told("+ (attends to)", found[0], held_out(store, found[0]))
    if as_json:
        print_json({**made_with, "neuron": str(head), "meaning": found[0].to_dict()})
    else:
        stdout().print(*told, sep="\n")


def _clearest(store_path: str, top: int, as_json: bool) -> None:
    from icebear.actmax.labels.lists import clearest
    from icebear.app.cli.terminal import meanings
    from icebear.db.store import open_store

    with open_store(store_path) as store:
        tried, made_with = store.labels.all_meanings(), store.made_with()
    if not tried:
        raise StoreError(f"{store_path} has no automatic labels yet; make them with icebear label --auto.")
    found = clearest(tried)
    if as_json:
        print_json({**made_with, "tried": len(tried), "clear": [meaning.to_dict() for meaning in found[:top]]})
    else:
        title = f"{len(found):,} of {len(tried):,} (neuron, sign) have a clear meaning, at most 5 % of them by chance"
        stdout().print(meanings(found[:top], title))


@click.command()
@click.argument("text")
@options("--top", "--store", "--json")
def search(text: str, top: int, store_path: str, as_json: bool) -> None:
    """Which neurons know about TEXT: by what they write and by the sentences that drive them.

    \b
    Example:
      icebear search "Arctic ice" --store wiki.db --top 5
    """
    from icebear.app.cli.terminal import hits
    from icebear.db.store import open_store

    with open_store(store_path) as store:
        found = store.search(text, top)
        labels, made_with = {hit: store.labels.name(hit.neuron, hit.polarity) for hit in found}, store.made_with()
    if as_json:
        rows = [{**vars(hit), "neuron": str(hit.neuron), "label": labels[hit]} for hit in found]
        print_json({**made_with, "hits": rows})
    else:
        stdout().print(hits(found, labels))


@click.command()
@click.argument("neurons", nargs=-1)
@options("--prompt", "--top", "--k", "--store", "--json", *MODEL)
def annotate(
    neurons: tuple[str, ...], prompt: str | None, top: int, k: int, store_path: str, as_json: bool, **given: Any
) -> None:
    """Attribute the examples of NEURONS to their tokens, and keep that in the store.

    \b
    Example:
      icebear annotate L29.ffn.860 --store wiki.db --k 2
    """
    from icebear.app.cli.progress import annotating
    from icebear.concepts.attribution.attribute import attribute as run
    from icebear.db.store import open_store
    from icebear.records import Neuron

    if bool(neurons) == bool(prompt):
        raise click.UsageError("Give either NEURONS or --prompt.")
    wanted = [Neuron.parse(name) for name in neurons]
    with open_store(store_path) as store:
        sites = store.facts.get("sites")
        for name in wanted:
            store.neurons.statistics(name)
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
@click.argument("words", nargs=-1, metavar="NEURON TEXT | [NEURON ...]")
@click.option("--auto", "automatic", is_flag=True, help="Find labels of NEURONS, and score them.")
@click.option("--score", "scoring", is_flag=True, help="Score TEXT as what the neuron means.")
@options("--prompt")
@click.option("--all", "everything", is_flag=True, help="With --auto: all neurons of the store; hours.")
@options("--top", "--store", "--json", *MODEL)
def label(
    words: tuple[str, ...],
    automatic: bool,
    scoring: bool,
    prompt: str | None,
    everything: bool,
    top: int,
    store_path: str,
    as_json: bool,
    **given: Any,
) -> None:
    """Call NEURON by a name of your own (an empty TEXT removes it); or find labels, with scores, and keep them.

    With --auto --prompt "The ice bear lives in the" the 20 neurons that matter most there: about two minutes, with an
    index of at least 300 summaries. Interrupt it, run it again: it goes on.

    \b
    Example:
      icebear label L29.ffn.860 "the far north" --store wiki.db
    """
    from icebear.db.store import open_store
    from icebear.records import Neuron

    if automatic:
        if scoring or bool(words) + bool(prompt) + everything != 1:
            raise click.UsageError("With --auto give NEURONS, --prompt or --all.")
        return _automatic([Neuron.parse(name) for name in words], prompt, top, store_path, as_json, given)
    if len(words) != 2 or prompt or everything:
        raise click.UsageError("Give a NEURON and a TEXT, or --auto.")
    named, text = Neuron.parse(words[0]), words[1]
    with open_store(store_path) as store:
        store.neurons.statistics(named)
        found = _own_score(store, named, text, given) if scoring and text.strip() else []
        store.labels.set_own(named, text, found)
        if as_json:
            scores = {"scores": [meaning.to_dict() for meaning in found]} if scoring else {}
            print_json({**store.made_with(), "neuron": str(named), "label": store.labels.own(named), **scores})
        elif found:
            from icebear.app.cli.terminal import meanings

            stdout().print(meanings(found, f"{named} as {text!r}, by sentences it was not made from"))


def _own_score(store: Store, named: Neuron, text: str, given: dict[str, Any]) -> list[Meaning]:
    from icebear.actmax.labels.auto import score_label
    from icebear.app.cli.progress import bar

    with bar("sentences") as move:
        return score_label(load(**given), store, named, text, on_progress=move)


def _automatic(
    neurons: list[Neuron], prompt: str | None, top: int, store_path: str, as_json: bool, given: dict[str, Any]
) -> None:
    from icebear.actmax.labels.auto import label_neurons
    from icebear.app.cli.progress import bar
    from icebear.app.cli.terminal import meanings
    from icebear.concepts.attribution.attribute import attribute as run
    from icebear.db.store import open_store

    need("index")
    with open_store(store_path) as store:
        sites = store.facts.get("sites")
        for name in neurons:
            if name.site != "head":
                store.neurons.statistics(name)
        model = load(**given)
        if prompt:
            neurons = [row.neuron for row in run(model, prompt, sites=sites).top(top)]
        elif not neurons:
            neurons = store.neurons.all()
        with bar("sentences and neurons") as move:
            label_neurons(model, store, neurons, on_progress=move)
        found, made_with = store.labels.meanings(neurons), store.made_with()
    rows = [found[name, polarity] for name in neurons for polarity in "+-"]
    clear = sum(meaning.clear for meaning in rows)
    if as_json:
        print_json({**made_with, "meanings": [meaning.to_dict() for meaning in rows]})
    else:
        title = f"{clear} of {len(rows)} (neuron, sign) have a clear meaning"
        stdout().print(meanings(rows[: max(2 * top, 40)], title))


VERBS = (index, neuron, search, annotate, label)
