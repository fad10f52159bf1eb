"""`label_neurons`: the label of a neuron made on a third of the documents, chosen on another, scored on the last."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from actmax.labels import kinds, scores
from actmax.labels.evidence import Evidence, Place, evidence
from actmax.labels.label import Label
from actmax.labels.reading import read
from actmax.labels.sample import PARTS, Sample, part_of, samples, words
from actmax.labels.scores import Fires
from actmax.labels.topics import topics
from actmax.labels.writes import Row, tested
from concepts.models.model import Model
from db.store import Store
from icebear.errors import InputError, StoreError
from icebear.records import Example, Meaning, Neuron

GROUP = 4096
"""Neurons whose activations are held at once, some 140 kB each."""
CONTROLS = 100
"""Neurons drawn by chance whose labels, and whose labels by chance, are what others are compared with."""
DRAWS = 5
"""Times that each of them at each polarity is shifted, and other labels that it is given."""
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
    store.check(model.fingerprint, model.name, model.dtype_name)
    if store.by != "activation":
        raise StoreError(f"{store.path} is an index by {store.by}, and labels are of activations; use another --store.")
    have = store.meanings(neurons)
    wanted = sorted({neuron for neuron in neurons if (neuron, "+") not in have}, key=lambda n: (n.layer, n))
    if not wanted:
        return
    parts = prepared(model, store, seed)
    groups = [wanted[start : start + GROUP] for start in range(0, len(wanted), GROUP)]
    total = sum(len(sample.ids) for sample in parts.values()) * len(groups) + len(wanted)
    advance = _counting(total, on_progress)
    for group in groups:
        read_of, known = activations(model, store, parts, group, seed, advance)
        found: list[Meaning] = []
        for row, neuron in enumerate(group):
            promoted = writes(store, neuron)
            for polarity, values in both_signs(read_of, row):
                found.append(_meaning(store, parts, (neuron, polarity), values, promoted[polarity], known))
            advance(1)
        store.set_meanings(_with_writes(model, found, {neuron: writes(store, neuron) for neuron in group}))


def _with_writes(
    model: Model, found: Sequence[Meaning], promoted: dict[Neuron, dict[str, tuple[str, ...]]]
) -> list[Meaning]:
    """The neurons whose labels hold are driven, to see whether they write what they read."""
    clear = [meaning for meaning in found if meaning.clear]
    rows: list[Row] = []
    for meaning in clear:
        label = Label.from_dict(meaning.record["label"])
        rows.append((meaning.neuron, meaning.polarity, {"label": label}, promoted[meaning.neuron][meaning.polarity]))
    able = model.generates and model.task.stacks == 1
    tested_of = dict(zip(map(id, clear), tested(model, rows) if able else [None] * len(rows), strict=True))
    return [replace(m, record={**m.record, "writes": tested_of[id(m)]}) if id(m) in tested_of else m for m in found]


def _counting(total: int, on_progress: Callable[[int, int], None]) -> Callable[[int], None]:
    done = [0]

    def advance(count: int) -> None:
        done[0] += count
        on_progress(done[0], total)

    return advance


def both_signs(read_of: dict[str, np.ndarray], row: int) -> list[tuple[str, Values]]:
    """polarity and its values, of one of the neurons read."""
    return [(p, {part: sign * x[row] for part, x in read_of.items()}) for p, sign in (("+", 1), ("-", -1))]


def activations(
    model: Model,
    store: Store,
    parts: dict[str, Sample],
    neurons: Sequence[Neuron],
    seed: int,
    advance: Callable[[int], None] = lambda sentences: None,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """part -> (P, N) of the neurons; and what chance gives, which is measured in the same passes the first time."""
    name = f"labels {seed}"
    known = store.control(name)
    drawn = [] if known else _drawn(store, seed)
    found = {part: read(model, sample, [*neurons, *drawn], advance) for part, sample in parts.items()}
    if known is None:
        of_drawn = {part: x[len(neurons) :] for part, x in found.items()}
        store.set_control(name, _controls(store, parts, drawn, of_drawn, seed))
        known = store.control(name)
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


# --- one label ------------------------------------------------------------------------------------------


def choose(labels: Sequence[Label], fired: dict[str, Fires]) -> Chosen:
    """The label that does best on the part to choose on: the best one by token or the best one by sentence, whichever
    has the higher score of those that pass their bar, or comes nearest to it."""
    found = best_of(labels, fired["choose"]) or best_of(labels, fired["choose"], responding=False)
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
    """Those of the documents to make labels on."""
    return [example for example in store.examples(*pair) if part_of(example.sentence.title) == "make"]


def own_evidence(store: Store, sample: Sample, pair: Pair, values: np.ndarray, promoted: Sequence[str]) -> Evidence:
    examples = examples_of(store, pair)
    places: list[Place] = [(example.sentence.tokens, example.token) for example in examples]
    return evidence(sample, values, places, marked(examples), promoted)


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


# --- what chance gives ----------------------------------------------------------------------------------


def _drawn(store: Store, seed: int) -> list[Neuron]:
    """Neurons by chance, of all layers and sites of the index."""
    count = store.count("neurons")
    ids = np.random.default_rng(seed).choice(count, min(CONTROLS, count), replace=False)
    return list(store.neurons(sorted(ids.tolist())).values())


def shifted(sample: Sample, values: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Activations moved onto other documents, in their order."""
    count = int(sample.counted.sum())
    found = values.copy()
    found[sample.counted] = np.roll(values[sample.counted], int(generator.integers(count // 4, 3 * count // 4)))
    return found


def by_chance(
    store: Store, parts: dict[str, Sample], pair: Pair, values: Values, promoted: Sequence[str], seed: str
) -> tuple[list[Label], dict[str, Fires]] | None:
    """Shifted activations, and the candidates that are made of them."""
    name = f"{pair[0]} {pair[1]} {seed}"
    generator = np.random.default_rng(list(hashlib.blake2b(name.encode(), digest_size=16).digest()))
    moved = {part: shifted(sample, values[part], generator) for part, sample in parts.items()}
    fired = fired_in(parts, moved)
    if fired is None:
        return None
    sample = parts["make"]
    # As many examples as its own, anywhere.
    rows = generator.choice(np.flatnonzero(sample.counted), len(examples_of(store, pair)))
    places: list[Place] = [(sample.sentences[sample.sentence[row]].tokens, int(sample.position[row])) for row in rows]
    return kinds.candidates(evidence(sample, moved["make"], places, (), promoted)), fired


def _controls(
    store: Store,
    parts: dict[str, Sample],
    drawn: Sequence[Neuron],
    read_of: dict[str, np.ndarray],
    seed: int,
) -> dict[str, Any]:
    """Of neurons drawn by chance: their labels; margins of labels of shifted activations; margins of the labels of
    others of them, on their own activations."""
    labels: list[tuple[Pair, Chosen]] = []
    fired_of: dict[Pair, dict[str, Fires]] = {}
    shifts: list[float] = []
    for row, neuron in enumerate(drawn):
        promoted = writes(store, neuron)
        for polarity, values in both_signs(read_of, row):
            pair, fired = (neuron, polarity), fired_in(parts, values)
            if fired is not None:
                made_of = own_evidence(store, parts["make"], pair, values["make"], promoted[polarity])
                labels.append((pair, choose(kinds.candidates(made_of), fired)))
                fired_of[pair] = fired
            nulls = (by_chance(store, parts, pair, values, promoted[polarity], f"{seed} {n}") for n in range(DRAWS))
            shifts += [choose(*null).margin for null in nulls if null is not None]
    kept = [{"neuron": str(pair[0]), "polarity": pair[1], **_kept(parts, chosen)} for pair, chosen in labels]
    others = []
    for pair, chosen in labels:
        nearest = other_labels(kept, parts, pair, chosen)
        others += [judged(other, chosen.by, fired_of[pair]).margin for other in nearest]
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
    chosen = choose(kinds.candidates(own_evidence(store, parts["make"], pair, values["make"], promoted)), fired)
    return scored(parts, pair, chosen, fired, values, known)


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
    nulls = {name: known[name] for name in ("shifted", "other")}
    p = max(scores.p_value(chosen.margin, null) for null in nulls.values())
    others = other_labels(known["labels"], parts, pair, chosen)
    record = {
        **chosen.to_dict(),
        **scores.responsiveness(label, own, by),
        "hard": _number(scores.hard(label, own, by)),
        "table": scores.table([(parts[part], values[part]) for part in ("make", "choose")], own)["token"],
        "detection": scores.detection(label, own),
        "other": judged(others[0], by, fired).reported if others else None,
        "bars": {
            name: 0.5 + float(np.quantile(null, 0.95)) * (scores.BARS[by] - 0.5) for name, null in nulls.items() if null
        },
        "sentences": {part: len(sample.ids) for part, sample in parts.items()},
        "examples": held_out(label, own),
    }
    return Meaning(*pair, label.kind, kinds.text(label), by, chosen.reported, p, clears(chosen, known), record)


def clears(chosen: Chosen, known: dict[str, Any]) -> bool:
    """Whether it passes its bar and 95 % of what chance gives."""
    nulls = [known[name] for name in ("shifted", "other") if known[name]]
    return chosen.margin >= 1 and all(chosen.margin > np.quantile(null, 0.95) for null in nulls)


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
