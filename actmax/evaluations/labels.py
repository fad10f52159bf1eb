"""Evaluation: how many neurons have a clear meaning, and what each kind of label tells, beside chance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np

from icebear.actmax.labels import kinds, scores
from icebear.actmax.labels.auto import activations, check, prepared
from icebear.actmax.labels.choice import Chosen, best_of, choose, judged, the_better
from icebear.actmax.labels.kinds import Label
from icebear.actmax.labels.null import Nulls, nulls, other_labels, p_value, significant
from icebear.actmax.labels.sample import Sample
from icebear.actmax.labels.scores import Fires
from icebear.actmax.labels.side import Side, sides
from icebear.concepts.evaluation.protocol import Evaluation, Option, Part, Seed, Table
from icebear.concepts.models.model import Model
from icebear.convert import CONVERTER
from icebear.db.store import Store, open_store
from icebear.records import Neuron

THIRDS = ("first third", "middle third", "last third")
TABLE = "mean of each token"
METHODS = ("label", *kinds.KINDS, "shifted", "another neuron's", TABLE)
COLUMNS = {
    "token": "AUROC for the 1 % of tokens that drive the neuron furthest, of the best candidate by token",
    "sentence": "AUROC for the 5 % of sentences whose mean is largest, of the best candidate by sentence",
    "clear": "share that passes its bar (0.85 by token, else 0.70 by sentence) and 95 % of what chance gives",
    "0.6": "share whose score, by what it was chosen by, is 0.6 or more",
    "0.7": "the same, 0.7",
    "0.8": "the same, 0.8",
    "train": "that score on the documents that the label was made from",
    "validation": "and on those that it was chosen on",
}
CHANCE = {
    "token": 0.5,
    "sentence": 0.5,
    "clear": 0.0,
    "0.6": 0.0,
    "0.7": 0.0,
    "0.8": 0.0,
    "train": 0.5,
    "validation": 0.5,
}
"""Of a kind that has no candidate."""


@dataclass(frozen=True)
class Labels(Evaluation):
    """How many neurons have a significant label, and how well each kind of label predicts activations, with controls.

    On documents that the labels were neither made nor chosen from. Each third of the layers has a folder in --out.

    Example:
      icebear evaluate labels --neurons 10 --out labels --store wiki.db
    """

    name: ClassVar = "labels"
    needs: ClassVar = ("evaluate", "index")
    neurons: Annotated[int, Option("Of each third of the layers.", least=1)] = 200
    seed: Seed = 0
    store: Annotated[str, Option(decides=False)] = "icebear.db"

    def parts(self, model: Model) -> Iterator[Part]:
        with open_store(self.store) as store:
            check(model, store)
            samples, index = prepared(model, store, self.seed), store.made_with()["index"]
            for third, drawn in neurons(store, self.neurons, self.seed).items():
                yield Part(
                    COLUMNS,
                    drawn,
                    partial(measure, model, store, samples, seed=self.seed),
                    name=third,
                    together=self.neurons,
                    methods={name: name for name in METHODS},
                    settings={"index": index},
                    tables=lambda lines: {"": Table(COLUMNS, pairs(lines))},
                    notes=notes,
                )


def neurons(store: Store, samples: int, seed: int) -> dict[str, list[Neuron]]:
    """Of each third of the layers, neurons drawn by chance."""
    every = store.neurons.all()
    last = max(neuron.layer for neuron in every) + 1
    generator, drawn = np.random.default_rng(seed), {}
    for number, name in enumerate(THIRDS):
        able = [n for n in every if number * last <= 3 * n.layer < (number + 1) * last]
        places = generator.permutation(len(able))[:samples]
        drawn[name] = [able[place] for place in sorted(places.tolist())]
    return {name: rows for name, rows in drawn.items() if rows}


def measure(
    model: Model,
    store: Store,
    parts: dict[str, Sample],
    group: Sequence[Neuron],
    seed: int,
    advance: Callable[[int], None] = lambda sentences: None,
) -> list[dict[str, Any]]:
    """A line a neuron: its pairs, of those polarities that it goes to."""
    values, known = activations(model, store, parts, group, seed, advance)
    rows: dict[Neuron, list[dict[str, Any]]] = {neuron: [] for neuron in group}
    for side in sides(store, parts, group, values):
        if side.active:
            name = f"{side.neuron} {side.polarity}"
            voita = store.neurons.classes(side.neuron)[side.polarity]
            rows[side.neuron].append({"pair": name, "class": voita, **_measured(side, known)})
    return [{"neuron": str(neuron), "pairs": pairs} for neuron, pairs in rows.items()]


def _measured(side: Side, known: dict[str, Any]) -> dict[str, Any]:
    labels, fired = side.candidates(), side.fired
    chosen = choose(labels, fired)
    other = next(iter(other_labels(known["labels"], side, chosen)), None)
    moved = side.shifted("evaluated")  # another draw than those of the nulls
    learnt = [fired["train"], fired["validation"]]
    test, *own = (scores.table(learnt, fired[part]) for part in ("test", "train", "validation"))
    by_chance = nulls(known, side.neuron)
    methods = {"label": _of_labels(labels, fired, by_chance)}
    for kind in kinds.KINDS:
        methods[kind] = _of_labels([label for label in labels if label.kind == kind], fired, by_chance)
    methods["shifted"] = _of_labels(moved.candidates(), moved.fired, by_chance) if moved.active else CHANCE
    methods["another neuron's"] = CHANCE
    if other is not None:
        judgement = judged(other, chosen.by, fired)
        methods["another neuron's"] = {**scores.detection(other, fired["test"]), **_of_chosen(judgement, by_chance)}
    methods[TABLE] = _of_scores(test, *own)
    labels_of = {"label": chosen.label} | ({"other": other} if other else {})
    return {
        "kind": chosen.label.kind,
        "by": chosen.by,
        "p": p_value(chosen, by_chance),
        "labels": CONVERTER.unstructure(labels_of),
        "methods": methods,
    }


def _of_labels(labels: Sequence[Label], fired: dict[str, Fires], by_chance: Nulls) -> dict[str, float]:
    best = best_of(labels, fired["validation"])
    if not best:
        return CHANCE
    each = {by: judged(label, by, fired).test for by, (label, _) in best.items()}
    return {**CHANCE, **each, **_of_chosen(the_better(best, fired), by_chance)}


def _of_chosen(chosen: Chosen, by_chance: Nulls) -> dict[str, float]:
    other_parts = {"train": chosen.train, "validation": chosen.validation, **_shares_over(chosen.test)}
    return {"clear": float(significant(chosen, by_chance)), **other_parts}


def _of_scores(test: dict[str, float], train: dict[str, float], validation: dict[str, float]) -> dict[str, float]:
    """Of the table, by token; against its bar alone."""
    clear = float(any(test[by] >= scores.BARS[by] for by in test))
    other_parts = {"train": train["token"], "validation": validation["token"]}
    return {**test, "clear": clear, **other_parts, **_shares_over(test["token"])}


def _shares_over(score: float) -> dict[str, float]:
    return {f"{bar}": float(score >= bar) for bar in (0.6, 0.7, 0.8)}


def pairs(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [pair for line in lines for pair in line["pairs"]]


def notes(lines: Sequence[dict[str, Any]]) -> list[str]:
    """What the table does not say: how many hold together, by class and kind; and what own documents flatter."""
    rows = pairs(lines)
    clear = np.array([row["methods"]["label"]["clear"] for row in rows], dtype=bool)
    holding = int((np.array(scores.accepted([row["p"] for row in rows])) & clear).sum())
    return [
        f"{len(lines)} neurons, of which {len(rows)} of {2 * len(lines)} (neuron, sign) are gone to",
        f"clear, and accepted of all {len(rows)} together (Benjamini-Hochberg at 5 %): {holding / len(rows):.0%}",
        f"clear by class: {_shares(rows, clear, 'class')}",
        f"clear by the kind that was chosen: {_shares(rows, clear, 'kind')}",
        f"labels score {_flattery(rows, 'train')} higher on the documents that they were made from, "
        f"{_flattery(rows, 'validation')} on those that they were chosen on",
    ]


def _shares(rows: Sequence[dict[str, Any]], clear: np.ndarray, by: str) -> str:
    names = sorted({row[by] for row in rows})
    groups = {name: clear[[row[by] == name for row in rows]] for name in names}
    return ", ".join(f"{name} {inside.mean():.0%} of {len(inside)}" for name, inside in groups.items())


def _flattery(rows: Sequence[dict[str, Any]], part: str) -> str:
    gains = np.array([row["methods"]["label"][part] - row["methods"]["label"][row["by"]] for row in rows])
    return f"{gains.mean():.3f} ± {gains.std(ddof=1) / len(gains) ** 0.5:.3f}"
