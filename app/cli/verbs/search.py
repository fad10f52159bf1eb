"""`icebear search`: find neurons by words."""

from __future__ import annotations

import icebear
from icebear.app.cli.options import argument, record, verb
from icebear.app.cli.output import show
from icebear.app.cli.stores import store_or_shipped


@record
class Options:
    text: str = argument()
    top: int
    store: str
    json: bool


@verb(Options)
def search(options: Options) -> None:
    """Find neurons related to TEXT: by the sentences that activate a neuron, and by the tokens that it promotes.

    Example:
      icebear search "Arctic ice" --store wiki.db --top 5
    """
    from icebear.actmax import searching
    from icebear.actmax.shipped.index_choice import store_name
    from icebear.app.cli.tables.cards import hits_report
    from icebear.db.search import absent

    with icebear.open_store(store_or_shipped(options.store, lambda: icebear.load_model())) as store:
        hits = searching.search(store, options.text, options.top)
        labels, made_with = {hit: store.labels.name(hit.neuron, hit.polarity) for hit in hits}, store.made_with()
        lacking, by_kind = absent(store, options.text), searching.headings(store)
        index = f"{store_name(store)}. It holds {store.sample}"
    rows = [{**vars(hit), "neuron": str(hit.neuron), "label": labels[hit]} for hit in hits]
    report = hits_report(hits, labels, lacking, by_kind, index)
    show(options.json, {**made_with, "hits": rows, "absent": lacking}, *report)
