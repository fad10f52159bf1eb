"""`icebear search`: neurons by words."""

from __future__ import annotations

from icebear.app.cli.options import argument, record, verb
from icebear.app.cli.output import print_json, stdout


@record
class Options:
    text: str = argument()
    top: int
    store: str
    json: bool


@verb(Options)
def search(options: Options) -> None:
    """Which neurons know about TEXT: by what they write and by the sentences that drive them.

    \b
    Example:
      icebear search "Arctic ice" --store wiki.db --top 5
    """
    from icebear.app.cli.terminal import hits
    from icebear.db.store import open_store

    with open_store(options.store) as store:
        rows = store.search(options.text, options.top)
        labels, made_with = {hit: store.labels.name(hit.neuron, hit.polarity) for hit in rows}, store.made_with()
    if options.json:
        shown = [{**vars(hit), "neuron": str(hit.neuron), "label": labels[hit]} for hit in rows]
        print_json({**made_with, "hits": shown})
    else:
        stdout().print(hits(rows, labels))
