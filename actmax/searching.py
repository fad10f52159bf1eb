"""Search for neurons by a text: by its words, and by what it is about if the index has a sentence encoder. Or by an
image, in an index of images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from icebear.actmax.index.encoder import encoder_of
from icebear.db.search import BY, by_image, by_words, nearest_images
from icebear.db.store import Store
from icebear.errors import DownloadError, StoreError
from icebear.records import Hit

if TYPE_CHECKING:
    from icebear.models.loading.encoder import Encoder
    from icebear.models.model import Model

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
        If the scan is not finished, the encoder of the index has changed, or the index is of images.
    """
    store.check_texts("A search by words reads sentences (search by an image: --image)")
    encoder, _ = _encoder_of(store, download)
    return by_words(store, text, k, None if encoder is None else encoder.vector(text))


class LikeImage(NamedTuple):
    """What an index of images has that is like an image."""

    hits: list[Hit]
    images: list[tuple[str, float]]
    """The names of the most similar images, with the cosines of their vectors and the image's."""


def search_image(model: Model, store: Store, image: Any, k: int = 20) -> LikeImage:
    """Return the neurons, heads and polarities whose strongest images are like an image, by the model's own features:
    the final residual stream, averaged over the patches.

    Parameters
    ----------
    model : Model
        The model of the index.
    store : Store
        An index of images.
    image
        A path, a PIL image, or pixels (C, H, W) as the model reads them.
    k : int
        The number of neurons.

    Raises
    ------
    InputError
        If the image cannot be read.
    StoreError
        If the scan is not finished, or the index is of texts or of another model.
    """
    from icebear.actmax.index.scan import image_vector

    store.check(model.index_fingerprint, model.name)
    if not store.is_of_images:
        raise StoreError(f"{store.path} is an index of texts; search it by words.")
    vector = image_vector(model, image)
    return LikeImage(by_image(store, vector, k), nearest_images(store, vector))


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
