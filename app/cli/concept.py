"""The verbs of concepts: find them from examples, look at them, measure texts by them, turn them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from icebear.app.cli.options import AT_LEAST_1, FILE, MODEL, lines, load, options, print_json, stdout, write_page
from icebear.app.cli.progress import bar
from icebear.paths import local

if TYPE_CHECKING:
    from icebear.steering.concept.concept import Concept


@click.group()
def concept() -> None:
    """Sets of neurons: found from examples, measured in a text, turned at a known price.

    NAME is a concept of the store, or a .json file that icebear concept export wrote.

    \b
    Example:
      icebear concept show examples/music.json
    """


@concept.command()
@click.argument("name")
@click.option("--with", "with_", type=FILE, required=True, help="Texts with the concept: a file, one a line.")
@click.option("--without", type=FILE, required=True, help="Texts without it, otherwise as alike as can be.")
@click.option("--rank-by", default="means", show_default=True, help="means, cna, relevance, w2 or search (docs).")
@click.option("--words", help="The concept's words, with commas; for --rank-by relevance, w2 and search.")
@click.option("--most", default=20, show_default=True, type=AT_LEAST_1, help="Of how many neurons it is at most.")
@options("--site", default="ffn,attn")
@options("--seed", "--save", "--store", "--json", *MODEL)
def find(
    name: str,
    with_: str,
    without: str,
    rank_by: str,
    words: str | None,
    most: int,
    site: str,
    seed: int,
    save: str | None,
    store_path: str,
    as_json: bool,
    **given: Any,
) -> None:
    """Find the fewest neurons that tell texts with a concept from texts without it, and keep them as NAME.

    Half of the texts rank neurons, a quarter chooses how many and by what weights, a quarter tests them.

    \b
    Example:
      icebear concept find music --with examples/music.txt --without examples/not-music.txt
    """
    from icebear.app.cli.concepts_told import concept_table
    from icebear.db.store import open_store
    from icebear.steering.concept.finding import find_concept

    texts = lines(with_), lines(without)
    model = load(**given)
    asked = [word.strip() for word in (words or "").split(",") if word.strip()]
    with open_store(store_path, create=True) as store:
        store.check(model.fingerprint, model.name)
        with bar("texts") as move:
            found = find_concept(
                model,
                *texts,
                name=name,
                method=rank_by,
                most=most,
                sites=[one.strip() for one in site.split(",")],
                words=asked,
                store=store,
                seed=seed,
                on_progress=move,
            )
        store.concepts.set(found.to_dict())
        labels = {(part.neuron, part.polarity): store.labels.name(part.neuron, part.polarity) for part in found.parts}
    if save:
        found.save(save)
    if as_json:
        print_json(found.to_dict())
    else:
        stdout().print(concept_table(found, labels))


@concept.command("list")
@options("--store", "--json")
def list_(store_path: str, as_json: bool) -> None:
    """The concepts of the store.

    \b
    Example:
      icebear concept list --store wiki.db
    """
    from icebear.app.cli.concepts_told import concepts_table
    from icebear.db.store import open_store

    found = []
    if local(store_path).exists():
        with open_store(store_path) as store:
            found = [store.concepts.get(name) for name in store.concepts.names()]
    if as_json:
        print_json({"concepts": found})
    elif found:
        stdout().print(concepts_table(found))
    else:
        click.echo("No concepts yet; find one with icebear concept find NAME --with FILE --without FILE.")


@concept.command()
@click.argument("name")
@options("--store", "--json")
def show(name: str, store_path: str, as_json: bool) -> None:
    """The neurons of a concept, how it was found, and the concepts that are like it.

    \b
    Example:
      icebear concept show examples/music.json
    """
    from icebear.app.cli.concepts_told import concept_table
    from icebear.db.store import open_store
    from icebear.steering.concept.likeness import nearest

    found = _read(name, store_path)
    labels: dict[Any, str | None] = {}
    alike: list[tuple[str, float]] = []
    if not name.endswith(".json"):
        with open_store(store_path) as store:
            labels = {
                (part.neuron, part.polarity): store.labels.name(part.neuron, part.polarity) for part in found.parts
            }
        others = [_read(other, store_path) for other in _names(store_path) if other != name]
        alike = nearest(found, others)
    if as_json:
        print_json({**found.to_dict(), "alike": [{"name": other, "overlap": share} for other, share in alike]})
    else:
        stdout().print(concept_table(found, labels, alike))


@concept.command()
@click.argument("name")
@click.argument("text", required=False)
@click.option("--texts", type=FILE, help="Many instead of TEXT: a file, one a line.")
@click.option("--through", is_flag=True, help="How much of what TEXT predicts passes through the concept, too.")
@options("--html", "--store", "--json", *MODEL)
def measure(
    name: str,
    text: str | None,
    texts: str | None,
    through: bool,
    html: str | None,
    store_path: str,
    as_json: bool,
    **given: Any,
) -> None:
    """How much of a concept is in TEXT, token by token; in standard deviations over the texts without it.

    \b
    Example:
      icebear concept measure examples/music.json "The band played on."
    """
    from icebear.app.cli.concepts_told import measured_table

    if (text is None) is (texts is None):
        raise click.UsageError("Give either a TEXT or --texts.")
    if texts and (through or html):
        raise click.UsageError("--through and --html are for one TEXT.")
    found = _read(name, store_path)
    asked = lines(texts) if texts else [str(text)]
    model = load(**given)
    rows = found.measures(model, asked)
    passing = found.through(model, asked[0]) if through else None
    if html:
        write_page(html, rows[0].to_html())
    if as_json:
        told = {"through": passing.to_dict()} if passing else {}
        print_json({"model": model.made_with, "measured": [row.to_dict() for row in rows], **told})
    else:
        stdout().print(measured_table(rows, passing))


@concept.command()
@click.argument("name")
@click.argument("prompt")
@click.option("--strength", type=float, help="Times the furthest that its neurons were seen to go.")
@click.option("--kl", type=float, help="Instead: nats that it may cost at neutral places.  [default: 0.25]")
@options("--suppress")
@click.option(
    "--where", default="all", show_default=True, help="all, prompt, last, generated, answer, ... (docs/steer.md)"
)
@options("--max-new-tokens", "--temperature", "--seed", "--save", "--store", "--json", *MODEL)
def steer(
    name: str,
    prompt: str,
    strength: float | None,
    kl: float | None,
    suppress: bool,
    where: str,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    save: str | None,
    store_path: str,
    as_json: bool,
    **given: Any,
) -> None:
    """Write on after PROMPT, without a concept and with it, at a price.

    \b
    Example:
      icebear concept steer examples/music.json "Yesterday I" --kl 0.25
    """
    from icebear.app.cli.concepts_told import turned_line
    from icebear.app.cli.terminal import side_by_side
    from icebear.steering.comparison import compare

    if strength is not None and kl is not None:
        raise click.UsageError("Give either --strength or --kl.")
    found = _read(name, store_path)
    model = load(**given)
    price = 0.25 if strength is None and kl is None else kl
    recipe = found.recipe(model, strength, price, where, suppress=suppress)
    result = compare(model, prompt, recipe, max_new_tokens, None, temperature, seed)
    values = [found.measure(model, prompt + side.text).value for side in (result.plain, result.steered)]
    if save:
        recipe.save(save)
    if as_json:
        print_json(
            {
                **result.to_dict(),
                "recipe": recipe.to_dict(),
                "measured": dict(zip(("plain", "steered"), values, strict=True)),
            }
        )
    else:
        stdout().print(side_by_side(result), turned_line(found, recipe, values))


@concept.command()
@click.argument("name")
@click.argument("file", type=FILE)
@options("--store", "--json")
def export(name: str, file: str, store_path: str, as_json: bool) -> None:
    """Write a concept of the store to FILE, as JSON.

    \b
    Example:
      icebear concept export music music.json --store wiki.db
    """
    found = _read(name, store_path)
    found.save(file)
    if as_json:
        print_json(found.to_dict())


@concept.command()
@click.argument("names", nargs=2, metavar="NAME OTHER")
@click.option("--on", type=FILE, required=True, help="Texts that both measure: a file, one a line.")
@options("--store", "--json")
def compare(names: tuple[str, str], on: str, store_path: str, as_json: bool) -> None:
    """How alike two concepts are, also those of two models: neurons, what they write, what they measure.

    \b
    Example:
      icebear concept compare music.json other.json --on examples/music.txt
    """
    from icebear.app.cli.concepts_told import likeness_table
    from icebear.concepts.models.loading import load_model
    from icebear.steering.concept.likeness import likeness

    found = [_read(name, store_path) for name in names]
    texts = lines(on)
    models = {name: load_model(name) for name in {one.model_name for one in found}}
    one, other = ((models[concept.model_name], concept) for concept in found)
    told = likeness(one, other, texts)
    if as_json:
        print_json({"concepts": [one.name for one in found], "texts": len(texts), **told.to_dict()})
    else:
        stdout().print(likeness_table(told, len(texts)))


def _read(name: str, store_path: str) -> Concept:
    from icebear.db.store import open_store
    from icebear.steering.concept.concept import Concept

    if name.endswith(".json"):
        return Concept.load(name)
    with open_store(store_path) as store:
        return Concept.from_dict(store.concepts.get(name))


def _names(store_path: str) -> list[str]:
    from icebear.db.store import open_store

    with open_store(store_path) as store:
        return store.concepts.names()


VERBS = (concept,)
