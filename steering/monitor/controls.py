"""What a monitor is compared with, on held-out texts and under shift: a bag of words, random neurons, shuffled labels.

Each control learns from the texts that the concept learned from, and gets its threshold from the same negatives as the
monitor, so that all have the same expected false positive rate.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from icebear.concepts.statistics import auroc
from icebear.models.model import Model
from icebear.steering.concept.concept import RANDOM, SHUFFLED, Concept
from icebear.steering.concept.detectors import ConceptVector, Detector
from icebear.steering.concept.finding import RANDOM_SETS
from icebear.steering.concept.texts import ConceptTexts, prepared
from icebear.steering.monitor.monitor import BAG, HELD_OUT, Monitor, Rate
from icebear.steering.monitor.text_values import text_values, threshold_of
from icebear.steps import OnProgress

LONGER = "five times longer"
KEYWORDS = 20
"""The words with the largest weights in the bag of words, which are removed."""
TEXTS_JOINED = 5
LONG_TEXTS = 30
"""Of each kind at most, because each takes as long as five."""

Texts = tuple[list[str], list[str]]
"""Texts with and without the concept."""


Shifts = Mapping[str, tuple[Sequence[str], Sequence[str]]]
"""Name -> texts with and without the concept, of another kind than those that found it."""
Scored = Sequence[tuple[str, Detector, np.ndarray]]
"""Detectors with their names and their values of the negatives; the monitor's own first."""


def with_rates(
    model: Model,
    monitor: Monitor,
    concept_texts: ConceptTexts,
    scored: Scored,
    negatives: list[str],
    shifts: Shifts,
    on_progress: OnProgress,
) -> Monitor:
    """Return the monitor with its rates, and those of the controls."""
    texts, positive, split = prepared(concept_texts.examples, concept_texts.others, concept_texts.seed)
    bag = BagOfWords.fit([texts[row] for row in np.flatnonzero(split < 2)], positive[split < 2])
    removed = bag.keywords()
    with_it, without = map(list, concept_texts.tests())
    cut = without_words(with_it, removed), without_words(without, removed)
    rows: dict[str, Texts] = {
        HELD_OUT: (with_it, without),
        LONGER: longer(with_it, without),
        **({"without keywords": cut} if all(cut) else {}),
        **{name: (list(examples), list(others)) for name, (examples, others) in shifts.items()},
    }
    names, detectors, known = zip(*scored, strict=True)
    bars = [threshold_of(scores, monitor.fpr)[0] for scores in (*known, bag(negatives))]
    every = [text for pair in rows.values() for texts in pair for text in texts]
    values = [*text_values(model, detectors, every, monitor.unit, on_progress), bag(every)]
    rates, start = [], 0
    for name, (examples, others) in rows.items():
        counts = len(examples), len(others)
        each = [scores[start : start + sum(counts)] for scores in values]
        rates += averaged(name, list(zip((*names, BAG), each, bars, strict=True)), *counts)
        start += sum(counts)
    provenance = {**monitor.provenance, "keywords": removed}
    return replace(monitor, rates=tuple(rates), provenance=provenance, held_out=concept_texts.tests())


def control_detectors(concept: Concept, detector: Detector) -> list[tuple[str, Detector]]:
    """Return the controls of this kind of detector. Random vectors are after the same layer."""
    if not isinstance(detector, ConceptVector):
        return [(control.name, control.parts) for control in concept.controls if control.parts]
    draw = np.random.default_rng(0)
    shuffled = [
        (SHUFFLED, vector) for control in concept.controls for vector in control.vectors if vector.fit == detector.fit
    ]
    vectors = [tuple(draw.standard_normal(len(detector.vector)).tolist()) for _ in range(RANDOM_SETS)]
    return [*shuffled, *((RANDOM, replace(detector, vector=vector, mean=0.0, std=1.0)) for vector in vectors)]


def averaged(texts: str, scored: Sequence[tuple[str, np.ndarray, float]], positives: int, negatives: int) -> list[Rate]:
    """Return the rates of detectors, given as (name, values (S,), threshold); those of the same name are averaged."""
    by_name: dict[str, list[tuple[float, float, float]]] = {}
    with_it = np.arange(positives + negatives) < positives
    for name, values, bar in scored:
        flagged = values > bar
        numbers = float(flagged[with_it].mean()), float(flagged[~with_it].mean()), auroc(values, with_it)
        by_name.setdefault(name, []).append(numbers)
    means = {name: np.mean(rows, 0).tolist() for name, rows in by_name.items()}
    return [Rate(texts, name, tpr, fpr, area, positives, negatives) for name, (tpr, fpr, area) in means.items()]


def longer(with_it: list[str], without: list[str]) -> Texts:
    """Return each text with the concept among four without it, in random order, and five without it."""
    draw = np.random.default_rng(0)

    def joined(texts: list[str]) -> str:
        others = draw.choice(without, TEXTS_JOINED - len(texts)).tolist()
        return " ".join(draw.permutation([*texts, *others]))

    return [joined([text]) for text in with_it[:LONG_TEXTS]], [joined([]) for _ in without[:LONG_TEXTS]]


def without_words(texts: Sequence[str], words: Sequence[str]) -> list[str]:
    """Return the texts without these words; texts left with one word or none are dropped."""
    word = re.compile(rf"\b({'|'.join(map(re.escape, words))})\b", re.IGNORECASE)
    cut = [word.sub("", text) for text in texts]
    return [text for text in cut if len(text.split()) > 1]


@dataclass(frozen=True, eq=False)
class BagOfWords:
    """A logistic model of the words of a text (TF-IDF)."""

    vectorizer: Any
    model: Any

    @classmethod
    def fit(cls, texts: Sequence[str], positive: np.ndarray) -> BagOfWords:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression

        vectorizer = TfidfVectorizer(sublinear_tf=True)
        x = vectorizer.fit_transform(texts)
        return cls(vectorizer, LogisticRegression(C=10, class_weight="balanced", max_iter=2000).fit(x, positive))

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        return self.model.decision_function(self.vectorizer.transform(texts))

    def keywords(self) -> list[str]:
        """Return the words that speak most for the concept."""
        weights = self.model.coef_[0]
        names = self.vectorizer.get_feature_names_out()
        return [str(names[row]) for row in np.argsort(-weights)[:KEYWORDS] if weights[row] > 0]
