"""The map beside an index: drawn once, and read until the index changes."""

from __future__ import annotations

import json
import zlib
from contextlib import suppress
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from icebear.actmax.atlas.atlas import Atlas, atlas
from icebear.actmax.atlas.atlas_page import packed
from icebear.actmax.atlas.clusters import Cluster
from icebear.actmax.atlas.layer_meanings import LayerMeanings
from icebear.convert import CONVERTER
from icebear.db.store import Store
from icebear.db.vectors import stored_digest
from icebear.errors import StoreError
from icebear.paths import written
from icebear.steps import OnProgress, unwatched

FORMAT = 3
"""Counts up when `atlas` draws another map of the same index, or the file has other contents."""
ARRAYS = ("sides", "points", "cluster", "clarity")


def mapped(store: Store, on_progress: OnProgress = unwatched) -> Atlas:
    """Return the map of an index, which is drawn once (see `atlas`), and then read from the file beside the index."""
    result = saved_map(store)
    if result is None:
        result = atlas(store, on_progress=on_progress)
        with suppress(StoreError):  # where nothing can be written, it is drawn each time
            save_map(store, result)
    return result


def map_path(store: Store) -> Path:
    return store.path.with_name(f"{store.path.name}.atlas.npz")


def save_map(store: Store, result: Atlas) -> None:
    """Write the map of an index, and what atlas.js draws, beside the index. Raises `StoreError`."""
    about = CONVERTER.unstructure({name: getattr(result, name) for name in ("clusters", "layers", "made_with")})
    texts = {"about": json.dumps(about), "drawing": json.dumps(packed(store, result)), "identity": _identity(store)}
    arrays = {name: getattr(result, name) for name in ARRAYS}
    arrays |= {name: np.frombuffer(text.encode(), np.uint8) for name, text in texts.items()}
    with written(map_path(store), StoreError) as part, part.open("wb") as file:
        np.savez_compressed(file, **arrays)


def saved_map(store: Store) -> Atlas | None:
    """Return the saved map; None if there is none of the index as it is now."""
    arrays = _read(store, *ARRAYS, "about")
    if arrays is None:
        return None
    about = json.loads(arrays.pop("about").tobytes())
    clusters = CONVERTER.structure(about["clusters"], tuple[Cluster, ...])
    layers = CONVERTER.structure(about["layers"], tuple[LayerMeanings, ...])
    return Atlas(**arrays, clusters=clusters, layers=layers, made_with=about["made_with"])


def saved_drawing(store: Store) -> bytes | None:
    """Return what atlas.js draws of the saved map, as JSON, with the labels of now; None without a saved map."""
    arrays = _read(store, "drawing")
    if arrays is None:
        return None
    labels = json.dumps({"labels": store.labels.by_side()})
    return labels[:-1].encode() + b", " + arrays["drawing"].tobytes()[1:]


def _identity(store: Store) -> str:
    return f"{FORMAT} {stored_digest(store.vectors.path('examples'))}"


def _read(store: Store, *names: str) -> dict[str, np.ndarray] | None:
    """Return arrays of the saved map; None if there is no file, or it is damaged or of another state of the index."""
    with suppress(OSError, ValueError, LookupError, EOFError, BadZipFile, zlib.error), np.load(map_path(store)) as file:
        if file["identity"].tobytes().decode() == _identity(store):
            return {name: file[name] for name in names}
    return None
