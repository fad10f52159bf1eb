"""`Described`: what a store and a model know about a neuron, as a record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from icebear.convert import SavedRecord, Tabled
from icebear.records import FEW_WORDS, Example, Hit, Meaning, Neuron, NeuronStatistics, Projection, Writes

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Described(SavedRecord, Tabled):
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
