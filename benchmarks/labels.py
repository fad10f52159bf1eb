"""Measure how many neurons have a significant label, and how well labels predict, with controls.

python benchmarks/labels.py --neurons 200 --out labels --store wiki.db
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np
import pandas

from icebear.actmax.labels.auto import measure_activations
from icebear.actmax.labels.choice import Candidates, Chosen, better_of, score_parts
from icebear.actmax.labels.nulls import RandomNeuronNulls
from icebear.actmax.labels.sample import SPLITS, Sample, prepare_samples
from icebear.actmax.labels.scores import score, token_mean_baseline
from icebear.actmax.labels.sides import Sides, sides, true_share
from icebear.actmax.labels.significance import THRESHOLDS, benjamini_hochberg
from icebear.app.cli.verbs.evaluate import command
from icebear.convert import CONVERTER
from icebear.db.store import Store, open_store
from icebear.evaluation.protocol import Evaluation, Lines, Part, Seed, Setting, Table
from icebear.models.model import Model
from icebear.records import Neuron

THIRDS = ("first third", "middle third", "last third")
SHIFT = "circular shift"
OTHER = "other neuron"
TABLE = "token-mean table"
METHODS = ("label", SHIFT, OTHER, TABLE)
"""The chosen label, both nulls, and the upper baseline."""
BARS = (0.6, 0.7, 0.8)
METRICS = {
    "token": "AUROC for the 1 % of tokens with the largest activations, of the best candidate by token",
    "sentence": "AUROC for the 5 % of sentences with the largest means, of the best candidate by sentence",
    "pattern": "AUROC of the activation for the tokens at which the pattern holds, of the best token pattern",
    "passes": "share of significant labels: above the bar of their unit and 95 % of both nulls",
    **{f"{bar}": f"share whose score, by the unit that it was chosen by, is {bar} or more" for bar in BARS},
    "train": "that score on the train documents",
    "validation": "that score on the validation documents",
}
BATCH = 16
"""The number of neurons that are scored at once."""
NO_LABEL = dict.fromkeys(METRICS, 0.0) | dict.fromkeys(("token", "sentence", "pattern", "train", "validation"), 0.5)


@dataclass(frozen=True)
class Labels(Evaluation):
    """Measure how many neurons have a significant label, and how well labels predict, with controls.

    Labels are scored on test documents only. Each third of the layers has a folder in --out.
    """

    name: ClassVar = "labels"
    neurons: Annotated[int, Setting("Number of neurons from each third of the layers.", least=1)] = 200
    seed: Seed = 0
    store: Annotated[str, Setting(decides=False)] = "icebear.db"

    def parts(self, model: Model) -> Iterator[Part]:
        with open_store(self.store) as store:
            store.check(model.fingerprint, model.name, model.dtype_name)
            samples, index = prepare_samples(model, store, self.seed), store.made_with()["index"]
            for third, drawn in neurons(store, self.neurons, self.seed).items():
                yield Part(
                    METRICS,
                    drawn,
                    partial(label_lines, model, store, samples, seed=self.seed),
                    name=third,
                    batch_size=self.neurons,
                    methods={name: name for name in METHODS},
                    settings={"index": index},
                    tables=lambda lines: {"": Table(METRICS, pairs(lines))},
                    notes=label_notes,
                )


def neurons(store: Store, samples: int, seed: int) -> dict[str, list[Neuron]]:
    """Return random neurons of each third of the layers."""
    every = store.neurons.all_without_heads()
    last = max(neuron.layer for neuron in every) + 1
    generator, drawn = np.random.default_rng(seed), {}
    for number, name in enumerate(THIRDS):
        able = [n for n in every if number * last <= 3 * n.layer < (number + 1) * last]
        drawn_order = generator.permutation(len(able))[:samples]
        if able:
            drawn[name] = [able[index] for index in sorted(drawn_order.tolist())]
    return drawn


def label_lines(
    model: Model, store: Store, parts: dict[str, Sample], group: Sequence[Neuron], seed: int
) -> list[dict[str, Any]]:
    """Return a line for each neuron, with a pair (neuron, polarity) for each polarity at which it is active."""
    values, nulls = measure_activations(model, store, parts, group, seed=seed)
    rows: dict[Neuron, list[dict[str, Any]]] = {neuron: [] for neuron in group}
    for start in range(0, len(group), BATCH):
        span = slice(start, start + BATCH)
        batch = sides(parts, group[span], {part: x[span] for part, x in values.items()})
        for (neuron, polarity), line in zip(batch.names, pair_lines(batch, nulls), strict=True):
            if line:
                rows[neuron].append({"pair": f"{neuron} {polarity}", **line})
    return [{"neuron": str(neuron), "pairs": pairs} for neuron, pairs in rows.items()]


def pair_lines(batch: Sides, nulls: RandomNeuronNulls) -> list[dict[str, Any]]:
    """Return the numbers of each side; nothing for one that is hardly active."""
    shifted = batch.shifted("evaluated")  # another draw than those of the nulls
    best, best_shifted = batch.best(), shifted.best()
    lines: list[dict[str, Any]] = []
    for row, (neuron, _) in enumerate(batch.names):
        if not batch.active[row]:
            lines.append({})
            continue
        chosen = better_of(best[row], batch.top, row)
        other = next(iter(nulls.others(chosen, neuron.layer, true_share(chosen.label, batch))), None)
        methods = {"label": _of_labels(best[row], batch, row, nulls)}
        methods[SHIFT] = _of_labels(best_shifted[row], shifted, row, nulls) if shifted.active[row] else NO_LABEL
        methods[OTHER] = NO_LABEL
        if other is not None:
            both = {unit: score(other, unit, batch.top["test"], row) for unit in THRESHOLDS}
            judgement = score_parts(other, chosen.by, batch.top, row)
            methods[OTHER] = {**both, **_of_chosen(judgement, neuron, nulls)}
        methods[TABLE] = _of_table(batch, row)
        labels = CONVERTER.unstructure({"label": chosen.label} | ({"other": other} if other else {}))
        lines.append({"by": chosen.by, "p": nulls.p_value(chosen, neuron.layer), "labels": labels, "methods": methods})
    return lines


def _of_table(batch: Sides, row: int) -> dict[str, float]:
    learnt = [batch.top["train"], batch.top["validation"]]
    test = {by: token_mean_baseline(learnt, batch.top["test"], row, by) for by in THRESHOLDS}
    train, validation = (token_mean_baseline(learnt, batch.top[part], row, "token") for part in SPLITS[:2])
    return test | _numbers(any(test[by] >= THRESHOLDS[by] for by in test), test["token"], train, validation)


def _of_labels(best: Candidates, batch: Sides, row: int, nulls: RandomNeuronNulls) -> dict[str, float]:
    each = {by: score(label, by, batch.top["test"], row) for by, (label, _) in best.items()}
    return {**NO_LABEL, **each, **_of_chosen(better_of(best, batch.top, row), batch.names[row][0], nulls)}


def _of_chosen(chosen: Chosen, neuron: Neuron, nulls: RandomNeuronNulls) -> dict[str, float]:
    return _numbers(nulls.is_significant(chosen, neuron.layer), chosen.test, chosen.train, chosen.validation)


def _numbers(passes: bool, test: float, train: float, validation: float) -> dict[str, float]:
    over = {f"{bar}": float(test >= bar) for bar in BARS}
    return {"passes": float(passes), **over, "train": train, "validation": validation}


def pairs(lines: Lines) -> list[dict[str, Any]]:
    return [pair for line in lines for pair in line["pairs"]]


def label_notes(lines: Lines) -> list[str]:
    """Return how many labels are significant together, and how much higher scores on the train and validation documents
    are."""
    rows = pairs(lines)
    of_label = pandas.DataFrame(
        [row["methods"]["label"] | {"test": row["methods"]["label"][row["by"]]} for row in rows]
    )
    together = (np.array(benjamini_hochberg([row["p"] for row in rows])) & (of_label.passes > 0)).mean()
    higher = {part: of_label[part] - of_label.test for part in ("train", "validation")}
    on = {part: f"{np.mean(gain):.3f} ± {np.std(gain, ddof=1) / len(gain) ** 0.5:.3f}" for part, gain in higher.items()}
    return [
        f"{len(lines)} neurons, of which {len(rows)} of {2 * len(lines)} (neuron, polarity) are active",
        f"significant for all {len(rows)} together (Benjamini-Hochberg at 5 %): {together:.0%}",
        f"labels score {on['train']} higher on the train documents than on the test documents, {on['validation']} on "
        "the validation documents",
    ]


if __name__ == "__main__":
    command(Labels)()
