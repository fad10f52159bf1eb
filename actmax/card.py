"""`describe`: the card of a neuron, with everything that a store knows about it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from icebear import values
from icebear.actmax.page import STYLE, card_fragment
from icebear.convert import SavedRecord, Tabled
from icebear.db.search import nearest, nearest_by_chance
from icebear.db.store import Store
from icebear.records import (
    FEW_WORDS,
    PLACES,
    Example,
    Hit,
    Meaning,
    Neuron,
    NeuronStatistics,
    Projection,
    Writes,
    as_neuron,
)
from icebear.render import page
from icebear.values import typed

if TYPE_CHECKING:
    import pandas

    from icebear.models.model import Model

LARGE = 1 << 30
"""The size of a vector index in bytes from which a card leaves out the nearest neurons (16 GB for an 8B model)."""
SILENT = {"writes": ("q", "k", "v"), "reads": ("attn", "mixer"), "examples": ()}
"""Kind of similarity -> the sites without it."""


@dataclass(frozen=True)
class Card(SavedRecord, Tabled):
    """A neuron with its vocabulary projection, examples of both signs, statistics, classes and labels."""

    neuron: Neuron
    by: str
    """What the examples maximize, and whose sign is the polarity: ``activation`` or ``relevance``."""
    projection: Projection | None
    other: Projection | None
    """The projection through the other lens, which is shown second; None without a model."""
    writes: dict[str, Writes]
    """polarity -> the measured effect at the first examples; empty without a model."""
    examples: dict[str, list[Example]]
    """polarity -> maximally activating examples, largest first."""
    statistics: NeuronStatistics
    kind: dict[str, str]
    """polarity -> class (`icebear.actmax.index.classes`)."""
    meanings: dict[str, Meaning]
    """polarity -> automatic label with its score; empty before `icebear label --auto`."""
    held_out: dict[str, dict[str, list[Example]]]
    """polarity -> group (`icebear.actmax.labels.meanings.HELD_OUT`) -> sentences of documents that the label was not
    made from."""
    label: str | None
    """The label that a person gave."""
    label_scores: dict[str, dict[str, Any]]
    """polarity -> the measured score of this label."""
    nearest: dict[str, list[Hit]]
    """Kind of similarity (``writes``, ``reads``, ``examples``) -> the most similar neurons at ``+``, if they are more
    similar than any random neuron's nearest neighbor."""
    nearest_by_chance: dict[str, tuple[float, float]]
    """Kind of similarity -> the median and largest cosine between random neurons and their nearest neurons."""
    left_out: bool
    """Whether the nearest neurons (and without a model the vocabulary) are left out, see `describe`."""
    made_with: dict[str, Any]
    """See `Store.made_with`."""

    @property
    def projections(self) -> list[Projection]:
        return [one for one in (self.projection, self.other) if one]

    @property
    def has_fixed_words(self) -> bool:
        """Whether a projection can say what the neuron writes, as far as that is measured (`Reliability.ceiling`)."""
        known = [one.reliability for one in self.projections if one.reliability]
        return not known or known[0].ceiling >= FEW_WORDS

    @property
    def title(self) -> str:
        """The label that a person gave, with its scores."""
        scores = ", ".join(f"{p} {row['score']:.2f} by {row['by']}" for p, row in self.label_scores.items())
        return f"{self.label} ({scores})" if scores else self.label or ""

    def to_html(self) -> str:
        """Return a self-contained HTML page."""
        return str(page(f"{self.neuron} - icebear", card_fragment(self), STYLE))

    def _repr_html_(self) -> str:
        """Return the card with its style, for notebooks."""
        return f"<style>{STYLE}</style>{card_fragment(self)}"

    def to_frame(self) -> pandas.DataFrame:
        """Return the examples as a pandas table. `to_arrow` returns an Arrow table."""
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
            for polarity, examples in self.examples.items()
            for example in examples
        ]
        return pandas.DataFrame(rows)

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.made_with,
            "neuron": str(self.neuron),
            "by": self.by,
            "label": self.label,
            "label_scores": self.label_scores,
            "automatic_label": {polarity: meaning.to_dict() for polarity, meaning in self.meanings.items()},
            "class": self.kind,
            "nearest": {
                by: [{"neuron": str(hit.neuron), "polarity": hit.polarity, "cosine": hit.score} for hit in hits]
                for by, hits in self.nearest.items()
            },
            "nearest_by_chance": {by: list(cosines) for by, cosines in self.nearest_by_chance.items()},
            "statistics": self.statistics.to_dict(),
            "vocabulary": self.projection and self.projection.to_dict(),
            "other_lens": self.other and self.other.to_dict(),
            "writes": {polarity: one.to_dict() for polarity, one in self.writes.items()},
            "examples": {polarity: list(map(_example, rows)) for polarity, rows in self.examples.items()},
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


@typed
def describe(
    store: Store,
    neuron: Neuron | str,
    model: Model | None = None,
    k: int = 10,
    whole: bool | None = None,
    places: int = PLACES,
) -> Card:
    """Describe a neuron of an index.

    Parameters
    ----------
    store : Store
    neuron : Neuron or str
    model : Model, optional
        With a model there are the direct vocabulary projection, exact (see `Store.vocabulary`), the one through the
        averaged Jacobian, and, if the model predicts next tokens, the measured effects on them.
    k : int
        The number of examples and tokens.
    whole : bool, optional
        Also search the whole vector index for the nearest neurons and, without a model, the vocabulary. Default: if it
        is smaller than 1 GiB.
    places : int
        The number of examples of each polarity where effects are measured; 0 leaves them out.

    Returns
    -------
    Card

    Raises
    ------
    InputError
        If the index has no such neuron.
    StoreError
        If the index is of another model.

    References
    ----------
    Gur-Arieh et al. 2025, "Enhancing Automated Interpretability with Output-Centric Feature Descriptions" (mean effects
    of a neuron on the next token).
    """
    neuron, k = as_neuron(neuron), values.whole(k, "The number of examples")
    places = values.whole(places, "The number of places", 0)
    whole = store.vectors.size() < LARGE if whole is None else whole
    statistics = store.neurons.statistics(neuron)
    meanings = {polarity: meaning for (_, polarity), meaning in store.labels.meanings([neuron]).items()}
    examples = {polarity: store.examples(neuron, polarity) for polarity in "+-"}
    common = [by for by, silent in SILENT.items() if whole and neuron.site not in silent]
    vocabulary, effects = _of_model(model, store, neuron, k, places) if model else ([], {})
    if whole and not model and neuron.site not in SILENT["writes"]:
        vocabulary = [store.vocabulary(neuron, k)]
    first, second = (*(replace(one, std=statistics.std) for one in vocabulary), None, None)[:2]
    return Card(
        neuron,
        store.by,
        first,
        second,
        effects,
        {polarity: rows[:k] for polarity, rows in examples.items()},
        statistics,
        store.neurons.classes(neuron),
        meanings,
        {polarity: held_out_examples(store, meaning) for polarity, meaning in meanings.items()},
        *store.labels.own(neuron),
        {by: nearest(store, neuron, 5, by) for by in common},
        {by: nearest_by_chance(store, by) for by in common},
        not whole,
        store.made_with(),
    )


def _of_model(
    model: Model, store: Store, neuron: Neuron, k: int, places: int
) -> tuple[list[Projection], dict[str, Writes]]:
    """Return the projections and the measured effects. Only this part of a card imports torch."""
    from icebear.actmax.writes import writes
    from icebear.concepts.vocabulary.projection import both_projections

    vocabulary = [] if neuron.site in SILENT["writes"] else both_projections(model, neuron, k)
    return vocabulary, writes(model, store, neuron, places) if places else {}


def held_out_examples(store: Store, meaning: Meaning) -> dict[str, list[Example]]:
    """Return the groups of sentences from documents that a label was not made from."""
    groups = meaning.record.get("examples", {})
    sentences = store.sentences.of([row["sentence"] for rows in groups.values() for row in rows])
    sign = 1 if meaning.polarity == "+" else -1
    return {
        name: [Example(sign * row["value"], row["token"], sentences[row["sentence"]]) for row in rows]
        for name, rows in groups.items()
    }
