"""How well a label tells where a neuron fires, and the other way round (after FADE, Puri et al. 2025); which
label predicts best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from icebear.actmax.labels import kinds
from icebear.actmax.labels.evidence import FEWEST, SENTENCES, TOKENS, top
from icebear.actmax.labels.kinds import Label
from icebear.actmax.labels.sample import PARTS, Sample
from icebear.concepts.statistics import auroc
from icebear.records import Meaning

UNITS = ("token", "sentence")
THRESHOLDS = {"token": 0.85, "sentence": 0.70}
"""Detection from which on a label may be called clear."""
SHORTER = 0.01
"""What an item of a label has to add, of the way from chance to the bar."""
SMOOTHING = 2.0
"""Tokens of the mean that a table of tokens begins with."""


def average_precision(scores: np.ndarray, positive: np.ndarray) -> float:
    """The mean precision at each of the positive, the largest score first (ties in order of place)."""
    hits = positive[np.argsort(-scores, kind="stable")].astype(bool)
    ranks = np.flatnonzero(hits) + 1
    return float((np.arange(1, len(ranks) + 1) / ranks).mean()) if len(ranks) else math.nan


@dataclass(frozen=True)
class Fires:
    """Where a neuron at a polarity is furthest in a sample: the top of its tokens, and of its sentences by mean."""

    sample: Sample
    values: np.ndarray
    """(N,), of polarity ``-`` negated."""
    tokens: np.ndarray
    """(C,) bool, of the tokens that count."""
    means: np.ndarray
    """(S,)"""
    sentences: np.ndarray
    """(S,) bool"""

    @property
    def active(self) -> bool:
        """Whether enough tokens have a value above zero."""
        return self.tokens.sum() >= FEWEST


def fires(sample: Sample, values: np.ndarray) -> Fires:
    means = sample.means(values)
    tokens, sentences = np.zeros(len(sample), dtype=bool), np.zeros(len(means), dtype=bool)
    tokens[top(values, sample.counted, TOKENS)] = True
    # A sentence's mean may be below zero wherever the neuron fires; what counts is which are furthest.
    sentences[np.argsort(-means, kind="stable")[: math.ceil(SENTENCES * len(means))]] = True
    return Fires(sample, values, tokens[sample.counted], means, sentences)


@dataclass(frozen=True)
class LabelTruth:
    """What a label says of a sample."""

    true: np.ndarray
    """(C,) bool, of the tokens that count, and"""
    often: int
    """how many these are."""
    ranks: np.ndarray
    """(S,) of its degree in each sentence, among them; the mean of equal ones."""


def seen(label: Label, sample: Sample) -> LabelTruth:
    """Kept where all neurons have the same candidates."""
    if label in sample.seen:
        return sample.seen[label]
    true = kinds.true(label, sample)[sample.counted]
    _, place, count = np.unique(kinds.degree(label, sample), return_inverse=True, return_counts=True)
    truth = LabelTruth(true, int(true.sum()), (count.cumsum() - (count - 1) / 2)[place])
    if not kinds.of(label).depends_on_neuron:
        sample.seen[label] = truth
    return truth


def label_auroc(label: Label, fired: Fires) -> dict[str, float]:
    """unit -> AUROC of the label for what drives the neuron furthest (by token of yes or no, by sentence by ranks)."""
    truth = seen(label, fired.sample)
    hits, positive, tokens = truth.true[fired.tokens].sum(), fired.tokens.sum(), len(fired.tokens)
    first, sentences = fired.sentences.sum(), len(fired.sentences)
    below = truth.ranks[fired.sentences].sum() - first * (first + 1) / 2
    return {
        "token": float(0.5 + hits / positive / 2 - (truth.often - hits) / (tokens - positive) / 2),
        "sentence": float(below / (first * (sentences - first))),
    }


def margin(unit: str, score: float) -> float:
    """Of the way from chance to the bar of its unit."""
    return (score - 0.5) / (THRESHOLDS[unit] - 0.5)


def responsiveness(label: Label, fired: Fires, unit: str) -> dict[str, float | None]:
    """Of the texts where the label is true: AUROC of the activation for them, its average precision (FADE's purity),
    and their share."""
    values, positive = _answers(label, fired, unit)
    able = 0 < positive.sum() < len(positive)
    return {
        "responsiveness": auroc(values, positive) if able else None,
        "purity": average_precision(values, positive) if able else None,
        "share": float(positive.mean()),
    }


def responds(label: Label, fired: Fires, unit: str) -> bool:
    """Whether the activation is rather larger where the label is true."""
    values, positive = _answers(label, fired, unit)
    return bool(0 < positive.sum() < len(positive)) and auroc(values, positive) > 0.5


def _answers(label: Label, fired: Fires, unit: str) -> tuple[np.ndarray, np.ndarray]:
    """Activations of the tokens that count, or means of sentences, and where the label is true."""
    sample, true = fired.sample, seen(label, fired.sample).true
    if unit == "token":
        return fired.values[sample.counted], true
    return fired.means, np.bincount(sample.sentence[sample.counted], true, len(fired.means)) > 0


def token_mean_baseline(learnt: Sequence[Fires], fired: Fires) -> dict[str, float]:
    """unit -> detection by the neuron's mean activation at each token, learnt on other samples: the bar to pass."""
    tokens = np.concatenate([one.sample.token[one.sample.counted] for one in learnt])
    values = np.concatenate([one.values[one.sample.counted] for one in learnt])
    sample, size = fired.sample, len(fired.sample.codes.tokens)
    sums, counts = np.bincount(tokens, values, size), np.bincount(tokens, minlength=size)
    means = ((sums + SMOOTHING * values.mean()) / (counts + SMOOTHING))[sample.token]
    return {
        "token": auroc(means[sample.counted], fired.tokens),
        "sentence": auroc(sample.means(means), fired.sentences),
    }


def similar_sentences_auroc(label: Label, fired: Fires, unit: str) -> float | None:
    """Detection against the sentences most like those that drive the neuron, which do not; None without any."""
    sample = fired.sample
    driven = np.zeros(len(fired.means), dtype=bool)
    driven[sample.sentence[sample.counted][fired.tokens]] = True
    driving = driven if unit == "token" else fired.sentences
    idle = ~driven & (fired.means < np.median(fired.means)) & ~fired.sentences
    if not idle.any() or not driving.any():
        return None
    order = np.argsort(-sample.alike[driving][:, idle], axis=1, kind="stable")[:, :NEAREST]
    likest = np.unique(np.flatnonzero(idle)[order])
    if unit == "token":
        true = kinds.true(label, sample)[sample.counted]
        among = fired.tokens | np.isin(sample.sentence[sample.counted], likest)
        return auroc(true[among], fired.tokens[among])
    among = np.union1d(np.flatnonzero(driving), likest)
    return auroc(kinds.degree(label, sample)[among], driving[among])


NEAREST = 3
"""Sentences taken for each that drives the neuron."""


@dataclass(frozen=True)
class Chosen:
    """A candidate, by what it is judged, and its score on each part."""

    label: Label
    by: str
    train: float
    validation: float
    test: float

    @property
    def margin(self) -> float:
        return margin(self.by, self.test)


def choose_label(labels: Sequence[Label], fired: dict[str, Fires]) -> Chosen:
    """The label that does best on the validation part: the best one by token or the best one by sentence, whichever
    has the higher score of those that pass their bar, or comes nearest to it."""
    validation = fired["validation"]
    return the_better(best_of(labels, validation) or best_of(labels, validation, responding=False), fired)


def the_better(candidates: dict[str, tuple[Label, float]], fired: dict[str, Fires]) -> Chosen:
    passing = [by for by, (_, worth) in candidates.items() if worth >= 1]
    able = [judged(candidates[by][0], by, fired) for by in passing or candidates]
    return max(able, key=lambda one: one.validation if passing else margin(one.by, one.validation))


def best_of(labels: Sequence[Label], fired: Fires, responding: bool = True) -> dict[str, tuple[Label, float]]:
    """unit -> the best of some labels by it, the first of equal ones, of those that the neuron also responds to; and
    how far it comes from chance to the bar, less `SHORTER` for each item but the first."""
    best = {}
    detected = [(label, label_auroc(label, fired)) for label in labels]
    for by in UNITS:
        worth = [margin(by, score[by]) - SHORTER * (len(label.items) - 1) for label, score in detected]
        for place in sorted(range(len(labels)), key=lambda place: -worth[place]):
            if not responding or responds(labels[place], fired, by):
                best[by] = labels[place], worth[place]
                break
    return best


def judged(label: Label, by: str, fired: dict[str, Fires]) -> Chosen:
    return Chosen(label, by, *(label_auroc(label, fired[part])[by] for part in PARTS))


def accepted(p: Sequence[float], rate: float = 0.05) -> list[bool]:
    """Which of many hold when at most this rate of them may be false (Benjamini & Hochberg 1995)."""
    values = np.array(p, dtype=float)
    order = values.argsort()
    under = np.flatnonzero(values[order] <= rate * np.arange(1, len(values) + 1) / max(len(values), 1))
    accepted = np.zeros(len(values), dtype=bool)
    accepted[order[: under[-1] + 1 if len(under) else 0]] = True
    return accepted.tolist()


def clearest(meanings: Iterable[Meaning]) -> list[Meaning]:
    """The significant ones among all that were tried (Benjamini-Hochberg at 5 %), those above their bar and nulls by
    most first."""
    tried = list(meanings)
    holding = [m for m, holds in zip(tried, accepted([m.p for m in tried]), strict=True) if holds and m.significant]
    return sorted(holding, key=lambda m: (-margin(m.by, m.score), m.neuron, m.polarity))
