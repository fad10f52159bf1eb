"""The kinds of labels, one file each: what makes candidates of evidence, and where a label is true.

A kind is a module with `candidates(evidence) -> list[Label]`, `true(label, sample) -> (N,) bool`, `text(label)`, and,
where a sentence is not judged by the share of its tokens, `degree(label, sample) -> (S,)`.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from icebear.actmax.labels.evidence import Evidence
from icebear.actmax.labels.kinds import categories, ngrams, positions, tokens, topics, words
from icebear.actmax.labels.label import Label
from icebear.actmax.labels.sample import Sample

KINDS: dict[str, ModuleType] = {
    "tokens": tokens,
    "n-gram": ngrams,
    "category": categories,
    "words": words,
    "position": positions,
    "topic": topics,
}


FIXED = ("category", "position", "topic")
"""Kinds whose candidates do not depend on the neuron."""


def candidates(evidence: Evidence) -> list[Label]:
    return [label for kind in KINDS.values() for label in kind.candidates(evidence)]


def true(label: Label, sample: Sample) -> np.ndarray:
    """(N,) bool: at which tokens the label is true."""
    return KINDS[label.kind].true(label, sample)


def degree(label: Label, sample: Sample) -> np.ndarray:
    """(S,) how much it is true of each sentence."""
    own = getattr(KINDS[label.kind], "degree", None)
    return own(label, sample) if own else sample.means(true(label, sample))


def text(label: Label) -> str:
    return KINDS[label.kind].text(label)
