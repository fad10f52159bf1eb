"""Statistics of evaluations: means with standard errors, paired tests, AUROC, and metrics of curves and scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

SIGN_FLIPS = 10_000


@dataclass(frozen=True)
class Cell:
    """A method's number: mean over samples, its standard error, quartiles, and a test against the best method."""

    mean: float
    error: float | None
    """None for a single sample."""
    p: float | None
    """Two-sided, against the best method of the column (`paired_p`, `holm`); None for the best method."""
    median: float
    lower: float
    upper: float

    def text(self, about: str) -> str:
        """Return the text of the cell: medians where the column's text begins with "median"."""
        best = "" if self.p is not None else " *"
        if about.startswith("median"):
            return f"{self.median:.3f} [{self.lower:.2f}, {self.upper:.2f}]"
        return f"{self.mean:.3f}{'' if self.error is None else f' ± {self.error:.3f}'}{best}"


Cells = dict[str, dict[str, Cell | None]]
"""method -> column -> cell; None if the method cannot run."""


def table(samples: Sequence[dict[str, Any]], columns: Mapping[str, str], methods: Sequence[str]) -> Cells:
    """Return name -> column -> number; a column whose text ends in "lower is better" is best at its smallest mean."""
    cells: Cells = {name: dict.fromkeys(columns) for name in methods}
    able = [name for name in methods if samples and all(name in sample["methods"] for sample in samples)]
    if not able:
        return cells
    for column, about in columns.items():
        values = np.array([[sample["methods"][name][column] for sample in samples] for name in able])  # (M, S)
        means = values.mean(1)
        best = int((-means if about.endswith("lower is better") else means).argmax())
        others = [row for row in range(len(able)) if row != best]
        corrected = dict(zip(others, holm(paired_p(values[others] - values[best])), strict=True))
        for row, name in enumerate(able):
            quartiles = np.quantile(values[row], (0.5, 0.25, 0.75)).tolist()
            error = float(values[row].std(ddof=1) / len(samples) ** 0.5) if len(samples) > 1 else None
            cells[name][column] = Cell(float(means[row]), error, corrected.get(row), *quartiles)
    return cells


def paired_p(differences: np.ndarray) -> np.ndarray:
    """Return two-sided p values (M,) that the means of differences (M, S) over samples are zero, by random sign flips.

    The measurement itself counts as one of the flips, so p is never 0 (Phipson & Smyth 2010).
    """
    signs = np.random.default_rng(0).choice((-1.0, 1.0), (SIGN_FLIPS, differences.shape[1]))
    sums, measured = np.abs(signs @ differences.T), np.abs(differences.sum(1))
    return (1 + (sums >= measured * (1 - 1e-9)).sum(0)) / (1 + SIGN_FLIPS)


def holm(p: np.ndarray) -> list[float]:
    """Return p values corrected for their number (Holm 1979).

    The smallest counts n times, the next n - 1 times, and none is below its predecessor.
    """
    order = p.argsort()
    corrected = np.empty(len(p))
    corrected[order] = np.maximum.accumulate(np.minimum(1, p[order] * np.arange(len(p), 0, -1)))
    return corrected.tolist()


def auroc(scores: np.ndarray, positive: np.ndarray) -> float:
    """Return the probability that a positive has a larger score than a negative (ties count half); NaN without both."""
    _, rank, count = np.unique(scores, return_inverse=True, return_counts=True)
    positives = np.bincount(rank, positive, len(count))
    negatives = count - positives
    below = negatives.cumsum() - negatives
    total = positives.sum() * negatives.sum()
    return float((positives * (below + negatives / 2)).sum() / total) if total else math.nan


def auroc_error(value: float, positive: int, negative: int) -> float:
    """Return the standard error of an AUROC (Hanley & McNeil 1982)."""
    q1, q2 = value / (2 - value), 2 * value**2 / (1 + value)
    spread = value * (1 - value) + (positive - 1) * (q1 - value**2) + (negative - 1) * (q2 - value**2)
    return math.sqrt(max(spread, 0.0) / (positive * negative))


def auroc_by_chance(positive: int, negative: int) -> float:
    """Return the AUROC that random scores reach with a probability of at most about 0.05 (normal approximation of the
    Mann-Whitney U with continuity correction); it may pass 1, which no scores reach."""
    pairs = positive * negative
    return 0.5 + 1.645 * math.sqrt((positive + negative + 1) / (12 * pairs)) + 0.5 / pairs


def area(curve: ArrayLike, at: Sequence[float] | None = None) -> float:
    """Return the mean height of a curve (trapezoids) at these x values, by default equal steps."""
    heights = np.asarray(curve, dtype=float)
    x = np.linspace(0, 1, len(heights)) if at is None else np.asarray(at)
    return float(np.trapezoid(heights, x) / (x[-1] - x[0]))


def removal_metrics(most: ArrayLike, least: ArrayLike) -> dict[str, float]:
    """Return the metrics of two curves (S + 1, 2) of the answer's logit and probability while tokens are removed.

    most, least: with the most, or the least, relevant tokens removed first. To insert the most relevant first is to
    remove the least relevant first, read backwards: so Delta A^I = Delta A^F (AttnLRP B.2), and AUAC (PA-LRP,
    generation) is an area of a removal. AU-MSE is PA-LRP's of pruning; comprehensiveness and ERASER's sufficiency
    (DeYoung et al. 2020) are mean losses of probability over all shares but none and all.
    """
    (most_logit, most_p), (least_logit, least_p) = (np.asarray(curve, dtype=float).T for curve in (most, least))
    return {
        "delta_a": area(least_logit) - area(most_logit),
        "delta_p": area(least_p) - area(most_p),
        "auac": area(least_p),
        "au_mse": area((least_logit - least_logit[0]) ** 2),
        "compr": float((most_p[0] - most_p[1:-1]).mean()),
        "suff": float((least_p[0] - least_p[1:-1]).mean()),
    }


def localization_metrics(scores: Sequence[float], evidence: Sequence[int]) -> dict[str, float]:
    """Return how well the largest scores (T,) lie on the tokens that are the evidence.

    In ``mrr`` the evidence comes first among equal scores, in ``mrr_worst`` last. In ``pointing`` equal largest scores
    share the point. ``mass`` is the relevance mass accuracy of Arras et al. (2022); ``accuracy`` the relevance rank
    accuracy: the share of evidence among as many largest scores. ``pta`` and ``iou_positive`` take the tokens with
    positive scores for the evidence, as A Close Look (per-token accuracy) and AttnLRP (section 4.1) do.
    """
    values = np.asarray(scores, dtype=float)
    is_evidence = np.isin(np.arange(len(values)), evidence)
    best = values[is_evidence].max()
    above, ties = int((values > best).sum()), int((values[~is_evidence] == best).sum())
    positive = values.clip(min=0)
    accuracy = float(is_evidence[np.argsort(-values, kind="stable")[: len(evidence)]].mean())
    return {
        "pointing": float(is_evidence[values == values.max()].mean()),
        "mrr": 1 / (1 + above),
        "mrr_worst": 1 / (1 + above + ties),
        "mass": float(positive[is_evidence].sum() / positive.sum()) if positive.any() else 0.0,
        "accuracy": accuracy,
        "iou": accuracy / (2 - accuracy),
        "pta": float(((values > 0) == is_evidence).mean()),
        "iou_positive": float(((values > 0) & is_evidence).sum() / ((values > 0) | is_evidence).sum()),
    }


def clusters(similarities: np.ndarray, linkage: str, limit: float) -> list[int]:
    """Return the cluster of each of N >= 2 items, by agglomerative clustering of their cosine similarities (N, N).

    limit: the largest distance (1 - similarity) at which two clusters are joined.
    """
    from scipy.cluster import hierarchy  # the parts of scikit-learn that do the same take a second to import

    distances = (1 - similarities[np.triu_indices(len(similarities), 1)]).clip(min=0)
    return hierarchy.fcluster(hierarchy.linkage(distances, linkage), limit, "distance").tolist()
