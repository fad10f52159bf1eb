"""Where in the sentence it is, whatever is written there."""

from __future__ import annotations

import numpy as np

from icebear.actmax.labels.evidence import Evidence
from icebear.actmax.labels.kinds.base import LabelKind
from icebear.actmax.labels.label import Label
from icebear.actmax.labels.sample import Sample

POSITIONS = {
    "the second token": lambda sample: sample.position == 1,
    "the third token": lambda sample: sample.position == 2,
    "the second to fourth token": lambda sample: (sample.position >= 1) & (sample.position <= 3),
    "the second to eighth token": lambda sample: (sample.position >= 1) & (sample.position <= 7),
    "the last token": lambda sample: sample.left == 1,
    "one of the last four tokens": lambda sample: (sample.left >= 1) & (sample.left <= 4),
    "far from the beginning": lambda sample: sample.position >= 32,
}


class Positions(LabelKind):
    """The place of the token in the sentence."""

    name = "position"
    depends_on_neuron = False

    def candidates(self, evidence: Evidence) -> list[Label]:
        return [Label.of(self.name, "here", (name,)) for name in POSITIONS]

    def true(self, label: Label, sample: Sample) -> np.ndarray:
        return POSITIONS[label.texts[0]](sample)

    def text(self, label: Label) -> str:
        return label.texts[0]
