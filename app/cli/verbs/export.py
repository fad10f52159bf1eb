"""`icebear export`: what icebear knows, for other software."""

from __future__ import annotations

import click

import icebear
from icebear.app.cli.options import ModelOptions, Verbs, option, record, verb
from icebear.app.cli.output import show
from icebear.app.cli.progress import bar
from icebear.app.cli.stores import store_or_shipped


@click.group(cls=Verbs)
def export() -> None:
    """Export an index to other software.

    \b
    Example:
      icebear export neuronpedia --store wiki.db --out dashboards
    """


@record
class Neuronpedia:
    out: str = option("New folder for the files.", type="folder", required=True)
    store: str
    json: bool
    model: ModelOptions


@verb(Neuronpedia, export)
def neuronpedia(options: Neuronpedia) -> None:
    """Write dashboards of all neurons of an index, for Neuronpedia's upload.

    A source is a layer at a polarity, such as 29-ffn-plus. Each file has at most 128 neurons of a source: density,
    logits, labels with their scores, and the maximally activating sentences. Of a sentence the index has the largest
    activation only, so that the values of its other tokens are 0. The model is loaded only to prepare the index that
    comes with icebear.

    Example:
      icebear export neuronpedia --store wiki.db --out dashboards
    """
    from icebear.actmax.neuronpedia import export_dashboards

    path = store_or_shipped(options.store, options.model.load, options.model.model)
    with icebear.open_store(path) as store, bar("neurons") as move:
        counts, made_with = export_dashboards(store, options.out, move), store.made_with()
    numbers = ", ".join(f"{count:,} {what}" for what, count in counts.items())
    show(options.json, {**made_with, "folder": options.out, "counts": counts}, f"Wrote {options.out}: {numbers}")
