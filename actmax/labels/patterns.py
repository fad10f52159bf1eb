"""Token patterns of many sides at once: which tokens stand where a neuron is most active, before, or after it.

They are made on the train documents: the most distinctive tokens of each step, and then the first few of them. Scores
are sums by token, so no candidate is looked for in a text.
"""

from __future__ import annotations

import numpy as np

from icebear.actmax.labels.kinds import TOKEN_OFFSETS, Label, LabelKind
from icebear.actmax.labels.sample import DISTINCT, Sample, distinction
from icebear.actmax.labels.scores import TopActivations, pattern_auroc, tends_larger
from icebear.actmax.labels.significance import margin

SIZES = (1, 2, 3, 5)
"""The numbers of tokens of a pattern."""
SHORTER = 0.03
"""The margin that each token of a pattern after the first must add."""
OVERLAP = 0.2
"""The smallest share of its tokens, or of the tokens with the largest activations if these are fewer, that are both."""


def best_patterns(train: TopActivations, validation: TopActivations) -> list[tuple[Label, float] | None]:
    """Return the best pattern of each side with its margin, of those that raise the activation.

    train: the part that patterns are made on. validation: the part that they are chosen on.
    """
    sizes, best = np.array(SIZES) - 1, []
    steps = {kind: _by_step(kind, train, validation) for kind in TOKEN_OFFSETS}
    worth = np.concatenate([margins[:, sizes] - SHORTER * sizes for _, margins in steps.values()], axis=1)
    names = {code: text for text, code in validation.sample.codes.items()}
    kinds = list(steps)
    for row, index in enumerate(worth.argmax(1).tolist()):
        kind, size = kinds[index // len(SIZES)], SIZES[index % len(SIZES)]
        items = tuple(names[code] for code in steps[kind][0][row, :size].tolist() if code >= 0)
        value = float(worth[row, index])
        best.append((Label(kind, items), value) if np.isfinite(value) else None)
    return best


def _by_step(kind: LabelKind, train: TopActivations, validation: TopActivations) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes (P, SIZES[-1]) of the most distinctive tokens at a step, the best first, -1 where there are no
    more; and the margin (P, SIZES[-1]) of the first 1, 2, ... of them, -inf for those that are none, that do not raise
    the activation, or that are seldom where it is largest."""
    codes = _most_distinctive(kind, train)
    width, count = len(validation.sample.codes), validation.values.shape[1]
    at, able = _codes(validation.sample, kind), codes >= 0
    true = np.where(able, np.bincount(at[at >= 0], minlength=width)[codes], 0).cumsum(1)
    hits, ranks = (
        np.where(able, np.take_along_axis(_sums(at, weights, width), codes.clip(0), 1), 0).cumsum(1)
        for weights in (validation.tokens, validation.token_ranks)
    )
    shared = hits >= OVERLAP * np.minimum(true, validation.tokens.sum(1, keepdims=True))
    raising = able & shared & tends_larger(ranks, true, count)
    return codes, np.where(raising, margin("pattern", pattern_auroc(ranks, true, count)), -np.inf)


def _most_distinctive(kind: LabelKind, top: TopActivations) -> np.ndarray:
    """Return the codes (P, SIZES[-1]) of the tokens that are most typical of the top tokens; -1 for none."""
    width, at = len(top.sample.codes), _codes(top.sample, kind)
    counts, background = _sums(at, top.tokens, width), np.bincount(at[at >= 0], minlength=width)
    z = np.full(counts.shape, -np.inf)
    able = counts > 1
    sizes = np.broadcast_to(counts.sum(1, keepdims=True), counts.shape)[able]
    z[able] = distinction(counts[able], sizes, np.broadcast_to(background, counts.shape)[able], background.sum())
    best = np.argsort(-z, axis=1, kind="stable")[:, : SIZES[-1]]
    return np.where(np.take_along_axis(z, best, 1) > DISTINCT, best, -1)


def _codes(sample: Sample, kind: LabelKind) -> np.ndarray:
    """Return the code (C,) of the token at the step of a pattern from each counted token; -1 outside its sentence."""
    return sample.beside(TOKEN_OFFSETS[kind])[sample.counted]


def _sums(codes: np.ndarray, weights: np.ndarray, width: int) -> np.ndarray:
    """Return the sums (P, width) of weights (P, C) by code (C,); the code -1 is left out."""
    rows, columns = np.nonzero(weights)
    known = codes[columns] >= 0
    rows, columns = rows[known], columns[known]
    where = rows * width + codes[columns]
    return np.bincount(where, weights[rows, columns], len(weights) * width).reshape(len(weights), width)
