"""The token itself, the one before it, or the one after it is one of a few."""

from __future__ import annotations

import numpy as np

from icebear.actmax.labels.evidence import Evidence, common, keys_at
from icebear.actmax.labels.kinds.base import LabelKind
from icebear.actmax.labels.label import Label, at
from icebear.actmax.labels.sample import Sample, key

SIZES = (1, 2, 3, 5, 8)
STEPS = {"here": 0, "before": -1, "after": 1}


class Tokens(LabelKind):
    """The token here, before or after is one of a few."""

    name = "tokens"

    def candidates(self, evidence: Evidence) -> list[Label]:
        sample, labels = evidence.sample, []
        for where, step in STEPS.items():
            seen = keys_at(evidence.places, step)
            best = common(seen, sample.sequences[1], len(sample), max(SIZES))
            labels += [Label(self.name, where, tuple(best[:size])) for size in SIZES if size <= len(best)]
        if evidence.writes:  # neurons of the last layers fire before what they write
            labels += [Label.of(self.name, where, map(key, evidence.writes)) for where in ("here", "after")]
        return labels

    def true(self, label: Label, sample: Sample) -> np.ndarray:
        return at(sample, sample.codes.chosen(sample.codes.tokens, label.texts)[sample.token], label.where)
