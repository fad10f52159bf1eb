"""The kinds of labels, one file each; a new one is a class (`base.LabelKind`) and its line in `KINDS`."""

from __future__ import annotations

import numpy as np

from icebear.actmax.labels.evidence import Evidence
from icebear.actmax.labels.kinds.base import LabelKind
from icebear.actmax.labels.kinds.category import Categories
from icebear.actmax.labels.kinds.ngram import Ngrams
from icebear.actmax.labels.kinds.position import Positions
from icebear.actmax.labels.kinds.token import Tokens
from icebear.actmax.labels.kinds.topic import TopicLabels
from icebear.actmax.labels.kinds.word import Words
from icebear.actmax.labels.label import Label
from icebear.actmax.labels.sample import Sample

KINDS: dict[str, LabelKind] = {
    kind.name: kind for kind in (Tokens(), Ngrams(), Categories(), Words(), Positions(), TopicLabels())
}


def of(label: Label) -> LabelKind:
    return KINDS[label.kind]


def candidates(evidence: Evidence) -> list[Label]:
    """Of all kinds."""
    return [label for kind in KINDS.values() for label in kind.candidates(evidence)]


def true(label: Label, sample: Sample) -> np.ndarray:
    """(N,) bool: at which tokens the label is true."""
    return of(label).true(label, sample)


def degree(label: Label, sample: Sample) -> np.ndarray:
    """(S,) how much it is true of each sentence."""
    return of(label).degree(label, sample)
