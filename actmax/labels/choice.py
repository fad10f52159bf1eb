"""The label that predicts best where a neuron is most active, of all candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from icebear.actmax.labels import scores
from icebear.actmax.labels.label import Label
from icebear.actmax.labels.sample import PARTS
from icebear.actmax.labels.scores import Fires

SHORTER = 0.01
"""What an item of a label has to add, of the way from chance to the bar."""


@dataclass(frozen=True)
class Chosen:
    """A candidate, by what it is judged, and its score on each part."""

    label: Label
    by: str
    train: float
    validation: float
    test: float

    @property
    def margin(self) -> float:
        return scores.margin(self.by, self.test)

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "label": self.label.to_dict()}


@dataclass(frozen=True)
class Candidate:
    label: Label
    worth: float
    """How far it comes from chance to the bar, less `SHORTER` for each item but the first."""


def choose(labels: Sequence[Label], fired: dict[str, Fires]) -> Chosen:
    """The label that does best on the validation part: the best one by token or the best one by sentence, whichever
    has the higher score of those that pass their bar, or comes nearest to it."""
    validation = fired["validation"]
    return the_better(best_of(labels, validation) or best_of(labels, validation, responding=False), fired)


def the_better(candidates: dict[str, Candidate], fired: dict[str, Fires]) -> Chosen:
    passing = [by for by in scores.UNITS if by in candidates and candidates[by].worth >= 1]
    able = [judged(candidates[by].label, by, fired) for by in passing or candidates]
    return max(able, key=lambda one: one.validation if passing else scores.margin(one.by, one.validation))


def best_of(labels: Sequence[Label], fired: Fires, responding: bool = True) -> dict[str, Candidate]:
    """unit -> the best of some labels by it, the first of equal ones, of those that the neuron also responds to."""
    best: dict[str, Candidate] = {}
    detected = [(label, scores.detection(label, fired)) for label in labels]
    for by in scores.UNITS:
        worth = [scores.margin(by, score[by]) - SHORTER * (len(label.items) - 1) for label, score in detected]
        for place in sorted(range(len(labels)), key=lambda place: -worth[place]):
            if not responding or scores.responds(labels[place], fired, by):
                best[by] = Candidate(labels[place], worth[place])
                break
    return best


def judged(label: Label, by: str, fired: dict[str, Fires]) -> Chosen:
    return Chosen(label, by, *(scores.detection(label, fired[part])[by] for part in PARTS))
