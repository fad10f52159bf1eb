"""How well labels predict activations, of many sides of neurons at once (after FADE, Puri et al. 2025)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from icebear.actmax.labels.kinds import FEWEST_TOKENS, TOP_SENTENCES, TOP_TOKENS, Label
from icebear.actmax.labels.sample import Sample
from icebear.concepts.statistics import auroc

SMOOTHING = 2.0
"""The number of pseudo-counts at the overall mean in the table of token means."""


@dataclass(frozen=True, eq=False)
class TopActivations:
    """P sides of neurons in a sample: their activations, the tokens with the largest ones, and the sentences with the
    largest means."""

    sample: Sample
    values: np.ndarray
    """(P, C) activations at the counted tokens; negated for polarity ``-``."""
    tokens: np.ndarray
    """(P, C) bool: which tokens are on top."""
    means: np.ndarray
    """(P, S) mean activation of each sentence."""
    sentences: np.ndarray
    """(P, S) bool: which sentences are on top."""

    @cached_property
    def active(self) -> np.ndarray:
        """(P,) whether enough tokens have an activation above zero."""
        return self.tokens.sum(1) >= FEWEST_TOKENS

    @cached_property
    def token_ranks(self) -> np.ndarray:
        """(P, C) the rank of each activation."""
        return mean_ranks(self.values)

    @cached_property
    def sentence_ranks(self) -> np.ndarray:
        """(P, S) the rank of each mean activation."""
        return mean_ranks(self.means)

    def at(self, rows: slice) -> TopActivations:
        """Return some of the sides."""
        parts = {name: getattr(self, name)[rows] for name in ("values", "tokens", "means", "sentences")}
        result = replace(self, **parts)
        if "token_ranks" in vars(self):
            vars(result)["token_ranks"] = self.token_ranks[rows]
        return result


def top_activations(sample: Sample, values: np.ndarray) -> TopActivations:
    """Return the activations of P sides at the counted tokens (P, C), with what is on top."""
    means = sample.means(values)
    wanted = max(FEWEST_TOKENS, math.ceil(TOP_TOKENS * values.shape[1]))
    tokens = largest(values, wanted) & (values > 0)
    # The mean of a sentence may be below zero although the neuron is active in it, so only the order counts.
    return TopActivations(sample, values, tokens, means, largest(means, math.ceil(TOP_SENTENCES * means.shape[1])))


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Return which are the `count` largest of each row (P, C); of equal values the first ones."""
    if count >= values.shape[1]:
        return np.ones(values.shape, dtype=bool)
    least = np.partition(values, -count, axis=1)[:, -count, None]
    above, equal = values > least, values == least
    left = count - above.sum(1, keepdims=True)
    if (equal.sum(1, keepdims=True) > left).any():
        equal &= equal.cumsum(1) <= left
    return above | equal


def mean_ranks(scores: np.ndarray) -> np.ndarray:
    """Return the rank of each score in its row (P, C), from 1; ties have their mean rank."""
    order = np.argsort(scores, axis=1, kind="stable")
    ordered = np.take_along_axis(scores, order, 1)
    new = np.ones(scores.shape, dtype=bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    starts = np.flatnonzero(new)  # of runs of equal scores; each row begins one
    lengths = np.diff(starts, append=new.size)
    ranks = np.repeat(starts % scores.shape[1] + (lengths + 1) / 2, lengths).reshape(scores.shape)
    result = np.empty_like(ranks)
    np.put_along_axis(result, order, ranks, 1)
    return result


# --- labels, for all sides -----------------------------------------------------------------------------------


class LabelTruth:
    """Where K labels are true in a sample."""

    def __init__(self, labels: Sequence[Label], sample: Sample) -> None:
        self.labels, self.sample = labels, sample

    @cached_property
    def tokens(self) -> np.ndarray:
        """(K, C) bool, of the counted tokens."""
        return np.array([label.true(self.sample)[self.sample.counted] for label in self.labels])

    @cached_property
    def sentences(self) -> np.ndarray:
        """(K, S) bool: the sentences with a token where the label is true."""
        return self.sample.means(self.tokens) > 0

    @cached_property
    def ranks(self) -> np.ndarray:
        """(K, S) the rank of each sentence by the degree of the label."""
        return mean_ranks(np.array([label.degree(self.sample) for label in self.labels]))


def label_truth(labels: Sequence[Label], sample: Sample) -> LabelTruth:
    """Return where labels are true; for topics, which all neurons share, it is computed once."""
    key = tuple(labels)
    if any(label.kind != "topic" for label in labels):
        return LabelTruth(key, sample)
    return sample.seen.setdefault(key, LabelTruth(key, sample))


def label_aurocs(labels: Sequence[Label], by: str, top: TopActivations) -> np.ndarray:
    """Return the AUROC (P, K) of each label for the top tokens or sentences of each side; by pattern, that of the
    activation for the tokens where a label is true, 0.5 where they are few. by: the unit."""
    truth = label_truth(labels, top.sample)
    if by == "pattern":
        return pattern_auroc(top.token_ranks @ truth.tokens.T.astype(float), truth.tokens.sum(1), truth.tokens.shape[1])
    if by == "token":
        hits = top.tokens.astype(np.float32) @ truth.tokens.T.astype(np.float32)  # counts, exact in float32
        return token_auroc(hits, truth.tokens.sum(1), top.tokens.sum(1, keepdims=True), top.tokens.shape[1])
    on_top, count = top.sentences.sum(1, keepdims=True), top.sentences.shape[1]
    below = top.sentences.astype(float) @ truth.ranks.T - on_top * (on_top + 1) / 2
    return below / (on_top * (count - on_top))


def token_auroc(hits: np.ndarray, true: np.ndarray, positive: np.ndarray, count: int) -> np.ndarray:
    """Return the AUROC of labels that are true at `hits` of the `positive` ones of `count` tokens, and at `true` of
    all."""
    return 0.5 + hits / positive.clip(1) / 2 - (true - hits.astype(float)) / (count - positive) / 2


def pattern_auroc(rank_sums: np.ndarray, true: np.ndarray, count: int) -> np.ndarray:
    """Return the AUROC of activations for the tokens where labels are true, of the sums of their ranks there."""
    aurocs = (rank_sums - true * (true + 1) / 2) / (true * (count - true)).clip(1)
    return np.where((true >= FEWEST_TOKENS) & (true < count), aurocs, 0.5)


def responding(labels: Sequence[Label], by: str, top: TopActivations) -> np.ndarray:
    """Return whether the activation of a side tends to be larger where a label is true (P, K). by: the unit."""
    truth = label_truth(labels, top.sample)
    true, ranks = (truth.sentences, top.sentence_ranks) if by == "sentence" else (truth.tokens, top.token_ranks)
    return tends_larger(ranks @ true.T.astype(float), true.sum(1), true.shape[1])


def tends_larger(rank_sums: np.ndarray, true: np.ndarray, count: int) -> np.ndarray:
    """Return whether activations are larger where a label is true, by the sum of their ranks there: U of Mann and
    Whitney."""
    return (true > 0) & (true < count) & (rank_sums - true * (true + 1) / 2 > true * (count - true) / 2)


def score(label: Label, by: str, top: TopActivations, row: int) -> float:
    """Return the AUROC (`label_aurocs`) of a label for the side in this row."""
    return float(label_aurocs([label], by, top.at(slice(row, row + 1)))[0, 0])


def token_mean_baseline(learned: Sequence[TopActivations], top: TopActivations, row: int, by: str) -> float:
    """Return the AUROC of a table of the mean activation of each token (the upper baseline).

    learned: the samples that the table is made from. by: the unit.
    """
    tokens = np.concatenate([part.sample.token[part.sample.counted] for part in learned])
    values = np.concatenate([part.values[row] for part in learned])
    sample, size = top.sample, len(top.sample.codes)
    sums, counts = np.bincount(tokens, values, size), np.bincount(tokens, minlength=size)
    means = (sums + SMOOTHING * values.mean()) / (counts + SMOOTHING)  # by token
    at = sample.token[sample.counted]
    if by == "sentence":
        return auroc(sample.means(means[None, at])[0], top.sentences[row])
    # Tokens of one code have one mean, so that codes are sorted, not tokens.
    positive, total = np.bincount(at[top.tokens[row]], minlength=size), sample.token_counts
    known = np.flatnonzero(total)
    _, order = np.unique(means[known], return_inverse=True)
    hits, rest = (np.bincount(order, number[known]) for number in (positive, total - positive))
    return float((hits * (rest.cumsum() - rest / 2)).sum() / (hits.sum() * rest.sum()))
