"""`icebear concept`: find concepts from examples, show them, measure them in texts, steer with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click

import icebear
from icebear.app.cli.options import ModelOptions, Verbs, argument, exactly_one, option, read_lines, record, verb
from icebear.app.cli.output import claim, save, show, write_page
from icebear.app.cli.progress import bar
from icebear.errors import InputError, StoreError
from icebear.paths import local
from icebear.records import SITES
from icebear.values import one_of

Kind = Literal["neurons", "means", "logistic"]
DETECTOR_HELP = "neurons, or a vector of the residual stream: means (difference of means) or logistic."


@click.group(cls=Verbs)
def concept() -> None:
    """Find concepts (sets of neurons) from examples, measure them in texts, and steer with them.

    NAME is a concept in the store, or a .json file from icebear concept export.

    \b
    Example:
      icebear concept show examples/music.json
    """


@record
class Find:
    name: str = argument()
    with_: str = option(required=True)
    without: str = option(required=True)
    max_neurons: int = option(default=20)
    claim: str | None
    site: str = option("Sites of the neurons, separated by commas: ffn, attn, q, k, v, ...", "ffn,attn")
    save: str | None
    store: str = option(type="file", show_default=True)
    json: bool
    seed: int
    model: ModelOptions


@verb(Find, concept)
def find(options: Find) -> None:
    """Find a small set of neurons that separates texts with a concept from texts without it. Save the set as NAME.

    Half of the texts are used to rank the neurons and to fit the weights of several sets of neurons. A quarter
    (validation) is used to choose one of these sets, and the last quarter to test the chosen set.

    Example:
      icebear concept find music --with examples/music.txt --without examples/not-music.txt
    """
    from icebear.app.cli.tables.steering import concept_report

    if options.name.endswith(".json"):  # other commands would look for a file of this name
        raise InputError(
            f"A concept cannot be named {options.name!r} because .json means a file; leave out the ending."
        )
    texts = read_lines(options.with_), read_lines(options.without)
    sites = [one_of(site.strip(), "site", SITES) for site in options.site.split(",")]
    model = options.model.load()
    with icebear.open_store(options.store, create=True) as store:
        store.check(model.index_fingerprint, model.name)
        with bar("texts") as move:
            result = icebear.find_concept(
                model,
                *texts,
                name=options.name,
                max_neurons=options.max_neurons,
                sites=sites,
                seed=options.seed,
                on_progress=move,
            )
        store.concepts.set({result.name: result.to_dict()})
        labels = _labels(store, result)
    save(result, options.save)
    show(options.json, result.to_dict(), concept_report(result, labels))
    if options.claim:
        from icebear.claims.kinds.meanings import ConceptClaim

        claim(options.claim, model, lambda: ConceptClaim.of(result))


@record
class List:
    store: str = option(type="file", show_default=True)
    json: bool


@verb(List, concept)
def list_(options: List) -> None:
    """List the concepts in the store.

    Example:
      icebear concept list --store wiki.db
    """
    from icebear.app.cli.tables.steering import concepts_table

    records = []
    if local(options.store).exists():
        with icebear.open_store(options.store) as store:
            records = list(store.concepts.all().values())
    nothing = "No concepts yet; find one with icebear concept find NAME --with FILE --without FILE."
    show(options.json, {"concepts": records}, concepts_table(records) if records else nothing)


@record
class Show(List):
    name: str = argument()


@verb(Show, concept)
def show_(options: Show) -> None:
    """Show the neurons of a concept, how it was found, and similar concepts.

    Example:
      icebear concept show examples/music.json
    """
    from icebear.app.cli.tables.steering import concept_report
    from icebear.steering.concept.concept import similar_concepts

    this = _read(options.name, options.store)
    labels: dict[Any, str | None] = {}
    similar: list[tuple[str, float]] = []
    if not options.name.endswith(".json"):
        with icebear.open_store(options.store) as store:
            labels, names = _labels(store, this), list(store.concepts.all())
        similar = similar_concepts(this, [_read(name, options.store) for name in names if name != options.name])
    rows = [{"name": other, "overlap": share} for other, share in similar]
    show(options.json, {**this.to_dict(), "similar": rows}, concept_report(this, labels, similar))


@record
class Measure:
    name: str = argument()
    text: str | None = argument(required=False)
    texts: str | None = option("File of texts to measure instead of TEXT, one per line.", type="file")
    html: str | None
    store: str = option(type="file", show_default=True)
    json: bool
    model: ModelOptions


@verb(Measure, concept)
def measure(options: Measure) -> None:
    """Measure a concept in TEXT, token by token, in standard deviations of the texts without the concept.

    Example:
      icebear concept measure examples/music.json "The band played on."
    """
    from icebear.app.cli.tables.steering import measured_report

    exactly_one({"a TEXT": options.text, "--texts": options.texts})
    if options.texts and options.html:
        raise click.UsageError("--html is for one TEXT; leave out --texts.")
    this = _read(options.name, options.store)
    texts = read_lines(options.texts) if options.texts else [str(options.text)]
    model = options.model.load()
    rows = this.measures(model, texts)
    write_page(options.html, rows[0].to_html)
    document = {"model": model.made_with, "measured": [row.to_dict() for row in rows]}
    show(options.json, document, measured_report(rows))


@record
class Steer:
    name: str = argument()
    prompt: str = argument()
    strength: float | None = option("At 1, add each neuron's maximum activation times its weight, or the vector once.")
    detector: Kind = option(DETECTOR_HELP, "neurons")
    kl: float | None = option("Instead of --strength: the off-target KL to reach, in nats.", show_default="0.25")
    suppress: bool = option("Weaken the concept instead of strengthening it.")
    max_new_tokens: int
    temperature: float
    save: str | None
    json: bool
    store: str = option(type="file", show_default=True)
    where: str = option("Tokens to edit: all, prompt, last, answer, ... (docs/steer.md)", "all", advanced=True)
    seed: int
    model: ModelOptions


@verb(Steer, concept)
def steer(options: Steer) -> None:
    """Generate after PROMPT without and with a concept steered, at a given off-target KL (side effects). The control
    makes the same edits to random other neurons (or adds random vectors), twenty times, and measures those texts by the
    concept's neurons.

    Example:
      icebear concept steer examples/music.json "Yesterday I" --kl 0.25
    """
    if options.strength is not None and options.kl is not None:
        raise click.UsageError("Give --strength or --kl, not both.")
    this = _read(options.name, options.store)
    model = options.model.load()
    from icebear.app.cli.tables.steering import comparison_table, outcome_lines, steered_line
    from icebear.steering.outcome import steer_concept

    kl = 0.25 if options.strength is None and options.kl is None else options.kl
    recipe = this.recipe(
        model, options.strength, kl, options.where, suppress=options.suppress, detector=options.detector
    )
    sampling = options.max_new_tokens, options.temperature, options.seed
    with bar("texts") as move:
        result, outcome = steer_concept(model, this, options.prompt, recipe, *sampling, on_progress=move)
    recipe = recipe.noting(**outcome.provenance())
    save(recipe, options.save, overwrite=True)
    measured = {"plain": outcome.control.before, "steered": outcome.control.after}
    document = {**result.to_dict(), "recipe": recipe.to_dict(), "measured": measured}
    show(options.json, document, comparison_table(result), steered_line(this, recipe), *outcome_lines(outcome))


@record
class MonitorOptions:
    name: str = argument()
    negatives: str = option(
        "File of texts without the concept that were not used to find it, one per line: at least 122 for --fpr 0.01, "
        "23 for 0.05.",
        type="file",
        required=True,
    )
    fpr: float = option("False positive rate: the share of texts without the concept that may be flagged.", 0.01)
    unit: Literal["sentence", "token", "message"] = option("What is flagged.", "sentence")
    detector: Kind = option(DETECTOR_HELP, "neurons")
    shift: tuple[tuple[str, str], ...] = option(
        "Two files of texts with and without the concept, of another domain or language, to measure the monitor on.",
        type=click.Path(dir_okay=False),
        nargs=2,
        multiple=True,
    )
    claim: str | None
    save: str | None
    store: str = option(type="file", show_default=True)
    json: bool
    model: ModelOptions


@verb(MonitorOptions, concept)
def monitor(options: MonitorOptions) -> None:
    """Make a monitor of a concept: texts without the concept set its threshold. Then measure how often texts with and
    without the concept are flagged.

    The table compares the monitor with a bag of words, random neurons and shuffled labels, on held-out texts, on texts
    five times longer, and without the words that speak most for the concept. icebear chat --monitor reads the saved
    file.

    Example:
      icebear concept monitor examples/music.json --negatives examples/everyday.txt --fpr 0.05
    """
    from icebear.app.cli.tables.steering import monitor_report

    this, negatives = _read(options.name, options.store), read_lines(options.negatives)
    shifts = {Path(with_it).stem: (read_lines(with_it), read_lines(without)) for with_it, without in options.shift}
    model = options.model.load()
    with bar("texts") as move:
        result = icebear.monitor(
            model, this, negatives, options.fpr, options.unit, options.detector, shifts, on_progress=move
        )
    save(result, options.save, overwrite=True)
    show(options.json, result.to_dict(), monitor_report(result))
    if options.claim:
        from icebear.claims.kinds.meanings import MonitorClaim

        claim(options.claim, model, lambda: MonitorClaim.of(result, this))


@record
class Export(Show):
    file: str = argument(type="output")


@verb(Export, concept)
def export(options: Export) -> None:
    """Write a concept from the store to FILE as JSON.

    Example:
      icebear concept export music music.json --store wiki.db
    """
    this = _read(options.name, options.store)
    save(this, options.file)
    show(options.json, this.to_dict())


def _read(name: str, store_path: str) -> icebear.Concept:
    if name.endswith(".json"):
        return icebear.Concept.load(name)
    if not local(store_path).exists():
        raise StoreError(
            f"There is no store {store_path}, so no concept {name}; find one with: icebear concept find {name} "
            f"--with FILE --without FILE --store {store_path}"
        )
    with icebear.open_store(store_path) as store:
        return icebear.Concept.from_dict(store.concepts.get(name))


def _labels(store: icebear.Store, this: icebear.Concept) -> dict[Any, str | None]:
    return {(part.neuron, part.polarity): store.labels.shown(part.neuron, part.polarity) for part in this.parts}
