"""What a kind of label is."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from icebear.actmax.labels.evidence import Evidence
from icebear.actmax.labels.label import Label, place_text
from icebear.actmax.labels.sample import Sample


class LabelKind(ABC):
    """How labels of a kind are made of evidence, and where one is true."""

    name: str
    depends_on_neuron = True
    """Whether other neurons have other candidates."""

    @abstractmethod
    def candidates(self, evidence: Evidence) -> list[Label]:
        """Labels that the evidence speaks for; in the order in which equally good ones are preferred."""

    @abstractmethod
    def true(self, label: Label, sample: Sample) -> np.ndarray:
        """(N,) bool: at which tokens the label is true."""

    def degree(self, label: Label, sample: Sample) -> np.ndarray:
        """(S,) how much it is true of each sentence."""
        return sample.means(self.true(label, sample))

    def text(self, label: Label) -> str:
        return place_text(label)
