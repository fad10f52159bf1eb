"""`icebear atlas`: a map of all neurons by what their sentences are about."""

from __future__ import annotations

from dataclasses import asdict, replace

import click

import icebear
from icebear.app.cli.options import ModelOptions, option, record, verb
from icebear.app.cli.output import show, write_page
from icebear.app.cli.progress import bar, waiting


@record
class Options:
    prompts: str | None = option(
        "File of prompts: show which clusters do the work on them. A .txt file has a prompt on each line; any other "
        "file has JSON objects with a prompt and, optionally, target and contrast. With a field right (true or false) "
        "in each object, show which clusters differ between the wrong and the right ones.",
        type="file",
    )
    against: str | None = option("Second file of prompts, which those of --prompts are compared with.", type="file")
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
    With --prompts, the command shows which clusters do the work on your prompts instead, and the prompts that it
    compares with show why the model fails on others.

    Example:
      icebear atlas --store wiki.db --html atlas.html
      icebear atlas --prompts wrong.txt --against right.txt
    """
    from icebear.actmax.atlas.atlas import atlas as mapped
    from icebear.actmax.atlas.atlas_page import atlas_page
    from icebear.actmax.atlas.audit import audit, read_groups
    from icebear.app.cli.tables.maps import atlas_report, audit_report

    if options.against and not options.prompts:
        raise click.UsageError("--against is compared with the prompts of --prompts; give both.")
    groups = read_groups(options.prompts, options.against) if options.prompts else None
    with icebear.open_store(options.store) as store:
        model = options.model.load() if groups else None
        with waiting("Drawing the map"):
            result, sample = mapped(store), store.sample
            write_page(options.html, lambda: atlas_page(store, result))
        if groups and model:
            with bar("prompts") as move:
                audited = audit(model, store, result, *groups, on_progress=move)
            return show(
                options.json, {**audited.made_with, **asdict(replace(audited, made_with={}))}, *audit_report(audited)
            )
    document = {
        **result.made_with,
        "sides": len(result.sides),
        "clusters": [asdict(cluster) for cluster in result.clusters],
        "layers": [asdict(layer) for layer in result.layers],
    }
    show(options.json, document, *atlas_report(result, sample))
