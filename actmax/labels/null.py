"""The nulls of labels, through the same choice: labels of shifted activations, and of other neurons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from icebear.actmax.labels import kinds
from icebear.actmax.labels.kinds import Label
from icebear.actmax.labels.scores import Chosen, choose_label, judged
from icebear.actmax.labels.side import Side
from icebear.concepts.models.model import Model
from icebear.convert import CONVERTER
from icebear.db.store import Store
from icebear.records import Neuron

CONTROLS = 100
"""Neurons drawn by chance whose labels, and whose labels by chance, are what others are compared with."""
DRAWS = 5
"""Times that each of them at each polarity is shifted, and other labels that it is given."""
NEAR = 300
"""Of these draws those that a label is compared with."""

Nulls = dict[str, list[float]]
"""``circular_shift`` and ``other_neuron`` -> margins."""


def nulls(controls: dict[str, Any], neuron: Neuron) -> Nulls:
    """Of the `NEAR` draws that are nearest in layer."""
    near = {}
    for name in ("circular_shift", "other_neuron"):
        rows = sorted(controls[name], key=lambda row: abs(row[0] - neuron.layer))  # of equal ones the first
        near[name] = [margin for _, margin in rows[:NEAR]]
    return near


def significant(chosen: Chosen, by_chance: Nulls) -> bool:
    """Whether it passes its bar and 95 % of each null."""
    return chosen.margin >= 1 and all(chosen.margin > np.quantile(null, 0.95) for null in by_chance.values() if null)


def p_value(chosen: Chosen, by_chance: Nulls) -> float:
    """The share of a null that is as good, of the null where that is largest (Phipson & Smyth 2010: never zero)."""
    return max((1 + sum(x >= chosen.margin for x in null)) / (1 + len(null)) for null in by_chance.values())


def random_neurons(model: Model, store: Store, seed: int, heads: bool) -> list[Neuron]:
    """Neurons by chance, of all layers and sites of the index; or heads of the model."""
    if heads:
        every = [Neuron(layer, "head", head) for layer in model.layers_with("attn") for head in range(model.heads)]
        return [every[place] for place in sorted(np.random.default_rng(seed).permutation(len(every))[:CONTROLS])]
    count = store.count("neurons")
    ids = np.random.default_rng(seed).choice(count, min(CONTROLS, count), replace=False)
    return list(store.neurons.of(sorted(ids.tolist())).values())


def controls(drawn: Sequence[Side], seed: int) -> dict[str, Any]:
    """Of neurons drawn by chance: their labels; layers and margins of labels of shifted activations, and of the labels
    of others of them on their own activations."""
    chosen = [(side, choose_label(side.candidates(), side.fired)) for side in drawn if side.active]
    shifts = [
        (side.neuron.layer, choose_label(moved.candidates(), moved.fired).margin)
        for side in drawn
        for moved in (side.shifted(f"{seed} {draw}") for draw in range(DRAWS))
        if moved.active
    ]
    labels = []
    for side, one in chosen:
        names = {"neuron": str(side.neuron), "polarity": side.polarity, "share": share(one.label, side)}
        labels.append({**CONVERTER.unstructure(one), **names})
    others = [
        (side.neuron.layer, judged(other, one.by, side.fired).margin)
        for side, one in chosen
        for other in other_labels(labels, side, one)
    ]
    return {"labels": labels, "circular_shift": shifts, "other_neuron": others}


def share(label: Label, side: Side) -> float:
    """Of the tokens of the validation part, those at which the label is true."""
    sample = side.fired["validation"].sample
    return float(kinds.true(label, sample)[sample.counted].mean())


def other_labels(labels: Sequence[dict[str, Any]], side: Side, chosen: Chosen) -> list[Label]:
    """Other labels, of neurons drawn by chance: `DRAWS` of the same kind, as near as can be in layer and in how often
    they are true; the nearest first."""
    same, own = (chosen.label.kind, chosen.by), CONVERTER.unstructure(chosen.label)
    rows = [row for row in labels if (row["label"]["kind"], row["by"]) == same and row["label"] != own]
    often = share(chosen.label, side)

    def distance(row: dict[str, Any]) -> float:
        apart = abs(Neuron.parse(row["neuron"]).layer - side.neuron.layer)
        return apart + 3 * abs(float(np.log((row["share"] + 1e-4) / (often + 1e-4))))

    nearest = (CONVERTER.structure(row["label"], Label) for row in sorted(rows, key=distance))
    return list(dict.fromkeys(nearest))[:DRAWS]
