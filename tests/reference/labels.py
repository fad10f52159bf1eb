"""The choice of a label, side by side and label by label: every AUROC is of sorted numbers."""

import math
from collections import Counter

import numpy as np

from icebear.actmax.labels.kinds import FEWEST_TOKENS, TOKEN_OFFSETS, TOP_SENTENCES, TOP_TOKENS, Label
from icebear.actmax.labels.patterns import OVERLAP, SHORTER, SIZES
from icebear.actmax.labels.sample import DISTINCT, Sample
from icebear.actmax.labels.significance import margin
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
        wanted = max(FEWEST_TOKENS, math.ceil(TOP_TOKENS * len(self.values)))
        return np.isin(np.arange(len(self.values)), order[:wanted])

    def score(self, label: Label, by: str) -> float:
        true = label.true(self.sample)[self.sample.counted]
        if by == "token":
            return auroc(true.astype(float), self.top)
        if by == "pattern":
            return auroc(self.values, true) if FEWEST_TOKENS <= true.sum() < len(true) else 0.5
        return auroc(label.degree(self.sample), self.top_sentences)

    def raises(self, label: Label, by: str) -> bool:
        true = label.true(self.sample)[self.sample.counted]
        if by != "sentence":
            return bool(auroc(self.values, true) > 0.5)
        having = np.array([true[self.sentence == s].any() for s in range(len(self.means))])
        return bool(auroc(self.means, having) > 0.5)


def patterns(train: Part) -> list[Label]:
    """Return the most typical tokens where a side is most active, before and after: the first 1, 2, 3 and 5 of them."""
    sample, labels = train.sample, []
    top = np.flatnonzero(sample.counted)[train.top]
    names = {code: text for text, code in sample.codes.items()}
    for kind, step in TOKEN_OFFSETS.items():

        def tokens(places: np.ndarray, step: int = step) -> list[int]:
            inside = [
                p for p in places if sample.starts[sample.sentence[p]] <= p + step < sample.ends[sample.sentence[p]]
            ]
            return [int(sample.token[p + step]) for p in inside]

        background, items = Counter(tokens(np.flatnonzero(sample.counted))), Counter(tokens(top))
        z = {}
        for code, count in items.items():
            odds = (count + 0.5) / (items.total() - count + 0.5)
            other = (background[code] + 0.5) / (background.total() - background[code] + 0.5)
            if count > 1:
                z[code] = math.log(odds / other) / math.sqrt(1 / (count + 0.5) + 1 / (background[code] + 0.5))
        best = [names[code] for code in sorted(z, key=lambda code: (-z[code], code)) if z[code] > DISTINCT]
        labels += [Label(kind, tuple(best[:size])) for size in SIZES if size <= len(best)]
    return labels


def chosen(topics: list[Label], parts: dict[str, Part]) -> tuple[Label, str, float]:
    """Return the label, its unit, and its score on the test part."""
    validation, best = parts["validation"], {}
    for raising in (True, False):
        for by in ("token", "sentence"):
            able = [label for label in topics if not raising or validation.raises(label, by)]
            if able:
                best[by] = max(able, key=lambda label: validation.score(label, by))
        if best:
            break
    worth = {by: margin(by, validation.score(label, by)) for by, label in best.items()}
    for label in patterns(parts["train"]):
        value = margin("pattern", validation.score(label, "pattern")) - SHORTER * (len(label.items) - 1)
        true = label.true(validation.sample)[validation.sample.counted]
        is_shared = (true & validation.top).sum() >= OVERLAP * min(true.sum(), validation.top.sum())
        if is_shared and validation.raises(label, "pattern") and value > worth.get("pattern", -math.inf):
            best["pattern"], worth["pattern"] = label, value
    scores = {by: validation.score(label, by) for by, label in best.items()}
    passing = [by for by in scores if worth[by] >= 1]
    by = max(passing, key=scores.get) if passing else max(scores, key=lambda by: margin(by, scores[by]))
    return best[by], by, parts["test"].score(best[by], by)
