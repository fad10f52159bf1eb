"""The value of a text to a detector, and the threshold that few texts pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from icebear.concepts.answers.units import units_of
from icebear.models.model import Model
from icebear.steering.concept.detectors import Detector, contributions
from icebear.steering.concept.reading import require_counted_positions
from icebear.steps import OnProgress, unwatched

Unit = Literal["sentence", "token", "message"]
UNITS = ("sentence", "token", "message")
"""What the value of a text is the largest of."""


def unit_values(
    pieces: Sequence[str], values: np.ndarray, counted: np.ndarray, unit: str
) -> list[tuple[int, int, float]]:
    """Return (start, stop, mean of the values (T,) that count) of each unit of a text in which a token counts."""
    spans = [(part.start, part.stop) for part in units_of(pieces, (), None, unit)]
    return [
        (start, stop, float(values[start:stop][counted[start:stop]].mean()))
        for start, stop in spans
        if counted[start:stop].any()
    ]


def interval(events: int, trials: int) -> tuple[float, float]:
    """Return the exact 95 % interval of a rate (Clopper and Pearson 1934)."""
    from scipy.stats import binomtest

    low, high = binomtest(events, trials).proportion_ci(0.95, "exact")
    return float(low), float(high)


def threshold_of(scores: np.ndarray, fpr: float) -> tuple[float, int]:
    """Return a threshold that at most `fpr` of texts like those with these values passes, and how many of these do."""
    allowed = max(0, math.floor(fpr * (len(scores) + 1) + 1e-9) - 1)
    threshold = float(np.sort(scores)[::-1][allowed])
    return threshold, int((scores > threshold).sum())


def text_values(
    model: Model, detectors: Sequence[Detector], texts: Sequence[str], unit: str, on_progress: OnProgress = unwatched
) -> np.ndarray:
    """Return the values (detectors, texts): the largest mean of a unit of what the model can read of a text."""
    rows = [model.token_ids(text, model.context_length) for text in texts]
    counted = [np.isin(np.arange(len(ids)), require_counted_positions(model, ids)) for ids in rows]
    pieces = [model.pieces(ids) for ids in rows]
    every = contributions(model, detectors, rows, on_progress)

    def largest(row: int, parts: np.ndarray) -> float:
        return max(value for *_, value in unit_values(pieces[row], parts.sum(1, dtype=np.float64), counted[row], unit))

    return np.array([[largest(row, parts) for row, parts in enumerate(of)] for of in every])
