"""The evidence for labels: where a neuron is most active in train documents, and the tokens that it promotes."""

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
"""The share of tokens that are positives."""
SENTENCES = 0.05
"""The share of sentences that are positives."""
FEWEST = 8
"""The smallest number of tokens with an activation above zero for a label."""

TokenPlace = tuple[tuple[str, ...], int]
"""The tokens of a sentence, and a position among them."""


@dataclass(frozen=True)
class Evidence:
    """The evidence for labels of a neuron at one polarity."""

    sample: Sample
    """The train sample."""
    values: np.ndarray
    """(N,) activations in the sample; negated for polarity ``-``."""
    examples: tuple[TokenPlace, ...] = ()
    """Maximally activating examples from train documents."""
    marked: tuple[str, ...] = ()
    """Earlier words with large relevance in at least two annotated examples, most frequent first."""
    writes: tuple[str, ...] = ()
    """Tokens that the neuron promotes; empty for a site without W_out."""

    @cached_property
    def places(self) -> list[TokenPlace]:
        """Where it is most active: in the sample, and in the index."""
        own = top(self.values, self.sample.counted, TOKENS)
        return [*(self.sample.place(token) for token in own), *self.examples]


def top(values: np.ndarray, counted: np.ndarray, share: float) -> np.ndarray:
    """Return the positions of the largest share of the counted values above zero, largest first."""
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
    """Return `count` tokens in lower case, starting `step` tokens after each place."""
    rows = ((pieces, place + step) for pieces, place in places)
    return [tuple(map(key, pieces[at : at + count])) for pieces, at in rows if 0 <= at <= len(pieces) - count]


def words_until(places: Iterable[TokenPlace]) -> list[str]:
    """Return the distinct words of each sentence up to the place."""
    return [w for pieces, place in places for w in {word for word, end in words(pieces) if end <= place}]
