"""Choose the neurons, and how few, that tell texts with a concept from others, on texts that did not rank them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np

from icebear.concepts.statistics import auroc

SIZES = (1, 2, 3, 5, 7, 10, 14, 20, 30, 50, 70, 100)
CANDIDATES = 300
"""The logistic model chooses from this many neurons, the first of the ranking."""
PENALTIES = tuple(10 ** (step / 4) for step in range(-8, 5))
"""`C` of scikit-learn: the smaller, the fewer neurons."""
TOLERANCE = 0.01
"""The AUROC may fall by this much for fewer neurons."""
UNIVERSAL, EVERYWHERE = 0.001, 0.8
"""A universal neuron is among this share of the largest activations in this share of all texts (CNA)."""


@dataclass(frozen=True, eq=False)
class Choice:
    """Columns and weights (of standardized activations) that detect a concept; their AUROC on the validation texts."""

    detector: str
    columns: np.ndarray
    weights: np.ndarray
    auroc: float

    def values(self, standardized: np.ndarray) -> np.ndarray:
        return standardized[:, self.columns] @ self.weights


def separation(x: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """(N,) differences of means, in standard deviations of the others; x (S, N) is standardized by those."""
    return x[positive].mean(0) - x[~positive].mean(0)


def universal(values: np.ndarray) -> np.ndarray:
    """(N,) bool: the universal neurons, by activations (S, N) on texts without the concept (CNA, arXiv 2605.12290)."""
    size = np.abs(values)
    count = max(1, round(UNIVERSAL * values.shape[1]))
    bars = np.partition(size, -count, axis=1)[:, -count]
    return (size >= bars[:, None]).mean(0) >= EVERYWHERE


def choose(
    ranked: np.ndarray,
    weights: np.ndarray,
    learn: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    max_neurons: int,
    seed: int,
) -> tuple[Choice, list[Choice]]:
    """Return the smallest choice within `TOLERANCE` of the best AUROC on the validation texts, and all choices tried:
    the first neurons of the ranking with their weights, and L1-penalized logistic models over the first `CANDIDATES`.

    ranked: columns, the best first. learn, test: standardized activations (S, N), and which texts have the concept.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    tried = []
    for size in sorted({*SIZES, max_neurons}):
        if size <= min(max_neurons, len(ranked)):
            tried.append(("means", ranked[:size], weights[ranked[:size]]))
    candidates = ranked[:CANDIDATES]
    for penalty in PENALTIES:
        model = LogisticRegression(
            l1_ratio=1.0, C=penalty, solver="liblinear", class_weight="balanced", random_state=seed, max_iter=1000
        )
        with warnings.catch_warnings():  # one that has not converged is judged on the validation texts like the others
            warnings.simplefilter("ignore", ConvergenceWarning)
            coefficients = model.fit(learn[0][:, candidates], learn[1]).coef_[0]
        chosen = np.flatnonzero(coefficients)
        if 0 < len(chosen) <= max_neurons:
            tried.append(("logistic", candidates[chosen], coefficients[chosen]))
    choices = [
        Choice(detector, columns, own, auroc(test[0][:, columns] @ own, test[1])) for detector, columns, own in tried
    ]
    bar = max(choice.auroc for choice in choices) - TOLERANCE
    near = [choice for choice in choices if choice.auroc >= bar]
    return min(near, key=lambda choice: (len(choice.columns), -choice.auroc)), choices
