"""`label_neurons`: labels are made on train documents, chosen on validation documents and scored on test documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from icebear.actmax.labels import scores
from icebear.actmax.labels.kinds import Label
from icebear.actmax.labels.meanings import THRESHOLDS
from icebear.actmax.labels.null import Side, controls, nulls, other_labels, p_value, random_neurons, sides, significant
from icebear.actmax.labels.sample import Sample, prepare_samples, read_activations
from icebear.actmax.labels.scores import TopActivations, choose_label, score_parts
from icebear.convert import CONVERTER
from icebear.db.store import Store
from icebear.db.terms import words
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.records import Meaning, Neuron
from icebear.steps import OnProgress, counting, unwatched

GROUP = 4096
"""The number of neurons whose activations are in memory at once (about 140 kB each)."""
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
    store.check(model.fingerprint, model.name, model.dtype_name)
    have = store.labels.meanings(neurons)
    wanted = sorted({neuron for neuron in neurons if (neuron, "+") not in have}, key=lambda n: (n.layer, n))
    if not wanted:
        return
    parts = prepare_samples(model, store)
    apart = ([n for n in wanted if (n.site == "head") is heads] for heads in (False, True))
    groups = [rows[start : start + GROUP] for rows in apart for start in range(0, len(rows), GROUP)]
    total = sum(len(sample.ids) for sample in parts.values()) * len(groups) + 2 * len(wanted)
    advance = counting(on_progress, total)
    for group in groups:
        values, known = measure_activations(model, store, parts, group, advance)
        for _, both in groupby(sides(parts, group, values), lambda side: side.neuron):
            meanings = []
            for side in both:
                meanings.append(score_candidates(side, side.candidates, known))
                advance(1)
            store.labels.set_meanings(meanings)  # of one neuron, so that a killed run keeps its work


def measure_activations(
    model: Model,
    store: Store,
    parts: dict[str, Sample],
    neurons: Sequence[Neuron],
    advance: Callable[[int], None] = lambda sentences: None,
    seed: int = 0,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the activations (P, N) in each part, and the nulls, which the first call measures in the same passes."""
    heads = neurons[0].site == "head"
    name = control_name(seed, heads)
    known = store.controls.get(name)
    others = [] if known else random_neurons(model, store, seed, heads)
    values = {part: read_activations(model, sample, [*neurons, *others], advance) for part, sample in parts.items()}
    if known is None:
        of_others = {part: x[len(neurons) :] for part, x in values.items()}
        store.controls.set({name: controls(list(sides(parts, others, of_others)), seed)})
        known = store.controls.get(name)
    return values, known


def control_name(seed: int, heads: bool = False) -> str:
    """Return the name of the nulls in the store."""
    return f"topics {seed}{' heads' if heads else ''}"


def score_label(
    model: Model,
    store: Store,
    neuron: Neuron,
    text: str,
    on_progress: OnProgress = unwatched,
) -> list[Meaning]:
    """Score a label that a person wrote, at both polarities.

    Its words are the tokens that the label is true at, with or without a space before them. Raises `InputError` for a
    text without words.
    """
    spelled = words(text.lower())
    if not spelled:
        raise InputError("A label without words cannot be scored; give a label with words.")
    store.check(model.fingerprint, model.name, model.dtype_name)
    parts = prepare_samples(model, store)
    advance = counting(on_progress, sum(len(sample.ids) for sample in parts.values()))
    values, known = measure_activations(model, store, parts, [neuron], advance)
    label = Label("tokens", tuple(form for word in spelled for form in (word, f" {word}")))
    return [score_candidates(side, [label], known) for side in sides(parts, [neuron], values)]


# --- scores of a label ---------------------------------------------------------------------------------------


def score_candidates(side: Side, candidates: Sequence[Label], known: dict[str, Any]) -> Meaning:
    """Return the best label with its scores on the test part. known: the nulls."""
    if not side.active:
        return Meaning(side.neuron, side.polarity, "", "hardly active at this polarity", "token", 0.5, 1.0, False, {})
    chosen = choose_label(candidates, side.fired)
    test, label, by = side.fired["test"], chosen.label, chosen.by
    by_chance = nulls(known, side.neuron)
    others = other_labels(known["labels"], side, chosen)
    record = {
        **CONVERTER.unstructure(chosen),
        "token_mean": scores.token_mean_baseline([side.fired["train"], side.fired["validation"]], test)["token"],
        "auroc": scores.label_auroc(label, test),
        "other_neuron": score_parts(others[0], by, side.fired).test if others else None,
        "thresholds": {
            name: 0.5 + float(np.quantile(null, 0.95)) * (THRESHOLDS[by] - 0.5)
            for name, null in by_chance.items()
            if null
        },
        "sentences": {part: len(fired.sample.ids) for part, fired in side.fired.items()},
        "examples": test_examples(label, test),
    }
    text, passes = str(label), significant(chosen, by_chance)
    p = p_value(chosen, by_chance)
    return Meaning(side.neuron, side.polarity, label.kind, text, by, chosen.test, p, passes, record)


def test_examples(label: Label, fired: TopActivations) -> dict[str, list[dict[str, Any]]]:
    """Return hits, misses and false alarms among the tokens of the test part."""
    sample = fired.sample
    true = label.true(sample)
    activating = np.zeros(len(sample), dtype=bool)
    activating[sample.counted] = fired.tokens
    groups = {
        "hits": (activating & true, -1),
        "misses": (activating & ~true, -1),
        "false_alarms": (sample.counted & true & ~activating, 1),
    }
    return {name: list(_extremes(fired, where, sign)) for name, (where, sign) in groups.items()}


def _extremes(fired: TopActivations, where: np.ndarray, sign: int) -> Iterator[dict[str, Any]]:
    """Yield the tokens with the most extreme activations, at most one of each sentence."""
    sample, seen = fired.sample, set[int]()
    tokens = np.flatnonzero(where)
    for token in tokens[np.argsort(sign * fired.values[tokens], kind="stable")]:
        number = int(sample.sentence[token])
        if number not in seen and len(seen) < SHOWN:
            seen.add(number)
            yield {
                "sentence": sample.sentences[number].id,
                "token": int(sample.position[token]),
                "value": round(float(fired.values[token]), 4),
            }
