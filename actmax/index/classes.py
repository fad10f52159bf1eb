"""The class of a neuron, from its examples and statistics (after Voita et al. 2023, arXiv 2309.04827)."""

from __future__ import annotations

import numpy as np

from icebear.db.store import Store

OTHER = "other"
"""The class of a neuron that is in no other."""
SHARE = 0.9
"""The share of the examples of a polarity that must agree for a class."""
DEAD = 1e-3
"""The activation of a dead neuron never exceeds this."""


def class_name(kind: str) -> str:
    """Return the name of a class for display."""
    return "none detected" if kind == OTHER else kind


def classify(keys: np.ndarray, tokens: np.ndarray, positions: np.ndarray, largest: np.ndarray) -> list[str]:
    """Return ``dead``, ``token detector``, ``positional`` or ``other`` for each neuron at ``+`` and ``-``.

    keys, tokens, positions: 2 * neuron + (polarity is -) of each example (E,), its top token, and the token's position.
    largest: the largest magnitude of the activation of each neuron (N,).

    A neuron is dead if no activation exceeds `DEAD`, a token detector if `SHARE` of at least two examples have the same
    top token, and positional if they have it at the same position.
    """
    count = 2 * len(largest)
    enough = np.bincount(keys, minlength=count) >= 2
    same_token = enough & (_largest_share(keys, tokens, count) >= SHARE)
    same_position = enough & (_largest_share(keys, positions, count) >= SHARE)
    classes = np.where(same_token, "token detector", np.where(same_position, "positional", OTHER))
    return np.where(np.repeat(largest < DEAD, 2), "dead", classes).tolist()


def _largest_share(keys: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    """Return the share of the most frequent value of each key (count,)."""
    size = values.max(initial=0) + 1
    pairs = np.sort(keys * size + values)
    starts = np.flatnonzero(np.diff(pairs, prepend=-1))
    most = np.zeros(count)
    np.maximum.at(most, pairs[starts] // size, np.diff(starts, append=len(pairs)))
    return most / np.maximum(np.bincount(keys, minlength=count), 1)


def ensure_classes(store: Store) -> None:
    """Classify all neurons of a finished index, once. Case and spaces of tokens are ignored."""
    if store.count("classes"):
        return
    examples = store.example_tables.columns()
    codes: dict[str, int] = {}
    ids: list[int] = []
    starts: list[int] = []
    flat: list[int] = []
    for identity, tokens in store.sentences.tokens():
        ids.append(identity)
        starts.append(len(flat))
        flat += [codes.setdefault(token.strip().lower(), len(codes)) for token in tokens]
    rows = np.array(starts)[np.searchsorted(np.array(ids), examples.sentence)] + examples.token
    store.neurons.set_classes(classify(examples.key, np.array(flat)[rows], examples.token, store.neurons.largest()))
