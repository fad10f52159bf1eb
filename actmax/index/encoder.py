"""The sentence encoder that an index was made with."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from icebear.db.store import Store
from icebear.errors import StoreError

if TYPE_CHECKING:
    from icebear.models.loading.encoder import Encoder


def encoder_of(store: Store, download: bool = True) -> Encoder | None:
    """Return the encoder of an index, None if the index has no vectors of sentences.

    Raises `StoreError` if the encoder is another one by now, and `DownloadError` if it is not to be had.
    """
    about = store.facts.find("encoder")
    if about is None:
        return None
    encoder = _load(about["name"], download)
    if encoder.fingerprint != about["fingerprint"]:
        raise StoreError(
            f"The encoder {about['name']} is not the one that {store.path} was made with; run icebear index again."
        )
    return encoder


@lru_cache(maxsize=2)
def _load(name: str, download: bool) -> Encoder:
    from icebear.models.loading import encoder  # a search by words alone needs no torch

    return encoder.load_encoder(name, download)
