"""Two nulls of labels that repeat the choice: circularly shifted activations, and labels of other neurons."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np

from icebear.actmax.labels.choice import Chosen, score_parts
from icebear.actmax.labels.kinds import Label
from icebear.actmax.labels.sides import Sides, true_share
from icebear.actmax.labels.significance import auroc_at
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
NULL_NAMES = ("circular_shift", "other_neuron")


class LabelNull(Protocol):
    """What the score of a label is compared with."""

    def thresholds(self, by: str, layer: int) -> dict[str, float]: ...

    def is_significant(self, chosen: Chosen, layer: int) -> bool: ...

    def p_value(self, chosen: Chosen, layer: int) -> float: ...

    def others(self, chosen: Chosen, layer: int, share: float) -> Sequence[Label]: ...


class RandomNeuronNulls:
    """The margins and labels of random neurons, see `null_draws`."""

    def __init__(self, known: dict[str, Any]) -> None:
        self.known = known
        self.labels = [(CONVERTER.structure(row["label"], Label), row["by"]) for row in known["labels"]]
        self.layers = np.array([Neuron.parse(row["neuron"]).layer for row in known["labels"]])
        self.shares = np.array([row["share"] for row in known["labels"]])
        self.near = cache(self._near)
        self.percentiles_95 = cache(self._percentiles_95)

    def is_significant(self, chosen: Chosen, layer: int) -> bool:
        """Return whether the score is at its threshold and above 95 % of each null."""
        return chosen.margin >= 1 and all(chosen.margin > top for top in self.percentiles_95(layer).values())

    def thresholds(self, by: str, layer: int) -> dict[str, float]:
        """Return these percentiles as AUROC. by: the unit."""
        return {name: auroc_at(by, top) for name, top in self.percentiles_95(layer).items()}

    def p_value(self, chosen: Chosen, layer: int) -> float:
        """Return the larger p value of the two nulls, never zero (Phipson & Smyth 2010)."""
        return max((1 + int((null >= chosen.margin).sum())) / (1 + len(null)) for null in self.near(layer).values())

    def nearest(self, layer: int) -> list[tuple[Label, str]]:
        """Return the labels of random neurons, each once with its unit, the nearest in layer first."""
        order = np.argsort(np.abs(self.layers - layer), kind="stable").tolist()
        return list(dict.fromkeys(self.labels[index] for index in order))

    def others(self, chosen: Chosen, layer: int, share: float) -> list[Label]:
        """Return `NULL_DRAWS` labels of other random neurons, with the same unit and near in layer and frequency, the
        nearest first. share: `true_share` of the chosen label."""
        distance = np.abs(self.layers - layer) + 3 * np.abs(np.log((self.shares + 1e-4) / (share + 1e-4)))
        nearest: dict[Label, None] = {}
        for index in np.argsort(distance, kind="stable").tolist():
            label, by = self.labels[index]
            if by == chosen.by and label != chosen.label:
                nearest[label] = None
                if len(nearest) == NULL_DRAWS:
                    break
        return list(nearest)

    def _near(self, layer: int) -> dict[str, np.ndarray]:
        """Return the margins of the `NEAR` draws of each null that are nearest in layer."""
        near = {}
        for name in NULL_NAMES:
            layers, margins = np.array(self.known[name], dtype=float).reshape(-1, 2).T
            near[name] = margins[np.argsort(np.abs(layers - layer), kind="stable")[:NEAR]]
        return near

    def _percentiles_95(self, layer: int) -> dict[str, float]:
        """Return the 95th percentile of each null; a null without draws has none."""
        return {name: float(np.quantile(null, 0.95)) for name, null in self.near(layer).items() if len(null)}


def random_neurons(model: Model, store: Store, seed: int, heads: bool) -> list[Neuron]:
    """Return random neurons of all layers and sites of the index, or random heads of the model."""
    if heads:
        every = [Neuron(layer, "head", head) for layer in model.layers_with("attn") for head in range(model.heads)]
        return [every[index] for index in sorted(np.random.default_rng(seed).permutation(len(every))[:CONTROLS])]
    count = store.neurons.count_without_heads()
    ids = np.random.default_rng(seed).choice(count, min(CONTROLS, count), replace=False)
    return list(store.neurons.of(sorted(ids.tolist())).values())


def null_draws(drawn: Sides, seed: int) -> dict[str, Any]:
    """Return the labels of random neurons, and the layers and margins of both nulls.

    circular_shift: labels of their shifted activations. other_neuron: labels of other random neurons, scored on their
    activations.
    """
    moved = [drawn.shifted(f"{seed} {draw}") for draw in range(NULL_DRAWS)]
    shifted = [list(zip(draw.active, draw.choose(), strict=True)) for draw in moved]
    shifts = [
        (neuron.layer, chosen.margin)
        for (neuron, _), *draws in zip(drawn.names, *shifted, strict=True)
        for active, chosen in draws
        if active
    ]
    chosen_of = [(row, chosen) for row, chosen in enumerate(drawn.choose()) if drawn.active[row]]
    labels = []
    for row, chosen in chosen_of:
        neuron, polarity = drawn.names[row]
        share = true_share(chosen.label, drawn)
        labels.append({**CONVERTER.unstructure(chosen), "neuron": str(neuron), "polarity": polarity, "share": share})
    known = RandomNeuronNulls({"labels": labels})
    others = [
        (layer, score_parts(other, chosen.by, drawn.top, row).margin)
        for (row, chosen), label in zip(chosen_of, labels, strict=True)
        for layer in [drawn.names[row][0].layer]
        for other in known.others(chosen, layer, label["share"])
    ]
    return {"labels": labels, "circular_shift": shifts, "other_neuron": others}
