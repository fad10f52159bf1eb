"""`icebear atlas`: a map of all neurons by what their sentences are about."""

from __future__ import annotations

from dataclasses import asdict, replace

import click

import icebear
from icebear.app.cli.options import ModelOptions, option, record, verb
from icebear.app.cli.output import show, write_page
from icebear.app.cli.progress import waiting
from icebear.app.cli.stores import store_or_shipped


@record
class Options:
    prompts: str | None = option(
        "Show which clusters do the work on the prompts of this file: a .txt file of lines, or JSON objects with a "
        "prompt and, optionally, target and contrast. With a field right (true or false), compare wrong with right.",
        type="file",
    )
    against: str | None = option("File of prompts that those of --prompts are compared with.", type="file")
    compare: str | None = option(
        "An index of a second model: list the neurons with other sentences there.", type="file"
    )
    html: str | None
    store: str
    json: bool
    model: ModelOptions


@verb(Options)
def atlas(options: Options) -> None:
    """Map all neurons of an index by what their sentences are about, with tested clusters.

    A point is a neuron at one polarity. Near points have similar sentences. A cluster has a name if its words pass a
    test on documents that they were not chosen from. For each layer, the command shows how similar the sentences of a
    neuron are to one another, how many neurons are near-identical to another one, and how many have no meaning in this
    corpus, next to the same numbers by chance. With --html, the page has the map: search it, zoom, and open a neuron.
    With --prompts, the command shows instead which clusters do the work on your prompts, or differ between two groups.

    With --compare, the command lists the neurons that have other sentences in the model of a second index, for instance
    after fine-tuning, and says how far the meaning of their sentences moved. The page shows them, too.

    Example:
      icebear atlas --store wiki.db --html atlas.html
      icebear atlas --store wiki.db --prompts examples/music.txt --against examples/not-music.txt
    """
    if options.against and not options.prompts:
        raise click.UsageError("--against needs --prompts; add it, or leave --against out.")
    if options.compare and options.prompts:
        raise click.UsageError("--compare cannot be combined with --prompts; leave out one of them.")
    model_options = options.model
    path = store_or_shipped(options.store, model_options.load, model_options.model)
    options = replace(options, store=path)
    if options.compare:
        _compare(options, options.compare)
    elif options.prompts:
        _audit(options, options.prompts)
    else:
        _map(options)


def _map(options: Options) -> None:
    from icebear.actmax.atlas.atlas_page import atlas_page
    from icebear.actmax.atlas.saved_map import mapped
    from icebear.app.cli.tables.maps import atlas_report
    from icebear.convert import CONVERTER

    with icebear.open_store(options.store) as store, waiting("Drawing the map"):
        result, sample = mapped(store), store.documents_phrase
        write_page(options.html, lambda: atlas_page(store, result))
    document = {
        **result.made_with,
        "sides": len(result.sides),
        "clusters": CONVERTER.unstructure(result.clusters),
        "layers": [asdict(layer) for layer in result.layers],
    }
    show(options.json, document, *atlas_report(result, sample))


def _audit(options: Options, prompts: str) -> None:
    from icebear.actmax.atlas.atlas_page import atlas_page
    from icebear.actmax.atlas.audit import audit, read_groups
    from icebear.actmax.atlas.saved_map import mapped
    from icebear.app.cli.tables.maps import audit_report
    from icebear.convert import CONVERTER

    groups = read_groups(prompts, options.against)
    with icebear.open_store(options.store) as store:
        store.check_finished()  # before the model is loaded
    model = options.model.load()
    with icebear.open_store(options.store) as store, waiting("Drawing the map"):
        store.check(model.index_fingerprint, model.name)
        result = mapped(store)
        write_page(options.html, lambda: atlas_page(store, result))
        audited = audit(model, store, result, *groups)
    show(options.json, {**result.made_with, **CONVERTER.unstructure(audited)}, *audit_report(audited))


def _compare(options: Options, other: str) -> None:
    from icebear.actmax.atlas.atlas_page import atlas_page
    from icebear.actmax.atlas.compare import compare_indexes, exchanged_sides
    from icebear.actmax.atlas.saved_map import mapped
    from icebear.app.cli.tables.maps import comparison_report

    with icebear.open_store(options.store) as store, icebear.open_store(other) as second:
        result = compare_indexes(store, second)
        sides = exchanged_sides(result, store, second)
        write_page(options.html, lambda: atlas_page(store, mapped(store), result))
    before, after = result.made_with
    document = {
        **before,
        "compared": after,
        "sides_in_both": len(result.sides),
        "moved": int((result.moved > result.least).sum()),
        "moved_by_chance": int((result.by_chance > result.least).sum()),
        "moved_least": result.least,
        "sides": [asdict(side) for side in sides],
    }
    show(options.json, document, *comparison_report(result, sides))
