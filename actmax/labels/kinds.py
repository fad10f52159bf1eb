"""Labels are readable properties of tokens: a topic of their sentence, or tokens that a person names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from icebear.actmax.labels.sample import Sample

TOP_TOKENS = 0.01
"""The share of tokens that are positives."""
TOP_SENTENCES = 0.05
"""The share of sentences that are positives."""
FEWEST = 8
"""The smallest number of tokens with an activation above zero for a label."""
ALIKE = 0.3
"""The smallest cosine between a sentence and its topic."""


@dataclass(frozen=True)
class Label:
    """A property that tokens have in common where a neuron is active."""

    kind: Literal["topic", "tokens"]
    items: tuple[str, ...]
    """The words of a topic, or tokens in lower case, of which any makes the label true."""

    def true(self, sample: Sample) -> np.ndarray:
        """Return at which tokens the label is true (N,)."""
        if self.kind == "topic":
            return (self.degree(sample) >= ALIKE)[sample.sentence]
        return np.isin(sample.token, [sample.codes[text] for text in self.items if text in sample.codes])

    def degree(self, sample: Sample) -> np.ndarray:
        """Return the degree (S,) to which the label is true of each sentence; of a topic, their cosine."""
        if self.kind == "topic":
            return sample.topics[self.items]
        return sample.means(self.true(sample)[None, sample.counted])[0]

    def __str__(self) -> str:
        if self.kind == "topic":
            return f"sentences about {', '.join(self.items)}"
        return ", ".join(map(repr, self.items))
