"""Metrics of token scores, from curves and scores alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas
from numpy.typing import ArrayLike


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


def correlations(scores: pandas.Series[float], effects: pandas.Series[float]) -> dict[str, float]:
    """Return the correlations of values and of ranks."""
    return {"pearson": scores.corr(effects), "spearman": scores.rank().corr(effects.rank())}


def localization_metrics(scores: Sequence[float], evidence: Sequence[int]) -> dict[str, float]:
    """Return how well the largest scores (T,) lie on the tokens that are the evidence.

    In ``mrr`` the evidence comes first among equal scores, in ``mrr_worst`` last. In ``pointing`` equal largest scores
    share the point. ``mass`` is the relevance mass accuracy of Arras et al. (2022); ``accuracy`` the relevance rank
    accuracy: the share of evidence among as many largest scores.
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
    }
