"""`label_neurons`: labels are made on train documents, chosen on validation documents and scored on test documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from icebear.actmax.labels.choice import Chosen
from icebear.actmax.labels.kinds import Label
from icebear.actmax.labels.nulls import LabelNull, RandomNeuronNulls, null_draws, random_neurons
from icebear.actmax.labels.sample import Sample, prepare_samples, read_activations, topics_name
from icebear.actmax.labels.scores import TopActivations, score, token_mean_baseline
from icebear.actmax.labels.sides import Sides, sides, true_share
from icebear.actmax.labels.strongest import StrongestSentences
from icebear.convert import CONVERTER
from icebear.db.store import Store
from icebear.models.model import Model
from icebear.records import AutomaticLabel, Neuron
from icebear.steps import OnProgress, counting, unwatched

GROUP = 8192
"""The number of neurons whose activations are in memory at once (about 140 kB each)."""
NEURONS_PER_BATCH = 16
"""The number of neurons that are scored at once; a kill loses at most their labels."""
SHOWN = 4


def label_neurons(
    model: Model,
    store: Store,
    neurons: Sequence[Neuron],
    on_progress: OnProgress = unwatched,
) -> None:
    """Label both polarities of neurons and save the labels with their scores in the store.

    Neurons with labels are skipped, and each neuron's labels are committed, so a killed run can be run again for the
    rest. on_progress(done, total) counts sentences and labels. Raises `StoreError` for an index
    of another model, or with too few documents.
    """
    store.check(model.index_fingerprint, model.name, model.dtype_name)
    have = store.labels.automatic(neurons)
    wanted = sorted({neuron for neuron in neurons if (neuron, "+") not in have}, key=lambda n: (n.layer, n))
    if not wanted:
        return
    parts = prepare_samples(model, store)
    apart = ([n for n in wanted if (n.site == "head") is heads] for heads in (False, True))
    groups = [rows[start : start + GROUP] for rows in apart for start in range(0, len(rows), GROUP)]
    strongest = StrongestSentences(store)
    total = sum(len(sample.ids) for sample in parts.values()) * len(groups) + 2 * len(wanted)
    advance = counting(on_progress, total)
    for group in groups:
        values, nulls = measure_activations(model, store, parts, group, advance)
        for start in range(0, len(group), NEURONS_PER_BATCH):
            rows = slice(start, start + NEURONS_PER_BATCH)
            batch = sides(parts, group[rows], {part: x[rows] for part, x in values.items()})
            store.labels.set_automatic(strongest.fitting(meanings_of(batch, batch.choose(), nulls)))
            advance(len(batch.names))


def measure_activations(
    model: Model,
    store: Store,
    parts: dict[str, Sample],
    neurons: Sequence[Neuron],
    advance: Callable[[int], None] = lambda sentences: None,
    seed: int = 0,
) -> tuple[dict[str, np.ndarray], RandomNeuronNulls]:
    """Return the activations (P, N) in each part, and the nulls, which the first call measures in the same passes."""
    heads = neurons[0].site == "head"
    name = control_name(store, seed, heads)
    known = store.controls.get(name)
    others = [] if known else random_neurons(model, store, seed, heads)
    values = {part: read_activations(model, sample, [*neurons, *others], advance) for part, sample in parts.items()}
    if known is None:
        of_others = {part: x[len(neurons) :] for part, x in values.items()}
        store.controls.set({name: null_draws(sides(parts, others, of_others), seed)})
        known = store.controls.get(name)
        values = {part: x[: len(neurons)] for part, x in values.items()}
    return values, RandomNeuronNulls(known)


def control_name(store: Store, seed: int = 0, heads: bool = False) -> str:
    """Return the name of the nulls in the store, which are of its topics."""
    return f"labels {topics_name(store)} {seed}{' heads' if heads else ''}"


# --- scores of a label ---------------------------------------------------------------------------------------


def meanings_of(batch: Sides, chosen: Sequence[Chosen], nulls: RandomNeuronNulls) -> list[AutomaticLabel]:
    """Return the label that was chosen for each side, with its scores on the test part."""
    rows = enumerate(zip(batch.names, batch.active, chosen, strict=True))
    return [
        meaning_of(batch, row, label, nulls) if active else AutomaticLabel.hardly_active(*side)
        for row, (side, active, label) in rows
    ]


def meaning_of(batch: Sides, row: int, chosen: Chosen, nulls: LabelNull) -> AutomaticLabel:
    """Return the label of a side with its scores, controls, and, if it passes, sentences of the test part."""
    (neuron, polarity), top = batch.names[row], batch.top
    test, label, by = top["test"], chosen.label, chosen.by
    others = nulls.others(chosen, neuron.layer, true_share(label, batch))
    passes = nulls.is_significant(chosen, neuron.layer)
    record = {
        **CONVERTER.unstructure(chosen),
        "token_mean": token_mean_baseline([top["train"], top["validation"]], test, row, "token"),
        "auroc": {"token": score(label, "token", test, row), by: chosen.test},
        "other_neuron": score(others[0], by, test, row) if others else None,
        "thresholds": nulls.thresholds(by, neuron.layer),
        "sentences": {part: len(each.sample.ids) for part, each in top.items()},
        "examples": test_examples(label, test, row) if passes else {},
    }
    p = nulls.p_value(chosen, neuron.layer)
    return AutomaticLabel(
        neuron, polarity, label.kind, label.text(neuron.site == "head"), by, chosen.test, p, passes, record
    )


def test_examples(label: Label, top: TopActivations, row: int) -> dict[str, list[dict[str, Any]]]:
    """Return hits, misses and false alarms among the tokens of the test part."""
    true, on_top = label.true(top.sample)[top.sample.counted], top.tokens[row]
    groups = {
        "hits": (on_top & true, -1),
        "misses": (on_top & ~true, -1),
        "false_alarms": (true & ~on_top, 1),
    }
    return {name: list(_extremes(top, row, where, sign)) for name, (where, sign) in groups.items()}


def _extremes(top: TopActivations, row: int, where: np.ndarray, sign: int) -> Iterator[dict[str, Any]]:
    """Yield the tokens with the most extreme activations, at most one of each sentence."""
    sample, values, seen = top.sample, top.values[row], set[int]()
    counted, able = np.flatnonzero(sample.counted), np.flatnonzero(where)
    for index in able[np.argsort(sign * values[able], kind="stable")].tolist():
        token = counted[index]
        number = int(sample.sentence[token])
        if number not in seen:
            seen.add(number)
            yield {
                "sentence": sample.sentences[number].id,
                "token": int(sample.position[token]),
                "value": round(float(values[index]), 4),
            }
        if len(seen) == SHOWN:
            return
