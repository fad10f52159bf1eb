"""`icebear atlas`: a map of all neurons by what their sentences are about."""

from __future__ import annotations

from dataclasses import asdict

import icebear
from icebear.app.cli.options import record, verb
from icebear.app.cli.output import show, write_page
from icebear.app.cli.progress import waiting


@record
class Options:
    html: str | None
    store: str
    json: bool


@verb(Options)
def atlas(options: Options) -> None:
    """Map all neurons of an index by what their sentences are about, with tested clusters.

    A point is a neuron at one polarity. Near points have similar sentences. A cluster has a name if its words pass a
    test on documents that they were not chosen from. For each layer, the command shows how similar the sentences of a
    neuron are to one another, how many neurons are near-identical to another one, and how many have no meaning in this
    corpus, next to the same numbers by chance. With --html, the page has the map: search it, zoom, and open a neuron.

    Example:
      icebear atlas --store wiki.db --html atlas.html
    """
    from icebear.actmax.atlas.atlas_page import atlas_page
    from icebear.actmax.atlas.saved_map import mapped
    from icebear.app.cli.tables.maps import atlas_report

    with icebear.open_store(options.store) as store, waiting("Drawing the map"):
        result, sample = mapped(store), store.sample
        write_page(options.html, lambda: atlas_page(store, result))
    document = {
        **result.made_with,
        "sides": len(result.sides),
        "clusters": [asdict(cluster) for cluster in result.clusters],
        "layers": [asdict(layer) for layer in result.layers],
    }
    show(options.json, document, *atlas_report(result, sample))
