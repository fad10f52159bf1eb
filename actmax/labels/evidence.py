"""What a label is made from: a neuron's extremes in the documents to train on, and what it writes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from icebear.actmax.labels.sample import Sample, key, words

TOKENS = 0.01
"""The share of tokens that counts as driving a neuron far, and"""
SENTENCES = 0.05
"""of sentences."""
FEWEST = 8
"""Tokens at least that drive a neuron to a side, for a label of it."""

TokenPlace = tuple[tuple[str, ...], int]
"""A sentence's tokens, and one of them."""


@dataclass(frozen=True)
class Evidence:
    """Of a neuron at one polarity."""

    sample: Sample
    """Of the train part."""
    values: np.ndarray
    """(N,) there: activations, of polarity ``-`` negated."""
    examples: tuple[TokenPlace, ...] = ()
    """The index's examples that are of that part."""
    marked: tuple[str, ...] = ()
    """Words that relevance found to drive it there, most often first."""
    writes: tuple[str, ...] = ()
    """Tokens that it promotes."""

    @cached_property
    def places(self) -> list[TokenPlace]:
        """Where it is most active: in the sample, and in the index."""
        own = top(self.values, self.sample.counted, TOKENS)
        return [*(self.sample.place(token) for token in own), *self.examples]


def top(values: np.ndarray, counted: np.ndarray, share: float) -> np.ndarray:
    """The places of the largest share of the values that count, of those above zero; largest first."""
    wanted = max(FEWEST, math.ceil(share * counted.sum()))
    masked = np.where(counted & (values > 0), values, -np.inf)
    order = np.argsort(-masked, kind="stable")[:wanted]
    return order[np.isfinite(masked[order])]


def distinctive(items: Iterable[Any], background: Counter, total: int, k: int) -> list[Any]:
    """Return the k items that are most typical against the background, by the z-score of their log-odds (Monroe et
    al. 2008). Each occurs at least twice."""
    counts = Counter(items)
    n = sum(counts.values())

    def z(item: Any) -> float:
        here, there = counts[item], background[item]
        odds = (here + 0.5) / (n - here + 0.5)
        other = (there + 0.5) / (total - there + 0.5)
        return math.log(odds / other) / math.sqrt(1 / (here + 0.5) + 1 / (there + 0.5))

    able = [item for item, count in counts.items() if count > 1 and z(item) > 1.96]
    return sorted(able, key=lambda item: (-z(item), str(item)))[:k]


def keys_at(places: Iterable[TokenPlace], step: int, count: int = 1) -> list[tuple[str, ...]]:
    """So many tokens from the one `step` behind each place on, in lower case."""
    rows = ((pieces, place + step) for pieces, place in places)
    return [tuple(map(key, pieces[at : at + count])) for pieces, at in rows if 0 <= at <= len(pieces) - count]


def words_until(places: Iterable[TokenPlace]) -> list[str]:
    """The words at each place or before it in the sentence, each once."""
    return [w for pieces, place in places for w in {word for word, end in words(pieces) if end <= place}]
