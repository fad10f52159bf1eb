"""Unpack the sentence vectors, the labels with their scores and the map of the index that comes with icebear.

`benchmarks/pack_index.py` writes the arrays that are read here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import numpy as np

from icebear.actmax.atlas.atlas import Atlas
from icebear.actmax.atlas.clusters import Cluster
from icebear.actmax.atlas.layer_meanings import LayerMeanings
from icebear.actmax.atlas.neighbor_map import PAGE_STEPS
from icebear.actmax.labels.auto import control_name
from icebear.actmax.labels.kinds import Label, LabelKind
from icebear.actmax.labels.nulls import RandomNeuronNulls
from icebear.actmax.labels.sample import topics_name
from icebear.actmax.labels.significance import THRESHOLDS
from icebear.convert import CONVERTER
from icebear.db.store import Store
from icebear.records import POLARITIES, AutomaticLabel, Neuron

Arrays = dict[str, np.ndarray]
LABEL_KINDS = get_args(LabelKind)
KINDS = ("", *LABEL_KINDS)
"""`AutomaticLabel.kind` by its number; a side that was not labeled has `NOT_LABELED`."""
NOT_LABELED = 255
UNITS = tuple(THRESHOLDS)
SCORES = ("train", "validation", "token_mean", "token", "other_neuron")
"""Numbers of a significant label, in this order; `token` is the AUROC by token."""


def from_steps(x: np.ndarray) -> np.ndarray:
    """Return numbers from 0 to 1 from steps of 1 / `PAGE_STEPS`."""
    return x.astype(float) / PAGE_STEPS


def unpacked_vectors(arrays: Arrays) -> np.ndarray:
    """Return the vectors (S, D) of example sentences from the codes of FAISS's product quantizer."""
    codes, centroids = arrays["vector_codes"], arrays["vector_centroids"].astype(np.float32)  # (S, M), (M, 256, C / M)
    rows = np.concatenate([part[code] for part, code in zip(centroids, codes.T, strict=True)], axis=1)
    return rows @ arrays["vector_rotation"].astype(np.float32) + arrays["vector_center"]


def unpacked_map(arrays: Arrays, about: dict[str, Any], store: Store) -> Atlas:
    """Return the map, whose sides are those with examples."""
    counts = arrays["example_counts"][: 2 * store.neurons.count_without_heads()]
    points = (arrays["map_points"] / PAGE_STEPS * 2 - 1).astype(np.float32)
    return Atlas(
        np.flatnonzero(counts),
        points,
        arrays["map_cluster"].astype(np.int64),
        from_steps(arrays["map_clarity"]),
        CONVERTER.structure(about["clusters"], tuple[Cluster, ...]),
        CONVERTER.structure(about["layers"], tuple[LayerMeanings, ...]),
        {**store.made_with(), "seed": about["seed"]},
    )


def add_labels(store: Store, arrays: Arrays, about: dict[str, Any]) -> None:
    """Save the automatic labels in a store, and what other labels are scored with: topics and nulls."""
    names = (control_name(store, heads=heads) for heads in (False, True))
    store.controls.set({topics_name(store): about["topics"], **dict(zip(names, about["nulls"], strict=False))})
    store.labels.set_automatic(unpacked_labels(arrays, about, store.neurons.all_with_heads()))


def unpacked_labels(arrays: Arrays, about: dict[str, Any], neurons: list[Neuron]) -> Iterator[AutomaticLabel]:
    """Yield the automatic labels of neurons, in order of id. about: the topics, the tokens of patterns, the numbers of
    sentences, and the nulls of neurons and perhaps of heads."""
    nulls = [RandomNeuronNulls(known) for known in about["nulls"]]
    kinds, units, significant = (arrays[f"label_{name}"] for name in ("kinds", "units", "significant"))
    items, numbers = iter(arrays["label_items"].tolist()), iter(from_steps(arrays["label_numbers"]).tolist())
    scores, strongest = iter(from_steps(arrays["label_scores"]).tolist()), iter(arrays["label_strongest"].tolist())
    sides = ((neuron, polarity) for neuron in neurons for polarity in POLARITIES)
    for (neuron, polarity), kind, unit, passes in zip(sides, kinds, units, significant, strict=True):
        if kind == NOT_LABELED:
            continue
        score, p = next(numbers)
        if not KINDS[kind]:
            yield AutomaticLabel.hardly_active(neuron, polarity)
            continue
        label = Label(LABEL_KINDS[kind - 1], _items(items, kind, about))
        by, of_head, record = UNITS[unit], neuron.site == "head", {}
        if passes:
            known = nulls[of_head]
            record = _record(label, by, score, dict(zip(SCORES, next(scores), strict=True)), known, neuron.layer)
            record |= {"sentences": about["sentences"], "strongest": next(strongest)}
        yield AutomaticLabel(neuron, polarity, label.kind, label.text(of_head), by, score, p, bool(passes), record)


def _items(codes: Iterator[int], kind: int, about: dict[str, Any]) -> tuple[str, ...]:
    if KINDS[kind] == "topic":
        return tuple(about["topics"]["words"][next(codes)])
    return tuple(about["tokens"][next(codes)] for _ in range(next(codes)))


def _record(
    label: Label, by: str, score: float, row: dict[str, float], nulls: RandomNeuronNulls, layer: int
) -> dict[str, Any]:
    """Return `AutomaticLabel.record`, without examples."""
    return {
        "label": CONVERTER.unstructure(label),
        "by": by,
        "train": row["train"],
        "validation": row["validation"],
        "test": score,
        "token_mean": row["token_mean"],
        "auroc": {"token": row["token"], by: score},
        "other_neuron": row["other_neuron"] or None,
        "thresholds": nulls.thresholds(by, layer),
        "examples": {},
    }
