"""Labels are readable properties of tokens: a topic of their sentence, or which tokens stand there, or beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from icebear.actmax.labels.sample import Sample

TOP_TOKENS = 0.01
"""The share of tokens that are positives."""
TOP_SENTENCES = 0.05
"""The share of sentences that are positives."""
FEWEST_TOKENS = 8
"""The smallest number of tokens with an activation above zero for a label."""
TOPIC_COSINE = 0.3
"""The smallest cosine between a sentence and its topic."""

LabelKind = Literal["topic", "tokens", "before", "after", "description"]
OF_SENTENCES = ("topic", "description")
TOKEN_OFFSETS: dict[LabelKind, int] = {"tokens": 0, "before": 1, "after": -1}
"""The kind of a token pattern -> where it looks for its tokens, relative to the neuron's token."""
SPELLED = {
    ",": "a comma",
    ".": "a full stop",
    ":": "a colon",
    ";": "a semicolon",
    "-": "a hyphen",
    "(": "an opening bracket",
    ")": "a closing bracket",
    '"': "a quotation mark",
    "'": "an apostrophe",
    "\n": "a line break",
}
"""Tokens that are named in a label."""


@dataclass(frozen=True)
class Label:
    """A property that tokens have in common where a neuron is active."""

    kind: LabelKind
    items: tuple[str, ...]
    """The words of a topic, or tokens in lower case, of which any makes the label true, or one description."""

    def true(self, sample: Sample) -> np.ndarray:
        """Return at which tokens the label is true (N,)."""
        if self.kind in OF_SENTENCES:
            return (self.degree(sample) >= TOPIC_COSINE)[sample.sentence]
        codes = [sample.codes[text] for text in self.items if text in sample.codes]
        return np.isin(sample.beside(TOKEN_OFFSETS[self.kind]), codes)

    def degree(self, sample: Sample) -> np.ndarray:
        """Return the degree (S,) to which the label is true of each sentence; of a topic, their cosine."""
        if self.kind in OF_SENTENCES:
            return (sample.topics if self.kind == "topic" else sample.described)[self.items]
        return sample.means(self.true(sample)[None, sample.counted])[0]

    def text(self, of_head: bool = False) -> str:
        """Return the label in words. of_head: of an attention head, whose activation is the attention that a token
        gets."""
        if self.kind in OF_SENTENCES:
            return f"sentences about {', '.join(self.items)}" if self.kind == "topic" else self.items[0]
        tokens = ", ".join(dict.fromkeys(map(spelled, self.items)))
        if self.kind == "tokens":
            return f"{'from' if of_head else 'at'} {tokens}"
        return f"{'from the token ' if of_head else ''}{self.kind} {tokens}"


def spelled(token: str) -> str:
    """Return a token in a label: punctuation by its name, the inside of a word with dots before it."""
    text = token.strip(" ") or token
    if text in SPELLED:
        return SPELLED[text]
    inside = text == token and text[:1].isalpha() and text.isascii()
    return f"'{'...' if inside else ''}{text}'"
