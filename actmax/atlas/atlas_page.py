"""The page of an atlas: one scatter, drawn by atlas.js from packed data. No request leaves it."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
from markupsafe import Markup

from icebear.actmax.atlas.atlas import Atlas
from icebear.actmax.atlas.compare import IndexComparison
from icebear.actmax.atlas.neighbor_map import PAGE_STEPS, on_page
from icebear.actmax.atlas.side_data import side_columns
from icebear.db.store import Store
from icebear.records import Sentence
from icebear.render import environment, made_with_line, render


def atlas_page(store: Store, atlas: Atlas, comparison: IndexComparison | None = None) -> str:
    """Return a self-contained HTML page with the map of an index, in the color of what is exchanged in a comparison."""
    data = {**packed(store, atlas), "labels": store.labels.by_side()}
    if comparison:
        exchanged = np.zeros(len(atlas.sides))
        _, on_map, compared = np.intersect1d(atlas.sides, comparison.sides, return_indices=True)
        exchanged[on_map] = comparison.exchanged[compared]
        data["arrays"]["exchanged"] = ["u2", _base64(exchanged * PAGE_STEPS, "u2")]
    return render(
        "icebear.actmax.atlas/atlas.html",
        title=f"Atlas of {atlas.made_with['model']['name']}",
        app=False,
        style=asset("atlas.css"),
        script=asset("atlas.js"),
        data=Markup(safe_json(data)),
        sample=store.documents_phrase,
        made_with=made_with_line(atlas.made_with),
    )


def asset(name: str, **values: bool) -> Markup:
    """Return a file that the page and the app's view share."""
    return Markup(environment().get_template(f"icebear.actmax.atlas/{name}").render(**values))


def safe_json(data: object) -> str:
    """Return JSON that may stand in a script element: no text of it ends the element."""
    return json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")


def packed(store: Store, atlas: Atlas) -> dict[str, Any]:
    """Return what atlas.js draws: columns of all sides as base64, little-endian; each sentence once."""
    rows = store.example_tables.columns()
    rows = rows[rows["rank"] == 0]
    strongest = rows[np.searchsorted(rows.key, atlas.sides)]
    ids, sentence = np.unique(strongest.sentence, return_inverse=True)
    sentences = store.sentences.of(ids.tolist())
    spans = np.array(
        [_span(sentences[identity], token) for identity, token in zip(strongest.sentence, strongest.token, strict=True)]
    )
    layer, site, index = side_columns(store, atlas.sides)
    sites, (x, y) = np.unique(site), on_page(atlas.points).T
    arrays = {
        "x": (x, "u2"),
        "y": (y, "u2"),
        "layer": (layer, "u2"),
        "site": (np.searchsorted(sites, site), "u2"),
        "index": (index, "u4"),
        "minus": (atlas.sides % 2, "u2"),
        "cluster": (atlas.cluster, "i2"),
        "clarity": (atlas.clarity.clip(0, 1) * PAGE_STEPS, "u2"),
        "sentence": (sentence, "u4"),
        "start": (spans[:, 0], "u2"),
        "end": (spans[:, 1], "u2"),
    }
    return {
        "arrays": {name: [kind, _base64(values, kind)] for name, (values, kind) in arrays.items()},
        "sites": sites.tolist(),
        "clusters": [cluster.name for cluster in atlas.clusters],
        "sentences": ["".join(sentences[identity].tokens) for identity in ids.tolist()],
    }


def _base64(values: np.ndarray, kind: str) -> str:
    return base64.b64encode(np.asarray(values).round().astype(f"<{kind}").tobytes()).decode()


def _span(sentence: Sentence, token: int) -> tuple[int, int]:
    """Return where a token, without the space before it, is in the joined tokens of a sentence, in characters."""
    text, start = sentence.tokens[token], len("".join(sentence.tokens[:token]))
    return start + len(text) - len(text.lstrip()), start + len(text)
