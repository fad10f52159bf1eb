"""A few sequences of tokens that end here."""

from __future__ import annotations

import numpy as np

from icebear.actmax.labels.evidence import Evidence, common, keys_at
from icebear.actmax.labels.kinds.base import LabelKind
from icebear.actmax.labels.label import Label
from icebear.actmax.labels.sample import Sample

SIZES = (1, 3, 5)


class Ngrams(LabelKind):
    """One of a few sequences of tokens ends here."""

    name = "n-gram"

    def candidates(self, evidence: Evidence) -> list[Label]:
        sample, labels = evidence.sample, []
        for length in (2, 3):
            ending = keys_at(evidence.places, 1 - length, length)
            best = common(ending, sample.sequences[length], len(sample), max(SIZES))
            labels += [Label(self.name, "here", tuple(best[:size])) for size in SIZES if size <= len(best)]
        return labels

    def true(self, label: Label, sample: Sample) -> np.ndarray:
        true = np.zeros(len(sample), dtype=bool)
        for item in label.items:
            here = np.ones(len(sample), dtype=bool)
            for back, token in enumerate(reversed(item)):
                here &= sample.beside(sample.token == sample.codes.tokens.get(token, -1), -back)
            true |= here
        return true
