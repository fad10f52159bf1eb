"""`describe`: what a store (and, if loaded, the model) knows of one neuron."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from actmax.page import STYLE, card_fragment, card_page
from concepts.models.model import Model
from concepts.vocabulary import project
from db.store import Store
from icebear.records import Example, Hit, Neuron, NeuronStatistics, Projection

SILENT = {"writes": ("q", "k", "v"), "reads": ("attn",), "examples": ()}
"""What neurons can have in common -> the sites without it."""


@dataclass(frozen=True)
class Card:
    """A neuron: vocabulary (None if it does not write), examples of both signs, statistics, class and label."""

    neuron: Neuron
    by: str
    """What the examples are extremes of, and so what their polarity is the sign of: ``activation`` or ``relevance``."""
    projection: Projection | None
    examples: dict[str, list[Example]]
    """polarity -> furthest first."""
    statistics: NeuronStatistics
    kind: dict[str, str]
    """polarity -> class, see actmax/classes.py."""
    words: dict[str, list[str]]
    """polarity -> an automatic label, see `distinctive_words`."""
    label: str | None
    """What somebody called it."""
    nearest: dict[str, list[Hit]]
    """What they have in common (``writes``, ``reads``, ``examples``) -> the neurons most like this one at ``+``."""
    made_with: dict[str, Any]
    """Model, versions, corpus and settings, see `Store.made_with`."""

    def to_html(self) -> str:
        """A self-contained page."""
        return card_page(self)

    def _repr_html_(self) -> str:
        """For a notebook, with its style, which touches nothing but cards."""
        return f"<style>{STYLE}</style>{card_fragment(self)}"

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.made_with,
            "neuron": str(self.neuron),
            "by": self.by,
            "label": self.label,
            "automatic_label": self.words,
            "class": self.kind,
            "nearest": {
                by: [{"neuron": str(hit.neuron), "polarity": hit.polarity, "cosine": hit.score} for hit in hits]
                for by, hits in self.nearest.items()
            },
            "statistics": {
                name: getattr(self.statistics, name) for name in ("mean", "std", "min", "max", "positive", "histogram")
            },
            "vocabulary": self.projection.to_dict() if self.projection else None,
            "examples": {polarity: list(map(_example, found)) for polarity, found in self.examples.items()},
        }


def _example(example: Example) -> dict[str, Any]:
    return {
        example.by: example.value,
        "token": example.token,
        "token_text": example.token_text,
        "text": example.sentence.text,
        "title": example.sentence.title,
        **({"relevance": example.relevance} if example.by == "activation" else {}),  # of its tokens
    }


def describe(store: Store, neuron: Neuron, model: Model | None = None, k: int = 10) -> Card:
    """The card of a neuron of the store's index; a model makes its vocabulary exact, see `Store.vocabulary`."""
    statistics = store.statistics(neuron)
    examples = {polarity: store.examples(neuron, polarity) for polarity in "+-"}
    common = [by for by, silent in SILENT.items() if neuron.site not in silent]
    return Card(
        neuron,
        store.by,
        _vocabulary(store, statistics, model, k) if neuron.site not in SILENT["writes"] else None,
        {polarity: found[:k] for polarity, found in examples.items()},
        statistics,
        store.classes(neuron),
        {polarity: distinctive_words(store, found) for polarity, found in examples.items()},
        store.label(neuron),
        {by: store.similar(neuron, 5, by) for by in common},
        store.made_with(),
    )


def _vocabulary(store: Store, statistics: NeuronStatistics, model: Model | None, k: int) -> Projection:
    neuron = statistics.neuron
    return replace(project(model, neuron, k) if model else store.vocabulary(neuron, k), std=statistics.std)


def distinctive_words(store: Store, examples: Sequence[Example], k: int = 3) -> list[str]:
    """The words that set the examples apart from the corpus, by the z-score of the log-odds (Monroe et al. 2008).

    Only words of at least two examples count.
    """
    counts = Counter(
        word for example in examples for word in set(re.findall(r"[^\W\d_]{2,}", example.sentence.text.lower()))
    )
    common = {word: count for word, count in counts.items() if count >= 2}
    corpus = store.sentences_with(common)
    total = store.count("sentences")

    def z(word: str) -> float:
        here, everywhere = common[word], max(corpus[word], common[word])
        odds = (here + 0.5) / (len(examples) - here + 0.5)
        other = (everywhere - here + 0.5) / (total - everywhere - len(examples) + here + 0.5)
        return math.log(odds / max(other, 1e-9)) / math.sqrt(1 / (here + 0.5) + 1 / (everywhere - here + 0.5))

    return sorted((word for word in common if z(word) > 1.96), key=lambda word: (-z(word), word))[:k]
