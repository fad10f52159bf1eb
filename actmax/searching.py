"""Search for neurons by a text: by its words, and by what it is about if the index has a sentence encoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icebear.actmax.index.encoder import encoder_of
from icebear.db.search import BY, by_words
from icebear.db.store import Store
from icebear.errors import DownloadError
from icebear.records import Hit

if TYPE_CHECKING:
    from icebear.models.loading.encoder import Encoder

BY_WORDS = "By words: neurons with the words in their sentences; not by meaning, because {}"
"""The heading of results by sentences where a text is not encoded."""


def search(store: Store, text: str, k: int = 20, download: bool = True) -> list[Hit]:
    """Return what `Store.search` does, k results of each kind, also by the meaning of the text.

    Parameters
    ----------
    store : Store
    text : str
    k : int
        The number of results of each kind (`Hit.by`).
    download : bool
        Whether the encoder of the index is downloaded if it is missing. Without it, the search is by words alone, and
        `headings` says so.

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
    encoder, _ = _encoder_of(store, download)
    return by_words(store, text, k, None if encoder is None else encoder.vector(text))


def headings(store: Store, download: bool = True) -> dict[str, str]:
    """Return the headings of the kinds of results (`Hit.by`), which say what `search` can do."""
    _, lacking = _encoder_of(store, download)
    return {**BY, "sentences": BY_WORDS.format(lacking)} if lacking else BY


def _encoder_of(store: Store, download: bool) -> tuple[Encoder | None, str]:
    """Return the encoder of an index, or None and the reason."""
    try:
        encoder = encoder_of(store, download)
    except DownloadError as error:
        return None, str(error)
    return encoder, "" if encoder else "this index has no vectors of a sentence encoder"
