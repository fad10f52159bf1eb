"""`label_neurons`: the label of a neuron made on a third of the documents, chosen on another, scored on the last."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from icebear.actmax.labels import kinds, scores
from icebear.actmax.labels.chance import clears, controls, drawn, nulls, other_labels, p_value
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
from icebear.actmax.labels.label import Label
from icebear.actmax.labels.reading import read
from icebear.actmax.labels.sample import Sample, samples
from icebear.actmax.labels.scores import Fires
from icebear.actmax.labels.topics import topics
from icebear.concepts.models.model import Model
from icebear.db.store import Store
from icebear.errors import InputError, StoreError
from icebear.records import Meaning, Neuron

GROUP = 4096
"""Neurons whose activations are held at once, some 140 kB each."""


def label_neurons(
    model: Model,
    store: Store,
    neurons: Sequence[Neuron],
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Label both polarities of neurons, with scores, and keep that in the store; those that have one are passed over.

    Commits after each group of `GROUP` neurons; on_progress(done, total) counts sentences read and neurons labelled.
    Raises `StoreError` for an index by relevance, or one of too few documents.
    """
    check(model, store)
    have = store.labels.meanings(neurons)
    wanted = sorted({neuron for neuron in neurons if (neuron, "+") not in have}, key=lambda n: (n.layer, n))
    if not wanted:
        return
    parts = prepared(model, store, seed)
    apart = ([n for n in wanted if (n.site == "head") is heads] for heads in (False, True))
    groups = [rows[start : start + GROUP] for rows in apart for start in range(0, len(rows), GROUP)]
    total = sum(len(sample.ids) for sample in parts.values()) * len(groups) + len(wanted)
    advance = _counting(total, on_progress)
    for group in groups:
        read_of, known = activations(model, store, parts, group, seed, advance)
        meanings: list[Meaning] = []
        for row, neuron in enumerate(group):
            promoted = writes(store, neuron)
            for polarity, values in both_signs(read_of, row):
                meanings.append(_meaning(store, parts, (neuron, polarity), values, promoted[polarity], known))
            advance(1)
        store.labels.set_meanings(meanings)


def check(model: Model, store: Store) -> None:
    """Raises `StoreError` where the store cannot say what the model's neurons mean."""
    store.check(model.fingerprint, model.name, model.dtype_name)
    if store.by != "activation":
        raise StoreError(f"{store.path} is an index by {store.by}, and labels are of activations; use another --store.")


def _counting(total: int, on_progress: Callable[[int, int], None]) -> Callable[[int], None]:
    done = [0]

    def advance(count: int) -> None:
        done[0] += count
        on_progress(done[0], total)

    return advance


def activations(
    model: Model,
    store: Store,
    parts: dict[str, Sample],
    neurons: Sequence[Neuron],
    seed: int,
    advance: Callable[[int], None] = lambda sentences: None,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """part -> (P, N) of neurons, or of heads; and what chance gives, measured in the same passes the first time."""
    heads = neurons[0].site == "head"
    name = f"labels {seed}{' heads' if heads else ''}"
    known = store.facts.control(name)
    others = [] if known else drawn(model, store, seed, heads)
    found = {part: read(model, sample, [*neurons, *others], advance) for part, sample in parts.items()}
    if known is None:
        of_others = {part: x[len(neurons) :] for part, x in found.items()}
        store.facts.set_control(name, controls(store, parts, others, of_others, seed))
        known = store.facts.control(name)
    return found, known


def prepared(model: Model, store: Store, seed: int = 0) -> dict[str, Sample]:
    """part -> sample, with what is known of its sentences without neurons."""
    parts, found = samples(model, store, seed), topics(store)
    for sample in parts.values():
        likeness, sample.alike = found.likeness(store, np.array([sentence.id for sentence in sample.sentences]))
        sample.topics = dict(zip(found.words, likeness.T, strict=True))
    return parts


def score_label(
    model: Model,
    store: Store,
    neuron: Neuron,
    text: str,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Meaning]:
    """How well words of one's own tell where a neuron fires, at both polarities: its tokens, words earlier in the
    sentence, or anywhere in it, what does best on the part to choose on. Raises `InputError` for a text of no words."""
    own = re.findall(r"\w+", text.lower())
    if not own:
        raise InputError("A label without words cannot be scored; write some.")
    check(model, store)
    parts = prepared(model, store, seed)
    advance = _counting(sum(len(sample.ids) for sample in parts.values()), on_progress)
    read_of, known = activations(model, store, parts, [neuron], seed, advance)
    labels = [
        Label.of("tokens", "here", [form for word in own for form in (word, f" {word}")]),
        Label.of("words", "earlier", own),
        Label.of("words", "sentence", own),
    ]
    found = []
    for polarity, values in both_signs(read_of, 0):
        fired = fired_in(parts, values)
        if fired is None:
            found.append(_silent((neuron, polarity)))
        else:
            found.append(scored(parts, (neuron, polarity), choose(labels, fired), fired, values, known))
    return found


# --- what is kept ---------------------------------------------------------------------------------------


def _meaning(
    store: Store,
    parts: dict[str, Sample],
    pair: Pair,
    values: Values,
    promoted: Sequence[str],
    known: dict[str, Any],
) -> Meaning:
    fired = fired_in(parts, values)
    if fired is None:
        return _silent(pair)
    labels = candidates(parts["make"], values["make"], examples_of(store, pair), promoted)
    return scored(parts, pair, choose(labels, fired), fired, values, known)


def _silent(pair: Pair) -> Meaning:
    return Meaning(*pair, "", "hardly goes to this side", "token", 0.5, 1.0, False, {})


def scored(
    parts: dict[str, Sample],
    pair: Pair,
    chosen: Chosen,
    fired: dict[str, Fires],
    values: Values,
    known: dict[str, Any],
) -> Meaning:
    """A label with all that is measured of it on the part to report on."""
    own, label, by = fired["report"], chosen.label, chosen.by
    by_chance = nulls(known, pair)
    p = p_value(chosen, by_chance)
    others = other_labels(known["labels"], parts, pair, chosen)
    record = {
        **chosen.to_dict(),
        **scores.responsiveness(label, own, by),
        "hard": _number(scores.hard(label, own, by)),
        "table": scores.table([(parts[part], values[part]) for part in ("make", "choose")], own)["token"],
        "detection": scores.detection(label, own),
        "other": judged(others[0], by, fired).reported if others else None,
        "bars": {
            name: 0.5 + float(np.quantile(null, 0.95)) * (scores.BARS[by] - 0.5)
            for name, null in by_chance.items()
            if null
        },
        "sentences": {part: len(sample.ids) for part, sample in parts.items()},
        "examples": held_out(label, own),
    }
    return Meaning(
        *pair, label.kind, kinds.of(label).text(label), by, chosen.reported, p, clears(chosen, by_chance), record
    )


def _number(x: float) -> float | None:
    return None if np.isnan(x) else x


SHOWN = 4


def held_out(label: Label, fired: Fires) -> dict[str, list[dict[str, Any]]]:
    """Tokens of the part to report on: where the neuron fires furthest and the label is true, where it is not, and
    where the label is true and the neuron does least."""
    sample = fired.sample
    true = kinds.true(label, sample)
    driven = np.zeros(len(sample), dtype=bool)
    driven[sample.counted] = fired.tokens
    groups = {
        "found": (driven & true, -1),
        "left out": (driven & ~true, -1),
        "false": (sample.counted & true & ~driven, 1),
    }
    return {name: list(_furthest(fired, where, sign)) for name, (where, sign) in groups.items()}


def _furthest(fired: Fires, where: np.ndarray, sign: int) -> Iterator[dict[str, Any]]:
    """Of different sentences."""
    sample, seen = fired.sample, set[int]()
    places = np.flatnonzero(where)
    for place in places[np.argsort(sign * fired.values[places], kind="stable")]:
        number = int(sample.sentence[place])
        if number not in seen and len(seen) < SHOWN:
            seen.add(number)
            yield {
                "sentence": sample.sentences[number].id,
                "token": int(sample.position[place]),
                "value": round(float(fired.values[place]), 4),
            }
