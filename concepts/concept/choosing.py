"""Which neurons, and how few, tell texts with a concept from others: chosen on texts that they were not ranked on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from icebear.concepts.statistics import auroc
from icebear.extras import need

SIZES = (1, 2, 3, 5, 7, 10, 14, 20, 30, 50, 70, 100)
CANDIDATES = 300
"""Neurons, the first of the ranking, that the logistic model may choose from."""
PENALTIES = tuple(10 ** (step / 4) for step in range(-8, 5))
"""`C` of scikit-learn: the smaller, the fewer neurons."""
NEARLY = 0.01
"""What an AUROC may lose for fewer neurons."""
UNIVERSAL, EVERYWHERE = 0.001, 0.8
"""A universal neuron is among this share of the largest activations in this share of all texts (CNA)."""


@dataclass(frozen=True, eq=False)
class Choice:
    """Columns and weights that detect a concept."""

    way: str
    columns: np.ndarray
    weights: np.ndarray
    """Of standardised activations."""
    auroc: float
    """On the texts that it was chosen on."""

    def values(self, standardised: np.ndarray) -> np.ndarray:
        return standardised[:, self.columns] @ self.weights


@dataclass(frozen=True)
class Step:
    """A set that was tried: a row of the path."""

    way: str
    neurons: int
    auroc: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def separation(x: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """(N,) differences of means in standard deviations of the others; x (S, N) standardised by those."""
    return x[positive].mean(0) - x[~positive].mean(0)


def universal(values: np.ndarray) -> np.ndarray:
    """(N,) bool, of activations (S, N) over texts without the concept (CNA, arXiv 2605.12290)."""
    size = np.abs(values)
    count = max(1, round(UNIVERSAL * values.shape[1]))
    bars = np.partition(size, -count, axis=1)[:, -count]
    return (size >= bars[:, None]).mean(0) >= EVERYWHERE


def choose(
    ranked: np.ndarray,
    weights: np.ndarray,
    learn: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    most: int,
    seed: int,
) -> tuple[Choice, list[Step]]:
    """The fewest neurons, at most `most`, that come within `NEARLY` of the best AUROC on the test texts; and what was
    tried: the first of a ranking with their weights, and sparse logistic models over the first `CANDIDATES`.

    ranked: columns, the first first. learn, test: standardised activations (S, N), and which texts have the concept.
    """
    able = [
        *_first(ranked, weights, test, most),
        *(found for found in _sparse(ranked[:CANDIDATES], learn, test, seed) if len(found.columns) <= most),
    ]
    best = max(found.auroc for found in able)
    near = [found for found in able if found.auroc >= best - NEARLY]
    chosen = min(near, key=lambda found: (len(found.columns), -found.auroc))
    return chosen, [Step(found.way, len(found.columns), found.auroc) for found in able]


def _first(ranked: np.ndarray, weights: np.ndarray, test: tuple[np.ndarray, np.ndarray], most: int) -> list[Choice]:
    found = []
    for size in sorted({*(size for size in SIZES if size <= most), most}):
        columns = ranked[:size]
        if len(columns) == size:
            values = test[0][:, columns] @ weights[columns]
            found.append(Choice("means", columns, weights[columns], auroc(values, test[1])))
    return found


def _sparse(
    candidates: np.ndarray, learn: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray], seed: int
) -> list[Choice]:
    """Logistic regression with an L1 penalty, from few neurons to many."""
    need("circuits")
    from sklearn.linear_model import LogisticRegression

    found = []
    for penalty in PENALTIES:
        model = LogisticRegression(
            l1_ratio=1.0, C=penalty, solver="liblinear", class_weight="balanced", random_state=seed, max_iter=1000
        )
        weights = model.fit(learn[0][:, candidates], learn[1]).coef_[0]
        chosen = np.flatnonzero(weights)
        if len(chosen):
            columns = candidates[chosen]
            values = test[0][:, columns] @ weights[chosen]
            found.append(Choice("logistic", columns, weights[chosen], auroc(values, test[1])))
    return found
