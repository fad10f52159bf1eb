"""A few sequences of tokens that end here."""

from __future__ import annotations

import numpy as np

from icebear.actmax.labels.evidence import Evidence, common, keys_at
from icebear.actmax.labels.label import Label, said
from icebear.actmax.labels.sample import Sample

SIZES = (1, 3, 5)


def candidates(evidence: Evidence) -> list[Label]:
    sample, found = evidence.sample, []
    for length in (2, 3):
        ending = keys_at(evidence.places, 1 - length, length)
        best = common(ending, sample.sequences[length], len(sample), max(SIZES))
        found += [Label("n-gram", "here", tuple(best[:size])) for size in SIZES if size <= len(best)]
    return found


def true(label: Label, sample: Sample) -> np.ndarray:
    found = np.zeros(len(sample), dtype=bool)
    for item in label.items:
        here = np.ones(len(sample), dtype=bool)
        for back, token in enumerate(reversed(item)):
            here &= sample.beside(sample.token == sample.codes.tokens.get(token, -1), -back)
        found |= here
    return found


def text(label: Label) -> str:
    return said(label)
