"""The label that tells best where a neuron fires, of all candidates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from icebear.actmax.labels import kinds, scores
from icebear.actmax.labels.evidence import Place, evidence
from icebear.actmax.labels.label import Label
from icebear.actmax.labels.sample import PARTS, Sample, part_of, words
from icebear.actmax.labels.scores import Fires
from icebear.db.store import Store
from icebear.records import Example, Neuron

SHORTER = 0.01
"""What an item of a label has to add, of the way from chance to the bar."""
PROMOTED = 5
MARKED = 3

Pair = tuple[Neuron, str]
"""A neuron at a polarity."""
Values = dict[str, np.ndarray]
"""part -> (N,) of its sample."""


@dataclass(frozen=True)
class Chosen:
    """A candidate, by what it is judged, and how well it does on each part."""

    label: Label
    by: str
    made: float
    chosen: float
    reported: float

    @property
    def margin(self) -> float:
        return scores.margin(self.by, self.reported)

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "label": self.label.to_dict()}


def both_signs(read_of: dict[str, np.ndarray], row: int) -> list[tuple[str, Values]]:
    """polarity and its values, of one of the neurons read."""
    return [(p, {part: sign * x[row] for part, x in read_of.items()}) for p, sign in (("+", 1), ("-", -1))]


def choose(labels: Sequence[Label], fired: dict[str, Fires]) -> Chosen:
    """The label that does best on the part to choose on: the best one by token or the best one by sentence, whichever
    has the higher score of those that pass their bar, or comes nearest to it."""
    return the_better(best_of(labels, fired["choose"]) or best_of(labels, fired["choose"], responding=False), fired)


def the_better(found: dict[str, Candidate], fired: dict[str, Fires]) -> Chosen:
    passing = [by for by in scores.UNITS if by in found and found[by].worth >= 1]
    able = {by: judged(found[by].label, by, fired) for by in passing or found}
    return max(able.values(), key=lambda one: one.chosen if passing else scores.margin(one.by, one.chosen))


@dataclass(frozen=True)
class Candidate:
    label: Label
    worth: float
    """How far it comes from chance to the bar, less `SHORTER` for each item but the first."""


def best_of(labels: Sequence[Label], fired: Fires, responding: bool = True) -> dict[str, Candidate]:
    """unit -> the best of some labels by it, the first of equal ones, of those that the neuron also responds to."""
    found: dict[str, Candidate] = {}
    detected = [(label, scores.detection(label, fired)) for label in labels]
    for by in scores.UNITS:
        worth = [scores.margin(by, score[by]) - SHORTER * (len(label.items) - 1) for label, score in detected]
        for place in sorted(range(len(labels)), key=lambda place: -worth[place]):
            if not responding or scores.responds(labels[place], fired, by):
                found[by] = Candidate(labels[place], worth[place])
                break
    return found


def judged(label: Label, by: str, fired: dict[str, Fires]) -> Chosen:
    return Chosen(label, by, *(scores.detection(label, fired[part])[by] for part in PARTS))


def fired_in(parts: dict[str, Sample], values: Values) -> dict[str, Fires] | None:
    """None where the neuron hardly goes to this side."""
    found = {part: scores.fires(sample, values[part]) for part, sample in parts.items()}
    able = {part: fired for part, fired in found.items() if fired is not None}
    return able if len(able) == len(found) else None


def examples_of(store: Store, pair: Pair) -> list[Example]:
    """Those of the documents to make labels on; none of a head, which no index has."""
    if pair[0].site == "head":
        return []
    return [example for example in store.examples(*pair) if part_of(example.sentence.title) == "make"]


def candidates(sample: Sample, values: np.ndarray, examples: Sequence[Example], promoted: Sequence[str]) -> list[Label]:
    """What a neuron may mean, by its values in the sample to make labels on, its examples, and what it promotes."""
    places: list[Place] = [(example.sentence.tokens, example.token) for example in examples]
    return kinds.candidates(evidence(sample, values, places, marked(examples), promoted))


def marked(examples: Sequence[Example]) -> tuple[str, ...]:
    """The words that the relevance of annotated examples finds in at least two of them, beside the token itself."""
    counts: Counter[str] = Counter()
    for example in examples:
        if example.relevance is not None:
            shares = {
                word: example.relevance[end]
                for word, end in words(example.sentence.tokens)
                if end < example.token and example.relevance[end] > 0
            }
            counts.update(sorted(shares, key=lambda word: -shares[word])[:MARKED])
    return tuple(word for word, count in counts.most_common(MARKED) if count > 1)


def writes(store: Store, neuron: Neuron) -> dict[str, tuple[str, ...]]:
    """polarity -> the tokens that it promotes; none of a site that does not write."""
    if neuron.site not in ("ffn", "attn"):
        return {"+": (), "-": ()}
    found = store.vocabulary(neuron, PROMOTED)
    return {p: tuple(t.text for t in side) for p, side in (("+", found.promoted), ("-", found.suppressed))}
