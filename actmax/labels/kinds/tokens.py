"""The token itself, the one before it, or the one after it is one of a few."""

from __future__ import annotations

import numpy as np

from icebear.actmax.labels.evidence import Evidence, common, keys_at
from icebear.actmax.labels.label import Label, at, said
from icebear.actmax.labels.sample import Sample, key

SIZES = (1, 2, 3, 5, 8)
STEPS = {"here": 0, "before": -1, "after": 1}


def candidates(evidence: Evidence) -> list[Label]:
    sample, found = evidence.sample, []
    for where, step in STEPS.items():
        seen = keys_at(evidence.places, step)
        best = common(seen, sample.sequences[1], len(sample), max(SIZES))
        found += [Label("tokens", where, tuple(best[:size])) for size in SIZES if size <= len(best)]
    if evidence.writes:  # neurons of the last layers fire before what they write
        found += [Label.of("tokens", where, map(key, evidence.writes)) for where in ("here", "after")]
    return found


def true(label: Label, sample: Sample) -> np.ndarray:
    return at(sample, sample.codes.chosen(sample.codes.tokens, label.texts)[sample.token], label.where)


def text(label: Label) -> str:
    return said(label)
