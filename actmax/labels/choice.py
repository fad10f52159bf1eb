"""The best label of each side: chosen on validation documents, scored on test documents, which choose nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from icebear.actmax.labels.kinds import Label
from icebear.actmax.labels.sample import SPLITS
from icebear.actmax.labels.scores import TopActivations, label_aurocs, responding, score
from icebear.actmax.labels.significance import THRESHOLDS, margin


@dataclass(frozen=True)
class Chosen:
    """A label, the unit of its score, and its score on each part."""

    label: Label
    by: str
    train: float
    validation: float
    test: float

    @property
    def margin(self) -> float:
        return margin(self.by, self.test)


Candidates = dict[str, tuple[Label, float]]
"""unit -> the best label by this unit, and its margin on the validation part."""


def best_of(labels: Sequence[Label], top: TopActivations) -> list[Candidates]:
    """Return, for each side, the best label by each unit among those that raise the activation. The first label wins a
    tie. Where no label raises the activation of a side, the best of all."""
    units = [by for by in THRESHOLDS if by != "pattern" or all(label.kind != "topic" for label in labels)]
    margins = {by: margin(by, label_aurocs(labels, by, top)) for by in units}
    raising = {by: responding(labels, by, top) for by in units}
    rows = []
    for row in range(len(top.values)):
        able = {by: raising[by][row] for by in units}
        if not any(map(np.any, able.values())):
            able = {by: np.ones(len(labels), dtype=bool) for by in units}
        best = {by: int(np.where(able[by], margins[by][row], -np.inf).argmax()) for by in units if able[by].any()}
        rows.append({by: (labels[index], float(margins[by][row, index])) for by, index in best.items()})
    return rows


def better_of(candidates: Candidates, top: dict[str, TopActivations], row: int) -> Chosen:
    """Return the label with the higher score on the validation part among those that pass their threshold; if none
    does, the one with the larger margin."""
    passing = [by for by, (_, worth) in candidates.items() if worth >= 1]
    able = [score_parts(candidates[by][0], by, top, row) for by in passing or candidates]
    return max(able, key=lambda choice: choice.validation if passing else margin(choice.by, choice.validation))


def choose_labels(labels: Sequence[Label], top: dict[str, TopActivations]) -> list[Chosen]:
    """Return the label of each side with the best score on the validation part."""
    return [better_of(best, top, row) for row, best in enumerate(best_of(labels, top["validation"]))]


def score_parts(label: Label, by: str, top: dict[str, TopActivations], row: int) -> Chosen:
    return Chosen(label, by, *(score(label, by, top[part], row) for part in SPLITS))
