"""How well labels predict activations, and activations labels (after FADE, Puri et al. 2025), and the best label."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from icebear.actmax.labels.kinds import FEWEST, TOP_SENTENCES, TOP_TOKENS, Label, top
from icebear.actmax.labels.meanings import THRESHOLDS, margin
from icebear.actmax.labels.sample import PARTS, Sample
from icebear.concepts.statistics import auroc

SMOOTHING = 2.0
"""The number of pseudo-counts at the overall mean in the table of token means."""


@dataclass(frozen=True)
class TopActivations:
    """The tokens with the largest activations of a neuron at a polarity, and the sentences with the largest means."""

    sample: Sample
    values: np.ndarray
    """(N,) activations; negated for polarity ``-``."""
    tokens: np.ndarray
    """(C,) bool: which of the counted tokens are on top."""
    means: np.ndarray
    """(S,) mean activation of each sentence."""
    sentences: np.ndarray
    """(S,) bool: which sentences are on top."""

    @property
    def active(self) -> bool:
        """Whether enough tokens have an activation above zero."""
        return bool(self.tokens.sum() >= FEWEST)

    @cached_property
    def top_tokens(self) -> np.ndarray:
        """The places of the top tokens among the counted ones."""
        return np.flatnonzero(self.tokens)

    @cached_property
    def top_sentences(self) -> np.ndarray:
        return np.flatnonzero(self.sentences)

    @cached_property
    def token_ranks(self) -> np.ndarray:
        """(C,) the rank of the activation of each counted token."""
        return mean_ranks(self.values[self.sample.counted])

    @cached_property
    def sentence_ranks(self) -> np.ndarray:
        """(S,) the rank of the mean activation of each sentence."""
        return mean_ranks(self.means)


def mean_ranks(scores: np.ndarray) -> np.ndarray:
    """Return the rank of each score, from 1; ties have their mean rank."""
    _, inverse, count = np.unique(scores, return_inverse=True, return_counts=True)
    return (count.cumsum() - (count - 1) / 2)[inverse]


def top_activations(sample: Sample, values: np.ndarray) -> TopActivations:
    means = sample.means(values)
    tokens, sentences = np.zeros(len(sample), dtype=bool), np.zeros(len(means), dtype=bool)
    tokens[top(values, sample.counted, TOP_TOKENS)] = True
    # The mean of a sentence may be below zero although the neuron is active in it, so only the order counts.
    sentences[np.argsort(-means, kind="stable")[: math.ceil(TOP_SENTENCES * len(means))]] = True
    return TopActivations(sample, values, tokens[sample.counted], means, sentences)


def label_truth(label: Label, sample: Sample) -> tuple[np.ndarray, int, np.ndarray]:
    """Return at which counted tokens a label is true (C,), their number, and the rank (S,) of each sentence by the
    degree of the label; ties have their mean rank."""
    if label not in sample.seen:
        true = label.true(sample)[sample.counted]
        sample.seen[label] = true, int(true.sum()), mean_ranks(label.degree(sample))
    return sample.seen[label]


def label_auroc(label: Label, fired: TopActivations) -> dict[str, float]:
    """Return, for each unit, the AUROC of the label for the top tokens or sentences."""
    true, count, ranks = label_truth(label, fired.sample)
    hits, positive, tokens = np.count_nonzero(true[fired.top_tokens]), len(fired.top_tokens), len(fired.tokens)
    top_count, sentences = len(fired.top_sentences), len(fired.sentences)
    below = ranks[fired.top_sentences].sum() - top_count * (top_count + 1) / 2
    return {
        "token": float(0.5 + hits / positive / 2 - (count - hits) / (tokens - positive) / 2),
        "sentence": float(below / (top_count * (sentences - top_count))),
    }


def responds(label: Label, fired: TopActivations, unit: str) -> bool:
    """Return whether the activation tends to be larger where the label is true."""
    sample, (positive, _, _) = fired.sample, label_truth(label, fired.sample)
    if unit == "sentence":
        positive = np.bincount(sample.sentence[sample.counted], positive, len(fired.means)) > 0
    ranks, count = fired.token_ranks if unit == "token" else fired.sentence_ranks, np.count_nonzero(positive)
    # The sum of ranks is U of Mann and Whitney: the AUROC without sorting the activations for each label.
    above = ranks[positive].sum() - count * (count + 1) / 2
    return bool(0 < count < len(positive)) and bool(above > count * (len(positive) - count) / 2)


def token_mean_baseline(learnt: Sequence[TopActivations], fired: TopActivations) -> dict[str, float]:
    """Return, for each unit, the AUROC of a table of the mean activation of each token (the upper baseline).

    learnt: the samples that the table is made from.
    """
    tokens = np.concatenate([part.sample.token[part.sample.counted] for part in learnt])
    values = np.concatenate([part.values[part.sample.counted] for part in learnt])
    sample, size = fired.sample, len(fired.sample.codes)
    sums, counts = np.bincount(tokens, values, size), np.bincount(tokens, minlength=size)
    means = ((sums + SMOOTHING * values.mean()) / (counts + SMOOTHING))[sample.token]
    return {
        "token": auroc(means[sample.counted], fired.tokens),
        "sentence": auroc(sample.means(means), fired.sentences),
    }


@dataclass(frozen=True)
class Chosen:
    """A label, the unit of its score, and its score on each part."""

    label: Label
    by: str
    train: float
    validation: float
    test: float

    @property
    def margin(self) -> float:
        return margin(self.by, self.test)


def choose_label(labels: Sequence[Label], fired: dict[str, TopActivations]) -> Chosen:
    """Return the label with the best score on the validation part.

    Candidates are the best label by token and the best label by sentence. If one passes its threshold, the higher score
    wins; else the larger margin does.
    """
    validation = fired["validation"]
    return better_of(best_of(labels, validation) or best_of(labels, validation, responding=False), fired)


def better_of(candidates: dict[str, tuple[Label, float]], fired: dict[str, TopActivations]) -> Chosen:
    passing = [by for by, (_, worth) in candidates.items() if worth >= 1]
    able = [score_parts(candidates[by][0], by, fired) for by in passing or candidates]
    return max(able, key=lambda choice: choice.validation if passing else margin(choice.by, choice.validation))


def best_of(labels: Sequence[Label], fired: TopActivations, responding: bool = True) -> dict[str, tuple[Label, float]]:
    """Return, for each unit, the best label and its margin.

    responding: consider only labels that raise the activation. The first label wins a tie.
    """
    best = {}
    detected = [label_auroc(label, fired) for label in labels]
    for by in THRESHOLDS:
        worth = [margin(by, score[by]) for score in detected]
        for index in sorted(range(len(labels)), key=lambda index: -worth[index]):
            if not responding or responds(labels[index], fired, by):
                best[by] = labels[index], worth[index]
                break
    return best


def score_parts(label: Label, by: str, fired: dict[str, TopActivations]) -> Chosen:
    return Chosen(label, by, *(label_auroc(label, fired[part])[by] for part in PARTS))
