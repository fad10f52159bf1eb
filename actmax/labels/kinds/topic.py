"""The sentence is of a topic."""

from __future__ import annotations

import numpy as np

from icebear.actmax.labels.evidence import Evidence
from icebear.actmax.labels.kinds.base import LabelKind
from icebear.actmax.labels.label import Label
from icebear.actmax.labels.sample import Sample

LIKE = 0.3
"""The cosine with a topic from which on a sentence is of it."""


class TopicLabels(LabelKind):
    """The sentence is of a topic."""

    name = "topic"
    depends_on_neuron = False

    def candidates(self, evidence: Evidence) -> list[Label]:
        return [Label.of(self.name, "sentence", words) for words in evidence.sample.topics]

    def degree(self, label: Label, sample: Sample) -> np.ndarray:
        """(S,) how much a sentence is of the topic."""
        return sample.topics[tuple(label.texts)]

    def true(self, label: Label, sample: Sample) -> np.ndarray:
        return (self.degree(label, sample) >= LIKE)[sample.sentence]

    def text(self, label: Label) -> str:
        return f"sentences about {', '.join(label.texts)}"
