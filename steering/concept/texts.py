"""The texts that find a concept: with it and without it, and the split of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from icebear.errors import InputError
from icebear.values import several, text_of

FEWEST_TEXTS = 16
"""The minimum number of texts of each kind; with fewer, too few are left to test on."""
SPLITS = (0.5, 0.75)
"""Half of the texts of each kind rank and weigh neurons, a quarter chooses among sets, a quarter tests the chosen."""


@dataclass(frozen=True)
class ConceptTexts:
    """The texts that found a concept, and the seed of their split."""

    examples: tuple[str, ...]
    others: tuple[str, ...]
    seed: int

    def tests(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the texts with and without the concept that test it."""
        texts, positive, split = prepared(self.examples, self.others, self.seed)
        tested = np.flatnonzero(split == 2).tolist()
        with_it, without = (
            tuple(texts[row] for row in tested if bool(positive[row]) is kind) for kind in (True, False)
        )
        return with_it, without


def prepared(examples: Sequence[str], others: Sequence[str], seed: int) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return the different texts of both kinds, which of them have the concept, and the random split of each: 0 is
    train, 1 validation, 2 test. Raises `InputError`."""
    checked = [[text_of(text).strip() for text in several(texts)] for texts in (examples, others)]
    kinds = [list(dict.fromkeys(filter(None, texts))) for texts in checked]
    both = set(kinds[0]) & set(kinds[1])
    if both:
        raise InputError(
            f"{len(both)} texts are in both lists (with the concept, and without it), such as {min(both)[:40]!r}; "
            "remove them from one list."
        )
    if min(map(len, kinds)) < FEWEST_TEXTS:
        raise InputError(
            f"A concept needs at least {FEWEST_TEXTS} different texts with it and as many without; there are "
            f"{len(kinds[0])} and {len(kinds[1])}, so add more."
        )
    generator = np.random.default_rng(seed)
    splits = [np.digitize(generator.permutation(len(texts)) / len(texts), SPLITS) for texts in kinds]
    positive = np.repeat([True, False], [len(kinds[0]), len(kinds[1])])
    return [*kinds[0], *kinds[1]], positive, np.concatenate(splits)
