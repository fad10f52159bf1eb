"""`find_concept`: find the few neurons that separate texts with a concept from texts without it.

Neurons are ranked on the training texts; how many of them are used is chosen on the validation texts. Vectors of the
residual stream are fitted on the same training texts, and their layer is chosen on the same validation texts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from icebear.concepts.passes.sites import by_site_layer
from icebear.concepts.statistics import auroc, auroc_error
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.steering.concept.concept import RANDOM, SHUFFLED, Concept, ControlDetector
from icebear.steering.concept.detectors import ConceptNeuron, ConceptVector, Fit
from icebear.steering.concept.reading import Read, neurons_of, read
from icebear.steering.concept.texts import ConceptTexts, prepared
from icebear.steps import OnProgress, unwatched
from icebear.values import check_int, seed_of, several, text_of, typed

SIZES = (1, 2, 3, 5, 7, 10, 14, 20, 30, 50, 70, 100)
CANDIDATES = 300
"""The logistic model chooses from this many neurons, the first of the ranking."""
PENALTIES = tuple(10 ** (step / 4) for step in range(-8, 5))
"""`C` of scikit-learn: the smaller, the fewer neurons."""
TOLERANCE = 0.01
"""The AUROC may fall by this much for fewer neurons."""
UNIVERSAL_NEURONS = 0.001
"""A universal neuron is among this share of the largest activations, in `UNIVERSAL_TEXTS` of all texts (CNA)."""
UNIVERSAL_TEXTS = 0.8
MAX_NEURONS = 20
RANDOM_SETS = 5


@dataclass(frozen=True, eq=False)
class Choice:
    """Columns and weights (of standardized activations) that detect a concept; their AUROC on the validation texts."""

    weighting: str
    """``means``: by the differences of means; ``logistic``: by a logistic model (``detector`` in a provenance)."""
    columns: np.ndarray
    weights: np.ndarray
    auroc: float

    def values(self, standardized: np.ndarray) -> np.ndarray:
        return standardized[:, self.columns] @ self.weights


def separation(x: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """(N,) differences of means. For neurons, x (S, N) is standardized by the texts without the concept."""
    return x[positive].mean(0) - x[~positive].mean(0)


def universal(values: np.ndarray) -> np.ndarray:
    """(N,) bool: the universal neurons, by activations (S, N) on texts without the concept (CNA, arXiv 2605.12290)."""
    size = np.abs(values)
    count = max(1, round(UNIVERSAL_NEURONS * values.shape[1]))
    bars = np.partition(size, -count, axis=1)[:, -count]
    return (size >= bars[:, None]).mean(0) >= UNIVERSAL_TEXTS


def choose(
    order: np.ndarray,
    weights: np.ndarray,
    train: tuple[np.ndarray, np.ndarray],
    validation: tuple[np.ndarray, np.ndarray],
    max_neurons: int,
    seed: int,
) -> tuple[Choice, list[Choice]]:
    """Return the smallest choice within `TOLERANCE` of the best AUROC on the validation texts, and all choices tried:
    the first neurons of the ranking with their weights, and L1-penalized logistic models over the first `CANDIDATES`.

    order: columns, the best first. train, validation: standardized activations (S, N), and which texts have the
    concept.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    tried = []
    for size in sorted({*SIZES, max_neurons}):
        if size <= min(max_neurons, len(order)):
            tried.append(("means", order[:size], weights[order[:size]]))
    candidates = order[:CANDIDATES]
    for penalty in PENALTIES:
        model = LogisticRegression(
            l1_ratio=1.0, C=penalty, solver="liblinear", class_weight="balanced", random_state=seed, max_iter=1000
        )
        with warnings.catch_warnings():  # one that has not converged is judged on the validation texts like the others
            warnings.simplefilter("ignore", ConvergenceWarning)
            coefficients = model.fit(train[0][:, candidates], train[1]).coef_[0]
        chosen = np.flatnonzero(coefficients)
        if 0 < len(chosen) <= max_neurons:
            tried.append(("logistic", candidates[chosen], coefficients[chosen]))
    x, positive = validation
    choices = [Choice(weighting, columns, w, auroc(x[:, columns] @ w, positive)) for weighting, columns, w in tried]
    bar = max(choice.auroc for choice in choices) - TOLERANCE
    near = [choice for choice in choices if choice.auroc >= bar]
    return min(near, key=lambda choice: (len(choice.columns), -choice.auroc)), choices


def ranked(x: np.ndarray, positive: np.ndarray, excluded: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return columns by the size of their difference of means, the largest first, without the excluded ones, and the
    differences (N,) as weights."""
    weights = separation(x, positive)
    order = np.argsort(-np.abs(weights), kind="stable")
    return order[~excluded[order]], weights


@typed
def find_concept(
    model: Model,
    examples: Sequence[str],
    others: Sequence[str],
    name: str = "concept",
    max_neurons: int = MAX_NEURONS,
    sites: Sequence[str] = ("ffn", "attn"),
    seed: int = 0,
    on_progress: OnProgress = unwatched,
) -> Concept:
    """Find the fewest neurons that separate `examples` from `others` nearly as well as the best set that is tried.

    Half of the texts of each kind rank neurons, by the difference of their mean activations; a quarter chooses how many
    and their weights, a quarter tests the result. The same parts fit two vectors of the residual stream, choose their
    layers, and test them.

    Parameters
    ----------
    model
        The model whose neurons are used.
    examples, others
        Texts with and without the concept, at least 16 of each.
    name
        The name of the concept.
    max_neurons
        The maximum number of neurons.
    sites
        The sites whose neurons are ranked.
    seed
        The seed of the split into training, validation and test texts.
    on_progress
        Called with (done, total) texts.

    Returns
    -------
    Concept
        Its `provenance` has the AUROC on the test texts with its standard error, the mean value of those with the
        concept and of those without it, and all sets that were tried.

    Raises
    ------
    InputError
        For too few texts, or a text of both kinds.

    References
    ----------
    Universal neurons: CNA, arXiv 2605.12290. Standard error of the AUROC: Hanley & McNeil 1982.
    """
    max_neurons, seed, sites = check_int(max_neurons, "The number of neurons"), seed_of(seed), several(sites)
    name = text_of(name)
    if not sites:
        raise InputError(f"A concept needs at least one site; choose from {', '.join(model.sites)}.")
    texts, positive, split = prepared(examples, others, seed)
    seen = read(model, texts, neurons_of(model, sites), on_progress)
    chosen = fitted(seen, positive, split, max_neurons, seed)
    count = int(positive.sum())  # the texts with it come first
    provenance = {**chosen.provenance, "sites": list(sites), "seed": seed, "made_with": model.made_with}
    found_in = ConceptTexts(tuple(texts[:count]), tuple(texts[count:]), seed)
    by_chance = fitted_controls(seen, positive, split, chosen, seed)
    return Concept(name, chosen.parts, model.name, model.fingerprint, provenance, chosen.vectors, found_in, by_chance)


def fitted_controls(
    seen: Read, positive: np.ndarray, split: np.ndarray, chosen: Fitted, seed: int
) -> tuple[ControlDetector, ...]:
    """Return detectors that are fitted like the chosen with the labels of the texts shuffled in each split, and sets of
    random neurons of the same layers, weighed by the same texts."""
    draw, labels = np.random.default_rng(seed), positive.copy()
    for number in range(3):
        rows = np.flatnonzero(split == number)
        labels[rows] = draw.permutation(labels[rows])
    shuffled = fitted(seen, labels, split, len(chosen.parts), seed)
    train, by_layer = np.flatnonzero(split == 0), by_site_layer(seen.neurons)
    x, center, spread = standardized(seen.means, positive, train)
    weights, safe = separation(x[train], positive[train]), np.where(spread > 0, spread, 1)
    layers = [by_layer[chosen_part.neuron.site, chosen_part.neuron.layer] for chosen_part in chosen.parts]
    sets = [np.array([draw.choice(columns) for columns in layers]) for _ in range(RANDOM_SETS)]
    random = [parts_of(seen, columns, weights[columns], center, safe) for columns in sets]
    return ControlDetector(SHUFFLED, shuffled.parts, shuffled.vectors), *(
        ControlDetector(RANDOM, row) for row in random
    )


@dataclass(frozen=True, eq=False)
class Fitted:
    """Detectors of a concept, fitted to some texts."""

    parts: tuple[ConceptNeuron, ...]
    vectors: tuple[ConceptVector, ...]
    provenance: dict[str, Any]


def fitted(seen: Read, positive: np.ndarray, split: np.ndarray, max_neurons: int, seed: int) -> Fitted:
    """Fit detectors to texts. positive: which texts (S,) have the concept. split: as of `prepared`."""
    train, validation, test = (np.flatnonzero(split == number) for number in range(3))
    without = train[~positive[train]]
    x, center, spread = standardized(seen.means, positive, train)
    everywhere = universal(seen.means[without])
    order, weights = ranked(x[train], positive[train], everywhere | (spread == 0))
    ranked_on, chosen_on = ((x[rows], positive[rows]) for rows in (train, validation))
    chosen, tried = choose(order, weights, ranked_on, chosen_on, max_neurons, seed)
    scale = float(chosen.values(x[without]).std()) or 1.0
    parts = parts_of(seen, chosen.columns, chosen.weights / scale, center, spread)
    values, is_example = chosen.values(x[test]), positive[test]
    score, means = auroc(values, is_example), [float(values[kind].mean()) / scale for kind in (is_example, ~is_example)]
    tested_on = [int(is_example.sum()), int((~is_example).sum())]
    provenance = {
        "found_by": "means",
        "detector": chosen.weighting,
        "auroc": score,
        "error": auroc_error(score, *tested_on),
        "tested_on": tested_on,
        "means": means,
        "path": [{"detector": c.weighting, "neurons": len(c.columns), "auroc": c.auroc} for c in tried],
        "universal": [str(seen.neurons[column]) for column in np.flatnonzero(everywhere)],
        "examples": int(positive.sum()),
        "others": int((~positive).sum()),
    }
    return Fitted(parts, vectors_of(seen.stream, positive, split), provenance)


def standardized(
    means: np.ndarray, positive: np.ndarray, train: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return activations (S, N) standardized over the training texts without the concept, and their means and
    standard deviations (N,). train: the rows of the training texts."""
    without = train[~positive[train]]
    center, spread = means[without].mean(0), means[without].std(0)
    spread = np.where(spread > 0, spread, means[train].std(0))  # of a neuron that is active with the concept only
    return (means - center) / np.where(spread > 0, spread, 1), center, spread


def vectors_of(stream: np.ndarray, positive: np.ndarray, split: np.ndarray) -> tuple[ConceptVector, ...]:
    """Return a vector of each fit, after the layer with the best AUROC on the validation texts.

    stream: means (S, L, D). positive: which texts have the concept. split: as of `prepared`.
    """
    train, validation, test = (split == number for number in range(3))
    fits: dict[Fit, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {"means": separation, "logistic": logistic}
    vectors = []
    for name, fit in fits.items():
        tried = [fit(stream[train, layer], positive[train]) for layer in range(stream.shape[1])]
        scores = [auroc(stream[validation, layer] @ vector, positive[validation]) for layer, vector in enumerate(tried)]
        layer = int(np.argmax(scores))
        values = stream[:, layer] @ tried[layer]
        without = values[train & ~positive]
        tested = auroc(values[test], positive[test])
        numbers = float(without.mean()), float(without.std()) or 1.0, tested
        vectors.append(ConceptVector(name, layer, tuple(float(f"{x:.7g}") for x in tried[layer]), *numbers))
    return tuple(vectors)


def logistic(x: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """Return the weights (D,) of a logistic model of x (S, D), in the units of x."""
    from sklearn.linear_model import LogisticRegression

    spread = x.std(0) + 1e-6
    model = LogisticRegression(C=0.01, class_weight="balanced", max_iter=2000)
    return model.fit((x - x.mean(0)) / spread, positive).coef_[0] / spread


def parts_of(
    seen: Read, columns: np.ndarray, weights: np.ndarray, center: np.ndarray, spread: np.ndarray
) -> tuple[ConceptNeuron, ...]:
    """Return the neurons of these columns with their weights, the largest first; center and spread (N,)."""
    parts = []
    for column, weight in zip(columns.tolist(), weights.tolist(), strict=True):
        polarity, end = ("+", seen.high) if weight > 0 else ("-", seen.low)
        numbers = (abs(weight), float(center[column]), float(spread[column]), float(end[column]))
        parts.append(ConceptNeuron(seen.neurons[column], polarity, *numbers))
    return tuple(sorted(parts, key=lambda part: -part.weight))
