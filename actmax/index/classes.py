"""What kind of neuron it is, read off its examples and statistics (after Voita et al. 2023, arXiv 2309.04827)."""

from __future__ import annotations

import numpy as np

from icebear.db.store import Store

SHARE = 0.9
"""Of a polarity's examples that must agree for a class."""
DEAD = 1e-3
"""A dead neuron's activation never exceeds this."""


def class_name(kind: str) -> str:
    """For people."""
    return "none detected" if kind == "other" else kind


def classify(keys: np.ndarray, tokens: np.ndarray, positions: np.ndarray, largest: np.ndarray) -> list[str]:
    """``dead``, ``token detector``, ``positional`` or ``other``, for each neuron at ``+`` and ``-``.

    keys, tokens, positions (E,): of each example 2 * neuron + (polarity is -), its extreme token, and where that is.
    largest (N,): the largest activation of each neuron, in magnitude.

    Dead when no activation exceeds `DEAD`; a token detector when `SHARE` of at least two examples have the same token
    at the extreme; positional when they have the same position.
    """
    count = 2 * len(largest)
    enough = np.bincount(keys, minlength=count) >= 2
    same_token = enough & (_largest_share(keys, tokens, count) >= SHARE)
    same_position = enough & (_largest_share(keys, positions, count) >= SHARE)
    classes = np.where(same_token, "token detector", np.where(same_position, "positional", "other"))
    return np.where(np.repeat(largest < DEAD, 2), "dead", classes).tolist()


def _largest_share(keys: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    """(count,) the share of each key's most frequent value."""
    import pandas

    frequencies = pandas.Series(values).groupby(keys).value_counts(normalize=True)
    return frequencies.groupby(level=0).max().reindex(range(count), fill_value=0).to_numpy()


def ensure_classes(store: Store) -> None:
    """Classify all neurons of a finished index, once. Tokens count as the same whatever their case and spaces."""
    if store.count("classes"):
        return
    keys, sentences, positions = store.example_tables.keys()
    codes: dict[str, int] = {}
    ids: list[int] = []
    starts: list[int] = []
    flat: list[int] = []
    for identity, tokens in store.sentences.tokens():
        ids.append(identity)
        starts.append(len(flat))
        flat += [codes.setdefault(token.strip().lower(), len(codes)) for token in tokens]
    places = np.array(starts)[np.searchsorted(np.array(ids), sentences)]
    store.neurons.set_classes(classify(keys, np.array(flat)[places + positions], positions, store.neurons.largest()))
