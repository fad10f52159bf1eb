"""The numbers, from curves and scores alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np


def area(curve: Sequence[float]) -> float:
    """Under a curve over equal steps of the share of tokens, 0 to 1 (trapezoids)."""
    values = np.asarray(curve, dtype=float)
    return float((values[1:] + values[:-1]).mean() / 2)


def area_over(shares: Sequence[float], curve: Sequence[float]) -> float:
    """The same over unequal steps, as the mean height."""
    return float(np.trapezoid(curve, shares) / (shares[-1] - shares[0]))


def faithfulness(most: Sequence[float], least: Sequence[float]) -> float:
    """Delta A^F (AttnLRP B.2): area with the least relevant removed first, minus that with the most relevant first.

    Inserting most relevant first is removing least relevant first, read backwards: Delta A^I is the same number.
    """
    return area(least) - area(most)


def auac(least: Sequence[float]) -> float:
    """Area under the curve of the answer while tokens are inserted, most relevant first (PA-LRP, generation)."""
    return area(list(least)[::-1])


def au_mse(least: Sequence[float]) -> float:
    """Area under the squared change of the answer's logit while the least relevant are removed (PA-LRP, pruning)."""
    return area([(value - least[0]) ** 2 for value in least])


def comprehensiveness(most: Sequence[float]) -> float:
    """Mean loss of probability without the most relevant (DeYoung et al. 2020), over all shares but none and all."""
    return float(np.mean([most[0] - value for value in most[1:-1]]))


def sufficiency(least: Sequence[float]) -> float:
    """Mean loss of probability with the most relevant alone; smaller is better."""
    return float(np.mean([least[0] - value for value in least[1:-1]]))


# --- where the evidence is known ---

Ties = Literal["best", "worst"]


def reciprocal_rank(scores: Sequence[float], evidence: Sequence[int], ties: Ties = "best") -> float:
    """1 / rank of the first token of the evidence; of equal scores it comes first (``best``) or last (``worst``)."""
    values = np.asarray(scores, dtype=float)
    best = max(values[list(evidence)])
    above = int((values > best).sum())
    if ties == "worst":
        above += int((values == best).sum()) - int((values[list(evidence)] == best).sum())
    return 1 / (1 + above)


def pointing(scores: Sequence[float], evidence: Sequence[int]) -> float:
    """1 if the largest score is in the evidence (a tie shares it)."""
    values = np.asarray(scores, dtype=float)
    largest = np.flatnonzero(values == values.max())
    return float(np.isin(largest, list(evidence)).mean())


def mass_accuracy(scores: Sequence[float], evidence: Sequence[int]) -> float:
    """The evidence's share of all positive relevance (Arras et al. 2022)."""
    values = np.asarray(scores, dtype=float).clip(min=0)
    total = values.sum()
    return float(values[list(evidence)].sum() / total) if total > 0 else 0.0


def token_accuracy(scores: Sequence[float], evidence: Sequence[int]) -> float:
    """Of the |evidence| largest scores, the share that is evidence (relevance rank accuracy)."""
    order = np.argsort(-np.asarray(scores, dtype=float), kind="stable")[: len(evidence)]
    return float(np.isin(order, list(evidence)).mean())


def iou(scores: Sequence[float], evidence: Sequence[int]) -> float:
    """Intersection over union of the evidence and as many largest scores."""
    order = set(np.argsort(-np.asarray(scores, dtype=float), kind="stable")[: len(evidence)].tolist())
    return len(order & set(evidence)) / len(order | set(evidence))
