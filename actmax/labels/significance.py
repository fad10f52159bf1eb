"""The labels that a store has: which of them are significant, and their scores in words. It needs no model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np

from icebear.records import AutomaticLabel

THRESHOLDS = {"token": 0.85, "sentence": 0.70, "pattern": 0.85}
"""The AUROC that a significant label has at least, by unit."""
RATE = 0.1
"""The false discovery rate of labels that are listed together."""
NOT_SCORED = "not labeled yet"
NONE_PASSED = "no label passed"
HELD_OUT_GROUPS = {
    "hits": "Hits: maximally activating tokens where the label is true",
    "misses": "Misses: maximally activating tokens where the label is not true",
    "false_alarms": "False alarms: tokens with small activations where the label is true",
}
"""Groups of tokens from test documents."""
SCORES = {
    "token": "AUROC of the label for the 1 % of tokens with the largest activations",
    "sentence": "AUROC of the label for the 5 % of sentences with the largest mean activations",
    "pattern": "AUROC of the activation for the tokens where the label is true",
}
NULLS = {"circular_shift": "circular-shift null", "other_neuron": "other-neuron null"}


Numbers = TypeVar("Numbers", float, np.ndarray)


def margin(unit: str, score: Numbers) -> Numbers:
    """Return a score on the scale where chance is 0 and the threshold of its unit is 1."""
    return (score - 0.5) / (THRESHOLDS[unit] - 0.5)


def auroc_at(unit: str, at_margin: float) -> float:
    """Return the score that has this margin."""
    return 0.5 + at_margin * (THRESHOLDS[unit] - 0.5)


def benjamini_hochberg(p: Sequence[float]) -> list[bool]:
    """Return which hypotheses are rejected at the false discovery rate `RATE` (Benjamini & Hochberg 1995)."""
    values = np.array(p, dtype=float)
    ranked = np.sort(values)
    under = ranked[ranked <= RATE * np.arange(1, len(values) + 1) / max(len(values), 1)]
    return (values <= under.max(initial=-1)).tolist()


def most_significant(meanings: Iterable[AutomaticLabel]) -> list[AutomaticLabel]:
    """Return the labels that are significant at a false discovery rate of 10 % among all, by decreasing margin."""
    tried = list(meanings)
    holding = [
        m for m, holds in zip(tried, benjamini_hochberg([m.p for m in tried]), strict=True) if holds and m.significant
    ]
    return sorted(holding, key=lambda m: (-margin(m.by, m.score), m.neuron, m.polarity))


def label_title(meaning: AutomaticLabel | None) -> str:
    """Return the label with its score, or say that none was tried or that none is significant."""
    if meaning is None:
        return NOT_SCORED
    if not meaning.kind:
        return meaning.text
    written = f", written by {meaning.record['writer']}" if meaning.record.get("writer") else ""
    return f"{meaning.text} ({meaning.score:.2f} by {meaning.by}{written})" if meaning.significant else NONE_PASSED


def score_lines(meaning: AutomaticLabel) -> list[str]:
    """Return a line for the sentences where a significant label is true, for its score, and for the controls."""
    record, by = meaning.record, meaning.by
    if not record or not meaning.significant:
        return []
    thresholds, (true, count) = record["thresholds"], record.get("strongest", (0, 0))
    fits = [f"True at {true} of its {count} strongest sentences."] if count else []
    nulls = ", ".join(f"{name} {thresholds[key]:.2f}" for key, name in NULLS.items() if key in thresholds)
    return [
        *fits,
        f"{SCORES[by]}: {meaning.score:.2f} (chance 0.5, threshold {THRESHOLDS[by]:.2f}; "
        f"95th percentile of the {nulls}; p {meaning.p:.3f}), on {record['sentences']['test']} test sentences.",
        f"Another neuron's label: {_number(record['other_neuron'])}; on train documents: "
        f"{_number(record['train'])}; by token: {record['auroc']['token']:.2f}; upper baseline (table of the mean "
        f"activation of each token): {record['token_mean']:.2f}.",
    ]


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:.2f}"
