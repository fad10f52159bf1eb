"""`icebear search`: find neurons by words, or by an image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import icebear
from icebear.app.cli.options import ModelOptions, argument, exactly_one, is_given, record, verb
from icebear.app.cli.output import show
from icebear.app.cli.progress import waiting
from icebear.app.cli.stores import store_beside, store_or_shipped
from icebear.points import Naming
from icebear.records import Hit


@record
class Options:
    text: str | None = argument(required=False)
    image: str | None
    top: int
    store: str
    json: bool
    names: Naming
    model: ModelOptions


@verb(Options)
def search(options: Options) -> None:
    """Find neurons related to TEXT: by the sentences that activate a neuron, and by the tokens that it promotes.

    With --image, find neurons of an index of images whose strongest images are like this one, by the features of the
    model.

    Example:
      icebear search "Arctic ice" --store wiki.db --top 5
      icebear search --image bear.png --store photos.db --model my-vit
    """
    exactly_one({"TEXT": options.text, "--image": options.image})
    if options.image:
        return _by_image(options.image, options)
    from icebear.app.cli.tables.cards import hits_report

    with icebear.open_store(_index(options)) as store:
        result, made_with = _Result.of(store, options), store.made_with()
        with store_beside(options.store, store.facts.get("model")) as other:
            beside = [_Result.of(other, options)] if other else []
    document = {**made_with, **result.to_dict(), **({"beside": [row.to_dict() for row in beside]} if beside else {})}
    show(
        options.json,
        document,
        *(line for row in (result, *beside) for line in hits_report(**vars(row))),
        names=options.names,
    )


def _index(options: Options) -> str:
    """Return the path of the index to search; without --model, that of the folder's model."""
    return store_or_shipped(options.store, options.model.load, options.model.model if is_given("model") else None)


def _by_image(image: str, options: Options) -> None:
    from icebear.actmax.searching import search_image
    from icebear.app.cli.tables.cards import like_image_report

    with icebear.open_store(options.store) as store:
        result = search_image(options.model.load(), store, image, options.top)
        labels = {hit: store.labels.shown(hit.neuron, hit.polarity) for hit in result.hits}
        document = {**store.made_with(), "searched": f"{options.store}. It holds {store.documents_phrase}"}
    document["hits"] = [{**vars(hit), "neuron": str(hit.neuron), "label": labels[hit]} for hit in result.hits]
    document["images"] = [{"file": name, "cosine": cosine} for name, cosine in result.images]
    show(options.json, document, *like_image_report(result, labels, document["searched"]), names=options.names)


@dataclass(frozen=True)
class _Result:
    """What a search of an index has."""

    hits: list[Hit]
    labels: dict[Hit, str | None]
    absent: list[str]
    headings: dict[str, str]
    index: str

    @classmethod
    def of(cls, store: icebear.Store, options: Options) -> _Result:
        from icebear.actmax import searching
        from icebear.actmax.shipped.index_choice import store_name
        from icebear.db.search import absent_words

        assert options.text is not None
        with waiting("Searching"):  # which loads the sentence encoder
            hits = searching.search(store, options.text, options.top)
        labels = {hit: store.labels.shown(hit.neuron, hit.polarity) for hit in hits}
        about = f"{store_name(store)}. It holds {store.documents_phrase}"
        return cls(hits, labels, absent_words(store, options.text), searching.headings(store), about)

    def to_dict(self) -> dict[str, Any]:
        rows = [{**vars(hit), "neuron": str(hit.neuron), "label": self.labels[hit]} for hit in self.hits]
        return {"searched": self.index, "hits": rows, "absent": self.absent}
