"""What the examples of a neuron are about: their vectors by a sentence encoder."""

from __future__ import annotations

import numpy as np

from icebear.actmax.index.neuron_vectors import example_vectors, save_moments, set_example_null
from icebear.db.search import measure_chance
from icebear.db.store import Store
from icebear.models.loading.encoder import Encoder
from icebear.steps import OnProgress, unwatched
from icebear.values import typed

SAVED_AT_ONCE = 256
"""A kill loses at most the vectors of this many sentences."""


@typed
def embed_examples(store: Store, encoder: Encoder, on_progress: OnProgress = unwatched) -> None:
    """Compare neurons, and search texts with neurons, by what their examples are about.

    An interrupted call is resumed. The result does not depend on interruptions, bit for bit.

    Parameters
    ----------
    store : Store
        A finished index.
    encoder : Encoder
        See `load_encoder`.
    on_progress : callable
        Called with (done, total) sentences.

    Raises
    ------
    StoreError
        If the scan is not finished, or the index is of images.
    """
    store.check_finished()
    store.check_texts("A sentence encoder reads texts")
    with store.exclusively():
        missing = store.sentences.without_embedding(encoder.fingerprint)
        known = store.facts.find("encoder") or {}
        if not missing and known.get("fingerprint") == encoder.fingerprint and store.vectors.has_null("examples"):
            return
        for start in range(0, len(missing), SAVED_AT_ONCE):
            ids = missing[start : start + SAVED_AT_ONCE]
            texts = store.sentences.of(ids)
            vectors = (encoder.vector(texts[identity].text).astype(np.float16).tobytes() for identity in ids)
            store.insert("embeddings", list(zip(ids, [encoder.fingerprint] * len(ids), vectors, strict=True)))
            on_progress(start + len(ids), len(missing))
        store.vectors.forget_null("examples")
        store.facts.set({"encoder": {"name": encoder.name, "fingerprint": encoder.fingerprint}})
        save_moments(store)
        norms = store.vectors.save("examples", example_vectors(store))
        measure_chance(store)
        set_example_null(store, norms)
