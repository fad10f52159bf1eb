"""The choice of a label, side by side and label by label: every AUROC is of sorted numbers."""

import math

import numpy as np

from icebear.actmax.labels.kinds import FEWEST, TOP_SENTENCES, TOP_TOKENS, Label
from icebear.actmax.labels.meanings import THRESHOLDS, margin
from icebear.actmax.labels.sample import Sample
from icebear.concepts.statistics import auroc


class Part:
    """The activations of a side (N,) in a sample."""

    def __init__(self, sample: Sample, values: np.ndarray) -> None:
        self.sample, self.values = sample, values[sample.counted]
        self.sentence = sample.sentence[sample.counted]
        self.means = np.array([self.values[self.sentence == s].mean(dtype=float) for s in range(len(sample.ids))])
        self.top = self._tokens()
        on_top = np.argsort(-self.means, kind="stable")[: math.ceil(TOP_SENTENCES * len(self.means))]
        self.top_sentences = np.isin(np.arange(len(self.means)), on_top)

    def _tokens(self) -> np.ndarray:
        order = [index for index in np.argsort(-self.values, kind="stable") if self.values[index] > 0]
        wanted = max(FEWEST, math.ceil(TOP_TOKENS * len(self.values)))
        return np.isin(np.arange(len(self.values)), order[:wanted])

    def score(self, label: Label, by: str) -> float:
        if by == "token":
            return auroc(label.true(self.sample)[self.sample.counted].astype(float), self.top)
        return auroc(label.degree(self.sample), self.top_sentences)

    def raises(self, label: Label, by: str) -> bool:
        true = label.true(self.sample)[self.sample.counted]
        if by == "token":
            return bool(auroc(self.values, true) > 0.5)
        having = np.array([true[self.sentence == s].any() for s in range(len(self.means))])
        return bool(auroc(self.means, having) > 0.5)


def chosen(labels: list[Label], parts: dict[str, Part]) -> tuple[Label, str, float]:
    """Return the label, its unit, and its score on the test part."""
    validation, best = parts["validation"], {}
    for raising in (True, False):
        for by in THRESHOLDS:
            able = [label for label in labels if not raising or validation.raises(label, by)]
            if able:
                best[by] = max(able, key=lambda label: validation.score(label, by))
        if best:
            break
    scores = {by: validation.score(label, by) for by, label in best.items()}
    passing = [by for by in scores if margin(by, scores[by]) >= 1]
    by = max(passing, key=scores.get) if passing else max(scores, key=lambda by: margin(by, scores[by]))
    return best[by], by, parts["test"].score(best[by], by)
