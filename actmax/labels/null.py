"""A neuron at one polarity, and two nulls of its labels that repeat the choice: circularly shifted activations, and
labels of other neurons."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from icebear.actmax.labels import scores
from icebear.actmax.labels.kinds import Label
from icebear.actmax.labels.sample import Sample
from icebear.actmax.labels.scores import Chosen, TopActivations, choose_label, score_parts
from icebear.convert import CONVERTER
from icebear.db.store import Store
from icebear.models.model import Model
from icebear.records import Neuron

CONTROLS = 100
"""The number of random neurons that the nulls are made from."""
NULL_DRAWS = 5
"""The number of shifts, and of other labels, of each random neuron and polarity."""
NEAR = 300
"""The number of draws that a label is compared with."""
Nulls = dict[str, list[float]]
"""``circular_shift`` and ``other_neuron`` -> margins."""


@dataclass(frozen=True)
class Side:
    """A neuron at a polarity, in each part of the documents."""

    neuron: Neuron
    polarity: str
    fired: dict[str, TopActivations]
    """part -> the activations in its sample; negated for polarity ``-``."""

    @property
    def active(self) -> bool:
        """Whether the neuron is active at this polarity in each part."""
        return all(fired.active for fired in self.fired.values())

    @property
    def candidates(self) -> list[Label]:
        return [Label("topic", words) for words in self.fired["train"].sample.topics]

    def shifted(self, seed: str) -> Side:
        """Return the neuron with circularly shifted activations."""
        name = f"{self.neuron} {self.polarity} {seed}"
        generator = np.random.default_rng(list(hashlib.blake2b(name.encode(), digest_size=16).digest()))
        fired = {}
        for part, top in self.fired.items():
            moved, counted = top.values.copy(), top.sample.counted
            count = int(counted.sum())
            moved[counted] = np.roll(moved[counted], int(generator.integers(count // 4, 3 * count // 4)))
            fired[part] = scores.top_activations(top.sample, moved)
        return replace(self, fired=fired)


def sides(samples: dict[str, Sample], neurons: Sequence[Neuron], activations: dict[str, np.ndarray]) -> Iterator[Side]:
    """Yield both polarities of each neuron. activations: part -> (P, N)."""
    for row, neuron in enumerate(neurons):
        for polarity, sign in (("+", 1), ("-", -1)):
            fired = {
                part: scores.top_activations(sample, sign * activations[part][row]) for part, sample in samples.items()
            }
            yield Side(neuron, polarity, fired)


def nulls(controls: dict[str, Any], neuron: Neuron) -> Nulls:
    """Return the margins of the `NEAR` draws that are nearest in layer."""
    near = {}
    for name in ("circular_shift", "other_neuron"):
        rows = sorted(controls[name], key=lambda row: abs(row[0] - neuron.layer))  # a stable sort
        near[name] = [margin for _, margin in rows[:NEAR]]
    return near


def significant(chosen: Chosen, by_chance: Nulls) -> bool:
    """Return whether the score is at its threshold and above 95 % of each null."""
    return chosen.margin >= 1 and all(chosen.margin > np.quantile(null, 0.95) for null in by_chance.values() if null)


def p_value(chosen: Chosen, by_chance: Nulls) -> float:
    """Return the larger p value of the two nulls, never zero (Phipson & Smyth 2010)."""
    return max((1 + sum(x >= chosen.margin for x in null)) / (1 + len(null)) for null in by_chance.values())


def random_neurons(model: Model, store: Store, seed: int, heads: bool) -> list[Neuron]:
    """Return random neurons of all layers and sites of the index, or random heads of the model."""
    if heads:
        every = [Neuron(layer, "head", head) for layer in model.layers_with("attn") for head in range(model.heads)]
        return [every[index] for index in sorted(np.random.default_rng(seed).permutation(len(every))[:CONTROLS])]
    count = store.neurons.count()
    ids = np.random.default_rng(seed).choice(count, min(CONTROLS, count), replace=False)
    return list(store.neurons.of(sorted(ids.tolist())).values())


def controls(drawn: Sequence[Side], seed: int) -> dict[str, Any]:
    """Return the labels of random neurons, and the layers and margins of both nulls.

    circular_shift: labels of their shifted activations. other_neuron: labels of other random neurons, scored on their
    activations.
    """
    chosen = [(side, choose_label(side.candidates, side.fired)) for side in drawn if side.active]
    shifts = [
        (side.neuron.layer, choose_label(moved.candidates, moved.fired).margin)
        for side in drawn
        for moved in (side.shifted(f"{seed} {draw}") for draw in range(NULL_DRAWS))
        if moved.active
    ]
    labels = []
    for side, choice in chosen:
        names = {"neuron": str(side.neuron), "polarity": side.polarity, "share": share(choice.label, side)}
        labels.append({**CONVERTER.unstructure(choice), **names})
    others = [
        (side.neuron.layer, score_parts(other, choice.by, side.fired).margin)
        for side, choice in chosen
        for other in other_labels(labels, side, choice)
    ]
    return {"labels": labels, "circular_shift": shifts, "other_neuron": others}


def share(label: Label, side: Side) -> float:
    """Return the share of validation tokens where the label is true."""
    sample = side.fired["validation"].sample
    return float(label.true(sample)[sample.counted].mean())


def other_labels(labels: Sequence[dict[str, Any]], side: Side, chosen: Chosen) -> list[Label]:
    """Return `NULL_DRAWS` labels of other random neurons, with the same unit and near in layer and frequency, the
    nearest first."""
    record = CONVERTER.unstructure(chosen.label)
    rows = [row for row in labels if row["by"] == chosen.by and row["label"] != record]
    frequency = share(chosen.label, side)

    def distance(row: dict[str, Any]) -> float:
        apart = abs(Neuron.parse(row["neuron"]).layer - side.neuron.layer)
        return apart + 3 * abs(float(np.log((row["share"] + 1e-4) / (frequency + 1e-4))))

    nearest = (CONVERTER.structure(row["label"], Label) for row in sorted(rows, key=distance))
    return list(dict.fromkeys(nearest))[:NULL_DRAWS]
