"""Search for neurons by a text: by its words, and by what it is about if the index has a sentence encoder."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from icebear.db.search import by_words
from icebear.db.store import Store
from icebear.errors import StoreError
from icebear.records import Hit

if TYPE_CHECKING:
    from icebear.models.loading.encoder import Encoder


def search(store: Store, text: str, k: int = 20) -> list[Hit]:
    """Return what `Store.search` does, k results of each kind, also by the meaning of the text.

    Parameters
    ----------
    store : Store
    text : str
    k : int
        The number of results of each kind (`Hit.by`).

    Returns
    -------
    list of Hit

    Raises
    ------
    InputError
        If the text has no words.
    StoreError
        If the scan is not finished, or the encoder of the index has changed.
    """
    return by_words(store, text, k, _meaning(store, text))


def _meaning(store: Store, text: str) -> np.ndarray | None:
    """Return the vector of a text by the encoder of an index; None for an index without one."""
    about = store.facts.all().get("encoder")
    if about is None:
        return None
    encoder = _encoder(about["name"])
    if encoder.fingerprint != about["fingerprint"]:
        raise StoreError(
            f"The encoder {about['name']} is not the one that {store.path} was made with; run icebear index again."
        )
    return encoder.vector(text)


@lru_cache(maxsize=1)
def _encoder(name: str) -> Encoder:
    from icebear.models.loading.encoder import load_encoder  # a search by words alone needs no torch

    return load_encoder(name)
