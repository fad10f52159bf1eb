"""Whether a label is true at the strongest sentences of a neuron, which its card shows.

A label is made and scored on samples, where a neuron's strongest sentences hardly occur. Many labels that predict its
activation there are true at none of these sentences: a reader who sees both finds no connection.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property

import numpy as np

from icebear.actmax.labels.kinds import TOKEN_OFFSETS, TOPIC_COSINE, Label
from icebear.actmax.labels.sample import topics_name, unit_vectors
from icebear.convert import CONVERTER
from icebear.db.store import Store
from icebear.records import AutomaticLabel, Example

STRONGEST = 6
"""The sentences that a label has to fit."""
FITTING = 2
"""A significant label is true at this many of them or more; labels of other neurons reach it in 2 % of cases."""


class StrongestSentences:
    """Counts at how many of the strongest sentences of an index labels are true."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def fitting(self, meanings: Iterable[AutomaticLabel]) -> Iterator[AutomaticLabel]:
        """Yield the labels, with `strongest` in their records: at how many sentences they are true, and of how many.
        One that is true at fewer than `FITTING` is not significant. Labels of heads, which are about the tokens that a
        head attends to, stay as they are, with [0, 0]."""
        for meaning in meanings:
            if not meaning.significant:
                yield meaning
                continue
            of_head = meaning.neuron.site == "head"
            rows = [] if of_head else self.store.examples(meaning.neuron, meaning.polarity, STRONGEST)
            true = int(self.true(CONVERTER.structure(meaning.record["label"], Label), rows).sum()) if rows else 0
            record = {**meaning.record, "strongest": [true, len(rows)]}
            yield replace(meaning, significant=of_head or true >= FITTING, record=record)

    def true(self, label: Label, rows: list[Example]) -> np.ndarray:
        """Return at which examples (E,) a topic or a token pattern is true."""
        if label.kind == "topic":
            vectors = unit_vectors(self.store, [row.sentence.id for row in rows])  # (E, D)
            return vectors @ self._centers[label.items] >= TOPIC_COSINE
        step = TOKEN_OFFSETS[label.kind]
        beside = [row.sentence.tokens[row.token + step : row.token + step + 1] for row in rows if row.token + step >= 0]
        return np.array([token.lower() in label.items for tokens in beside for token in tokens], dtype=bool)

    @cached_property
    def _centers(self) -> dict[tuple[str, ...], np.ndarray]:
        topics = self.store.controls.get(topics_name(self.store))
        centers = np.array(topics["centers"], dtype=np.float32)
        return dict(zip(map(tuple, topics["words"]), centers, strict=True))
