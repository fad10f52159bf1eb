"""`describe`: what a store (and, if loaded, the model) knows of one neuron."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from icebear import values
from icebear.actmax.page import STYLE, card_fragment
from icebear.concepts.files import SavedResult
from icebear.concepts.models.model import Model
from icebear.concepts.render import page
from icebear.concepts.vocabulary import project
from icebear.convert import Tabled
from icebear.db.search import nearest_by_chance
from icebear.db.store import Store
from icebear.records import Example, Hit, Meaning, Neuron, NeuronStatistics, Projection, as_neuron

if TYPE_CHECKING:
    import pandas

LARGE = 1 << 30
"""Bytes of vectors, which a search reads whole, from where on a card does without (an 8B model's have some 16 GB)."""
SILENT = {"writes": ("q", "k", "v"), "reads": ("attn",), "examples": ()}
"""What neurons can have in common -> the sites without it."""


@dataclass(frozen=True)
class Card(SavedResult, Tabled):
    """A neuron: vocabulary (None if it does not write), examples of both signs, statistics, class and label."""

    neuron: Neuron
    by: str
    """What the examples are extremes of, and so what their polarity is the sign of: ``activation`` or ``relevance``."""
    projection: Projection | None
    examples: dict[str, list[Example]]
    """polarity -> furthest first."""
    statistics: NeuronStatistics
    kind: dict[str, str]
    """polarity -> class, see actmax/index/classes.py."""
    meanings: dict[str, Meaning]
    """polarity -> what it means, with a score; empty before `icebear label --auto`, see actmax/labels."""
    held_out: dict[str, dict[str, list[Example]]]
    """polarity -> of `icebear.actmax.labels.score_text.HELD_OUT`: sentences of documents that its label was not made
    from."""
    label: str | None
    """What somebody called it, and"""
    label_scores: dict[str, dict[str, Any]]
    """polarity -> how well that holds, if it was measured."""
    nearest: dict[str, list[Hit]]
    """What they have in common (``writes``, ``reads``, ``examples``) -> the neurons most like this one at ``+``."""
    nearest_by_chance: dict[str, tuple[float, float]]
    """The same -> the median and the largest cosine between random neurons and the nearest to each."""
    left_out: bool
    """Whether the nearest, and without a model the vocabulary, were left out; see `describe`."""
    made_with: dict[str, Any]
    """Model, versions, corpus and settings, see `Store.made_with`."""

    @property
    def title(self) -> str:
        """What somebody called it, with its scores."""
        scores = ", ".join(f"{p} {row['score']:.2f} by {row['by']}" for p, row in self.label_scores.items())
        return f"{self.label} ({scores})" if scores else self.label or ""

    def to_html(self) -> str:
        """A self-contained page."""
        return str(page(f"{self.neuron} - icebear", card_fragment(self), STYLE))

    def _repr_html_(self) -> str:
        """For a notebook, with its style, which touches nothing but cards."""
        return f"<style>{STYLE}</style>{card_fragment(self)}"

    def to_frame(self) -> pandas.DataFrame:
        """The examples as a pandas table, a row each. `to_arrow` has them as an Arrow table."""
        import pandas

        rows = [
            {
                "neuron": str(self.neuron),
                "polarity": polarity,
                self.by: example.value,
                "token": example.token_text,
                "text": example.sentence.text,
                "title": example.sentence.title,
            }
            for polarity, found in self.examples.items()
            for example in found
        ]
        return pandas.DataFrame(rows)

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.made_with,
            "neuron": str(self.neuron),
            "by": self.by,
            "label": self.label,
            "label_scores": self.label_scores,
            "automatic_label": {polarity: found.to_dict() for polarity, found in self.meanings.items()},
            "class": self.kind,
            "nearest": {
                by: [{"neuron": str(hit.neuron), "polarity": hit.polarity, "cosine": hit.score} for hit in hits]
                for by, hits in self.nearest.items()
            },
            "nearest_by_chance": {by: list(cosines) for by, cosines in self.nearest_by_chance.items()},
            "statistics": self.statistics.to_dict(),
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


def describe(
    store: Store, neuron: Neuron | str, model: Model | None = None, k: int = 10, whole: bool | None = None
) -> Card:
    """The card of a neuron of the store's index; a model makes its vocabulary exact, see `Store.vocabulary`.

    whole: also what reads all of the store's vectors, which are the nearest neurons and, without a model, the
        vocabulary; by default where these have less than `LARGE` bytes.
    """
    neuron, k = as_neuron(neuron), values.whole(k, "The number of examples")
    whole = store.vectors.size() < LARGE if whole is None else whole
    statistics = store.neurons.statistics(neuron)
    meanings = {polarity: found for (_, polarity), found in store.labels.meanings([neuron]).items()}
    examples = {polarity: store.examples(neuron, polarity) for polarity in "+-"}
    common = [by for by, silent in SILENT.items() if whole and neuron.site not in silent]
    vocabulary = None
    if neuron.site not in SILENT["writes"] and (whole or model):
        vocabulary = project(model, neuron, k) if model else store.vocabulary(neuron, k)
        vocabulary = replace(vocabulary, std=statistics.std)
    return Card(
        neuron,
        store.by,
        vocabulary,
        {polarity: found[:k] for polarity, found in examples.items()},
        statistics,
        store.neurons.classes(neuron),
        meanings,
        {polarity: held_out_examples(store, found) for polarity, found in meanings.items()},
        *store.labels.own(neuron),
        {by: store.similar(neuron, 5, by) for by in common},
        {by: nearest_by_chance(store, by) for by in common},
        not whole,
        store.made_with(),
    )


def held_out_examples(store: Store, meaning: Meaning) -> dict[str, list[Example]]:
    """Of `icebear.actmax.labels.score_text.HELD_OUT`: sentences of documents that its label was not made from."""
    groups = meaning.record.get("examples", {})
    sentences = store.sentences.of([row["sentence"] for rows in groups.values() for row in rows])
    sign = 1 if meaning.polarity == "+" else -1
    return {
        name: [Example(sign * row["value"], row["token"], sentences[row["sentence"]]) for row in rows]
        for name, rows in groups.items()
    }
