"""The label that predicts best where a neuron is most active, of all candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from icebear.actmax.labels import scores
from icebear.actmax.labels.kinds import Label
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


def choose(labels: Sequence[Label], fired: dict[str, Fires]) -> Chosen:
    """The label that does best on the validation part: the best one by token or the best one by sentence, whichever
    has the higher score of those that pass their bar, or comes nearest to it."""
    validation = fired["validation"]
    return the_better(best_of(labels, validation) or best_of(labels, validation, responding=False), fired)


def the_better(candidates: dict[str, tuple[Label, float]], fired: dict[str, Fires]) -> Chosen:
    passing = [by for by, (_, worth) in candidates.items() if worth >= 1]
    able = [judged(candidates[by][0], by, fired) for by in passing or candidates]
    return max(able, key=lambda one: one.validation if passing else scores.margin(one.by, one.validation))


def best_of(labels: Sequence[Label], fired: Fires, responding: bool = True) -> dict[str, tuple[Label, float]]:
    """unit -> the best of some labels by it, the first of equal ones, of those that the neuron also responds to; and
    how far it comes from chance to the bar, less `SHORTER` for each item but the first."""
    best = {}
    detected = [(label, scores.detection(label, fired)) for label in labels]
    for by in scores.UNITS:
        worth = [scores.margin(by, score[by]) - SHORTER * (len(label.items) - 1) for label, score in detected]
        for place in sorted(range(len(labels)), key=lambda place: -worth[place]):
            if not responding or scores.responds(labels[place], fired, by):
                best[by] = labels[place], worth[place]
                break
    return best


def judged(label: Label, by: str, fired: dict[str, Fires]) -> Chosen:
    return Chosen(label, by, *(scores.detection(label, fired[part])[by] for part in PARTS))
