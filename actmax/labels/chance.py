"""What chance gives through the same choice: labels of shifted activations, and of other neurons."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from icebear.actmax.labels import kinds
from icebear.actmax.labels.choice import (
    Chosen,
    Pair,
    Values,
    both_signs,
    candidates,
    choose,
    examples_of,
    fired_in,
    judged,
    writes,
)
from icebear.actmax.labels.evidence import Place, evidence
from icebear.actmax.labels.label import Label
from icebear.actmax.labels.sample import Sample
from icebear.actmax.labels.scores import Fires
from icebear.concepts.models.model import Model
from icebear.db.store import Store
from icebear.records import Neuron

CONTROLS = 100
"""Neurons drawn by chance whose labels, and whose labels by chance, are what others are compared with."""
DRAWS = 5
"""Times that each of them at each polarity is shifted, and other labels that it is given."""
NEAR = 300
"""Of these draws those that a label is compared with."""


def nulls(known: dict[str, Any], pair: Pair) -> dict[str, list[float]]:
    """Name -> margins that chance gives, of the `NEAR` draws that are nearest in layer."""
    found = {}
    for name in ("shifted", "other"):
        rows = sorted(known[name], key=lambda row: abs(row[0] - pair[0].layer))  # of equal ones the first
        found[name] = [margin for _, margin in rows[:NEAR]]
    return found


def clears(chosen: Chosen, by_chance: dict[str, list[float]]) -> bool:
    """Whether it passes its bar and 95 % of what chance gives."""
    return chosen.margin >= 1 and all(chosen.margin > np.quantile(null, 0.95) for null in by_chance.values() if null)


def p_value(chosen: Chosen, by_chance: dict[str, list[float]]) -> float:
    """The share of what chance gives that is as good, of the null where that is largest (Phipson & Smyth 2010: never
    zero)."""
    return max((1 + sum(x >= chosen.margin for x in null)) / (1 + len(null)) for null in by_chance.values())


def drawn(model: Model, store: Store, seed: int, heads: bool) -> list[Neuron]:
    """Neurons by chance, of all layers and sites of the index; or heads of the model."""
    if heads:
        every = [Neuron(layer, "head", head) for layer in model.layers_with("attn") for head in range(model.heads)]
        return [every[place] for place in sorted(np.random.default_rng(seed).permutation(len(every))[:CONTROLS])]
    count = store.count("neurons")
    ids = np.random.default_rng(seed).choice(count, min(CONTROLS, count), replace=False)
    return list(store.neurons.of(sorted(ids.tolist())).values())


def shifted(sample: Sample, values: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Activations moved onto other documents, in their order."""
    count = int(sample.counted.sum())
    found = values.copy()
    found[sample.counted] = np.roll(values[sample.counted], int(generator.integers(count // 4, 3 * count // 4)))
    return found


def by_chance(
    parts: dict[str, Sample], pair: Pair, values: Values, examples: int, promoted: Sequence[str], seed: str
) -> tuple[list[Label], dict[str, Fires]] | None:
    """Shifted activations, and the candidates that are made of them and of as many examples, anywhere."""
    name = f"{pair[0]} {pair[1]} {seed}"
    generator = np.random.default_rng(list(hashlib.blake2b(name.encode(), digest_size=16).digest()))
    moved = {part: shifted(sample, values[part], generator) for part, sample in parts.items()}
    fired = fired_in(parts, moved)
    if fired is None:
        return None
    sample = parts["make"]
    rows = generator.choice(np.flatnonzero(sample.counted), examples)
    places: list[Place] = [(sample.sentences[sample.sentence[row]].tokens, int(sample.position[row])) for row in rows]
    return kinds.candidates(evidence(sample, moved["make"], places, (), promoted)), fired


def controls(
    store: Store,
    parts: dict[str, Sample],
    neurons: Sequence[Neuron],
    read_of: dict[str, np.ndarray],
    seed: int,
) -> dict[str, Any]:
    """Of neurons drawn by chance: their labels; layers and margins of labels of shifted activations, and of the labels
    of others of them on their own activations."""
    labels: list[tuple[Pair, Chosen]] = []
    fired_of: dict[Pair, dict[str, Fires]] = {}
    shifts: list[tuple[int, float]] = []
    for row, neuron in enumerate(neurons):
        promoted = writes(store, neuron)
        for polarity, values in both_signs(read_of, row):
            pair, fired = (neuron, polarity), fired_in(parts, values)
            examples, words = examples_of(store, pair), promoted[polarity]
            if fired is not None:
                labels.append((pair, choose(candidates(parts["make"], values["make"], examples, words), fired)))
                fired_of[pair] = fired
            draws = (by_chance(parts, pair, values, len(examples), words, f"{seed} {n}") for n in range(DRAWS))
            shifts += [(neuron.layer, choose(*null).margin) for null in draws if null is not None]
    kept = [{"neuron": str(pair[0]), "polarity": pair[1], **_kept(parts, chosen)} for pair, chosen in labels]
    others = []
    for pair, chosen in labels:
        nearest = other_labels(kept, parts, pair, chosen)
        others += [(pair[0].layer, judged(other, chosen.by, fired_of[pair]).margin) for other in nearest]
    return {"labels": kept, "shifted": shifts, "other": others}


def _kept(parts: dict[str, Sample], chosen: Chosen) -> dict[str, Any]:
    return {**chosen.to_dict(), "share": share(chosen.label, parts)}


def share(label: Label, parts: dict[str, Sample]) -> float:
    """Of the tokens to choose on, those at which the label is true."""
    sample = parts["choose"]
    return float(kinds.true(label, sample)[sample.counted].mean())


def other_labels(kept: Sequence[dict[str, Any]], parts: dict[str, Sample], pair: Pair, chosen: Chosen) -> list[Label]:
    """Other labels, of neurons drawn by chance: `DRAWS` of the same kind, as near as can be in layer and in how often
    they are true; the nearest first."""
    same, own = (chosen.label.kind, chosen.by), chosen.label.to_dict()
    rows = [row for row in kept if (row["label"]["kind"], row["by"]) == same and row["label"] != own]
    often = share(chosen.label, parts)

    def distance(row: dict[str, Any]) -> float:
        apart = abs(Neuron.parse(row["neuron"]).layer - pair[0].layer)
        return apart + 3 * abs(float(np.log((row["share"] + 1e-4) / (often + 1e-4))))

    return list(dict.fromkeys(Label.from_dict(row["label"]) for row in sorted(rows, key=distance)))[:DRAWS]
