"""Statistics of evaluations: means with standard errors, paired tests, AUROC."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RESAMPLES = 10_000


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


def table(
    samples: Sequence[dict[str, Any]], columns: Mapping[str, str], methods: Sequence[str], seed: int = 0
) -> Cells:
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
        corrected = dict(zip(others, holm(paired_p(values[others] - values[best], seed)), strict=True))
        for row, name in enumerate(able):
            quartiles = np.quantile(values[row], (0.5, 0.25, 0.75)).tolist()
            error = float(values[row].std(ddof=1) / len(samples) ** 0.5) if len(samples) > 1 else None
            cells[name][column] = Cell(float(means[row]), error, corrected.get(row), *quartiles)
    return cells


def paired_p(differences: np.ndarray, seed: int = 0) -> np.ndarray:
    """Return two-sided p values (M,) that the means of differences (M, S) over samples are zero, by random sign flips.

    The measurement itself counts as one of the flips, so p is never 0 (Phipson & Smyth 2010).
    """
    signs = np.random.default_rng(seed).choice((-1.0, 1.0), (RESAMPLES, differences.shape[1]))
    sums, measured = np.abs(signs @ differences.T), np.abs(differences.sum(1))
    return (1 + (sums >= measured * (1 - 1e-9)).sum(0)) / (1 + RESAMPLES)


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
    _, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    positives = np.bincount(place, positive, len(count))
    negatives = count - positives
    below = negatives.cumsum() - negatives
    total = positives.sum() * negatives.sum()
    return float((positives * (below + negatives / 2)).sum() / total) if total else math.nan


def auroc_error(value: float, positive: int, negative: int) -> float:
    """Return the standard error of an AUROC (Hanley & McNeil 1982)."""
    one, two = value / (2 - value), 2 * value**2 / (1 + value)
    spread = value * (1 - value) + (positive - 1) * (one - value**2) + (negative - 1) * (two - value**2)
    return math.sqrt(max(spread, 0.0) / (positive * negative))
