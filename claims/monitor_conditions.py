"""Monitors under conditions: how often one flags texts with and without its concept, at the threshold as it was set."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from icebear.claims.conditions import AUTO, TEMPLATES, Condition, conditions_of, whole_number
from icebear.claims.rephrasing import by_template, read_paraphrases
from icebear.claims.under_conditions import Load, again, model_under, same_shape, threads
from icebear.concepts.statistics import auroc
from icebear.errors import IcebearError, InputError, known_error
from icebear.models.model import Model
from icebear.records import InNotebooks
from icebear.render import literal, page, percent, render
from icebear.result_files import SavedResult
from icebear.steering.concept.detectors import Detector
from icebear.steering.concept.finding import vectors_of
from icebear.steering.concept.reading import read
from icebear.steering.concept.texts import prepared
from icebear.steering.monitor.controls import BagOfWords
from icebear.steering.monitor.monitor import AS_GOOD, BAG, Monitor
from icebear.steering.monitor.text_values import interval, text_values, threshold_of
from icebear.steps import OnProgress, counting, unwatched
from icebear.values import several, text_of, typed

PLAIN = "plain run"
FOLDS = 5
"""The bag of words learns from the texts of all folds but the one that it is measured on."""
NO_EFFECT = "A monitor has no random control, so a seed changes nothing."
NO_NEURONS = "A server gives no activations of neurons; load its weights with model=FOLDER."
COLUMNS_SHOWN = ("", "with the concept", "without it", "AUROC", "threshold that keeps the rate", "flagged there")

Texts = tuple[tuple[str, ...], tuple[str, ...]]
"""With the concept, and without it."""


@dataclass(frozen=True)
class FlaggedTexts:
    """How many texts a detector flags at a threshold."""

    true_positives: int
    positives: int
    false_positives: int
    negatives: int
    auroc: float
    keeping: float
    """The threshold at which as few of the texts without the concept are flagged as the monitor was set to."""
    true_positives_keeping: int

    @classmethod
    def of(cls, values: np.ndarray, positives: int, threshold: float, fpr: float) -> FlaggedTexts:
        """values (S,): of texts with the concept, then without it."""
        with_it, without = values[:positives], values[positives:]
        keeping, _ = threshold_of(without, fpr)
        flagged, wrongly, kept_flagged = (
            int(each.sum()) for each in (with_it > threshold, without > threshold, with_it > keeping)
        )
        area = auroc(values, np.arange(len(values)) < positives)
        return cls(flagged, len(with_it), wrongly, len(without), area, keeping, kept_flagged)

    @property
    def true_interval(self) -> tuple[float, float]:
        """The exact 95 % interval of the true positive rate."""
        return interval(self.true_positives, self.positives)

    @property
    def false_interval(self) -> tuple[float, float]:
        return interval(self.false_positives, self.negatives)


@dataclass(frozen=True)
class MonitorRun:
    """A monitor under a condition."""

    condition: str
    flagged: FlaggedTexts | None
    """None if it did not run."""
    why: str = ""
    """Why it did not run, or does not hold, in a sentence."""

    @property
    def failed(self) -> bool:
        return self.flagged is not None and bool(self.why)


@dataclass(frozen=True, repr=False)
class CheckedMonitor(SavedResult, InNotebooks):
    """A monitor, measured again in a plain run and under conditions."""

    name: str
    unit: str
    threshold: float
    limit: float
    """The upper limit of its false positive rate, as it was set."""
    runs: tuple[MonitorRun, ...]
    """The first one is the plain run."""
    bag: FlaggedTexts | None
    """A bag of words on the same texts; None if they are too few."""

    @property
    def passed(self) -> bool:
        """Whether the plain run was measured, and holds."""
        return self.runs[0].flagged is not None and not self.runs[0].failed

    @property
    def passed_everywhere(self) -> bool:
        """Whether no run failed."""
        return self.passed and not any(run.failed for run in self.runs)

    def summary(self) -> list[str]:
        """Say in sentences where it holds, and whether a bag of words does as well."""
        failed = [run.condition for run in self.runs if run.failed]
        lacking = [run.condition for run in self.runs if run.flagged is None]
        hold = [run.condition for run in self.runs if run.condition not in (*failed, *lacking)]
        lines = [f"{self.name} (a {self.unit} is flagged above {self.threshold:.2f}) holds in {len(hold)} of "]
        lines[0] += f"{len(self.runs) - len(lacking)} runs."
        for what, names in (("Holds", hold), ("Does not hold", failed), ("Not measured", lacking)):
            lines += [f"{what}: {', '.join(names)}."] if names else []
        plain = self.runs[0].flagged
        if plain and self.bag and self.bag.auroc >= plain.auroc - AS_GOOD:
            lines.append(f"A bag of words does as well (AUROC {self.bag.auroc:.2f}, this monitor {plain.auroc:.2f}).")
        return lines

    def reasons(self) -> list[str]:
        return [f"{run.condition}: {run.why}" for run in self.runs if run.why]

    def lines(self) -> list[list[str]]:
        """Return the rows of the table, with the columns of `COLUMNS_SHOWN`."""
        rows = [[run.condition, *cells(run.flagged)] for run in self.runs]
        return [*rows, [BAG, *cells(self.bag)]]

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        runs = [{"condition": r.condition, "failed": r.failed, "why": r.why, **numbers(r.flagged)} for r in self.runs]
        facts = {"monitor": self.name, "unit": self.unit, "threshold": self.threshold, "limit": self.limit}
        ends = {"passed": self.passed, "passed_everywhere": self.passed_everywhere}
        return {**facts, **ends, "conditions": runs, "bag_of_words": numbers(self.bag)}

    def to_markdown(self) -> str:
        """Return the table in Markdown, with where it holds, and the reasons of where it does not."""
        failed = {run.condition for run in self.runs if run.failed}
        rows = [f"| {' | '.join(COLUMNS_SHOWN)} |", f"| --- |{' ---: |' * (len(COLUMNS_SHOWN) - 1)}"]
        for name, *texts in self.lines():
            label = f"**{literal(name)}**" if name in failed else literal(name)
            rows.append(f"| {' | '.join([label, *texts])} |")
        below = [f"- {literal(line)}" for line in [*self.summary(), *self.reasons()]]
        return "\n".join([*rows, "", *below]) + "\n"

    def to_html(self) -> str:
        """Return the same as a self-contained page."""
        failed = [run.failed for run in self.runs] + [False]
        rows = list(zip(self.lines(), failed, strict=True))
        names: dict[str, Any] = {"headings": COLUMNS_SHOWN, "rows": rows}
        body = render("icebear.claims/monitor.html", **names, lines=self.summary(), reasons=self.reasons())
        return str(page(f"{self.name} under conditions", body))


def cells(flagged: FlaggedTexts | None) -> list[str]:
    """Return the counts with their intervals, AUROC, and the threshold that keeps the rate; - where nothing ran."""
    if flagged is None:
        return ["-"] * (len(COLUMNS_SHOWN) - 1)
    with_it = f"{flagged.true_positives} of {flagged.positives} ({percent(*flagged.true_interval)})"
    without = f"{flagged.false_positives} of {flagged.negatives} ({percent(*flagged.false_interval)})"
    kept_flagged = f"{flagged.true_positives_keeping} of {flagged.positives}"
    return [with_it, without, f"{flagged.auroc:.2f}", f"{flagged.keeping:.2f}", kept_flagged]


def numbers(flagged: FlaggedTexts | None) -> dict[str, Any]:
    """Return the counts and their intervals, JSON-ready; empty where nothing ran."""
    if flagged is None:
        return {}
    limits = {"true_interval": list(flagged.true_interval), "false_interval": list(flagged.false_interval)}
    return {**vars(flagged), **limits}


@typed
def check_monitor(
    model: Model,
    monitor: Monitor,
    examples: Sequence[str] = (),
    others: Sequence[str] = (),
    under: Sequence[str | Condition] = (),
    on_progress: OnProgress = unwatched,
) -> CheckedMonitor:
    """Measure how often a monitor flags texts, in a plain run and under conditions.

    Parameters
    ----------
    model : Model
        The model that the monitor is checked in.
    monitor : Monitor
    examples, others : sequence of str
        Texts with and without the concept that did not find it; by default, its held-out texts.
    under : sequence of str
        Conditions, as of `check`.
    on_progress : callable
        Called with (done, total) runs.

    Returns
    -------
    CheckedMonitor
        With a run for each condition; ``paraphrases=auto`` has one for each template.

    Raises
    ------
    InputError
        Without texts, and for an unknown condition.
    """
    texts = checked_texts(monitor, several(examples), several(others))
    return monitor_under(model, partial(again, model), monitor, texts, conditions_of(several(under)), on_progress)


def checked_texts(monitor: Monitor, examples: Sequence[str], others: Sequence[str]) -> Texts:
    """Return the texts that a monitor is measured on. Raises `InputError` without any."""
    if bool(examples) is not bool(others):
        raise InputError("A monitor is measured on texts with the concept and without it; give both, or neither.")
    if not examples:
        if monitor.held_out is None:
            raise InputError(f"The monitor {monitor.name!r} has no held-out texts; give texts with and without it.")
        return monitor.held_out
    with_it, without = (
        tuple(dict.fromkeys(filter(None, (text_of(text).strip() for text in texts)))) for texts in (examples, others)
    )
    if both := set(with_it) & set(without):
        raise InputError(f"{len(both)} texts are in both lists, such as {min(both)[:40]!r}; remove them from one list.")
    return with_it, without


def monitor_under(
    model: Model,
    load: Load,
    monitor: Monitor,
    texts: Texts,
    conditions: Sequence[Condition],
    on_progress: OnProgress = unwatched,
) -> CheckedMonitor:
    """Measure a monitor in a model, and under each condition. Raises `InputError` for a file that cannot be read."""
    reworded = [(each, texts_under(each, texts)) for each in conditions]
    step = counting(on_progress, 1 + len(conditions))
    plain = _run(monitor, PLAIN, texts, model)
    step(1)
    runs = [plain]
    for condition, versions in reworded:
        runs += _runs(model, load, monitor, condition, versions, plain.flagged)
        step(1)
    bag = bag_of_words(texts, monitor.fpr)
    return CheckedMonitor(monitor.name, monitor.unit, monitor.threshold, monitor.interval[1], tuple(runs), bag)


def texts_under(condition: Condition, texts: Texts) -> dict[str, Texts]:
    """Return the texts under a condition, by the name of the run: as they are, or reworded."""
    if condition.kind != "paraphrases":
        return {condition.label: texts}
    if condition.value == AUTO:
        by_name = {f"{condition}, {name}": by_template(template) for name, template in TEMPLATES.items()}
        reworded = ((name, [tuple(map(worded, part)) for part in texts]) for name, worded in by_name.items())
        return {name: (with_it, without) for name, (with_it, without) in reworded}
    lines = read_paraphrases(condition.value)
    with_it, without = (tuple(line.paraphrase for line in lines if line.prompt in part) for part in texts)
    return {condition.label: (with_it, without)}


def _runs(
    model: Model,
    load: Load,
    monitor: Monitor,
    condition: Condition,
    versions: dict[str, Texts],
    plain: FlaggedTexts | None,
) -> list[MonitorRun]:
    if why := {"seed": NO_EFFECT, "url": NO_NEURONS}.get(condition.kind):
        return [MonitorRun(condition.label, None, why)]
    try:
        changed = model_under(condition, model, load)
    except IcebearError as error:
        return [MonitorRun(condition.label, None, str(error))]
    with threads(whole_number(condition.value)) if condition.kind == "threads" else nullcontext():
        named_in = model if condition.kind == "model" else None
        return [_run(monitor, name, texts, changed, plain, named_in) for name, texts in versions.items()]


def _run(
    monitor: Monitor,
    name: str,
    texts: Texts,
    model: Model,
    plain: FlaggedTexts | None = None,
    named_in: Model | None = None,
) -> MonitorRun:
    """Measure a monitor on texts. named_in: the model whose parts it names, if this is another one."""
    detector, threshold = monitor.detector, monitor.threshold
    try:
        if not all(texts):
            raise InputError("It has no paraphrase of a text with the concept, or of one without it.")
        if named_in is not None and not same_shape(named_in, model):
            detector, threshold, texts = refitted(model, monitor, texts, named_in.name)
        values = text_values(model, [detector], [*texts[0], *texts[1]], monitor.unit)[0]
    except (IcebearError, RuntimeError) as error:
        return MonitorRun(name, None, " ".join(str(known_error(error) or error).split()))
    flagged = FlaggedTexts.of(values, len(texts[0]), threshold, monitor.fpr)
    return MonitorRun(name, flagged, _why(monitor, flagged, plain))


def _why(monitor: Monitor, flagged: FlaggedTexts, plain: FlaggedTexts | None) -> str:
    """Say why a monitor does not hold: it surely flags too many texts without the concept, or fewer with it."""
    if flagged.false_interval[0] > monitor.interval[1]:
        rate = f"at least {percent(flagged.false_interval[0])} of texts without the concept"
        return f"It flags {rate} (95 % interval); its limit is {percent(monitor.interval[1])}."
    if plain and flagged.true_interval[1] < plain.true_positives / plain.positives:
        rate = f"at most {percent(flagged.true_interval[1])} of texts with the concept"
        return f"It flags {rate} (95 % interval), in the plain run {percent(plain.true_positives / plain.positives)}."
    return ""


def refitted(model: Model, monitor: Monitor, texts: Texts, named_in: str) -> tuple[Detector, float, Texts]:
    """Fit a monitor's vector again in a model of another shape: half of the texts fit it, a quarter chooses the layer,
    the last quarter measures. The texts without the concept of the first two set the threshold. Raises `InputError` for
    a monitor of neurons, and for few texts. named_in: the name of the monitor's model."""
    if monitor.vector is None:
        raise InputError(f"It names neurons of {named_in}, and {model.name} has another architecture or shape.")
    every, positive, part = prepared(*texts, 0)
    fits = {each.fit: each for each in vectors_of(read(model, every, []).stream, positive, part)}
    chosen = fits[monitor.vector.fit]
    setting = [every[row] for row in np.flatnonzero((part < 2) & ~positive)]
    threshold, _ = threshold_of(text_values(model, [chosen], setting, monitor.unit)[0], monitor.fpr)
    tests = tuple(tuple(every[row] for row in np.flatnonzero((part == 2) & (positive == kind))) for kind in (1, 0))
    return chosen, threshold, (tests[0], tests[1])


def bag_of_words(texts: Texts, fpr: float) -> FlaggedTexts | None:
    """Return what a bag of words flags that has not learned from the text that it judges. Its threshold is set by the
    texts without the concept. None for fewer than two texts of a kind."""
    every, counts = [*texts[0], *texts[1]], [len(part) for part in texts]
    if min(counts) < 2:
        return None
    positive = np.arange(len(every)) < counts[0]
    fold = np.concatenate([np.arange(count) % min(FOLDS, *counts) for count in counts])
    values = np.empty(len(every))
    for number in np.unique(fold):
        learned = fold != number
        bag = BagOfWords.fit([text for text, used in zip(every, learned, strict=True) if used], positive[learned])
        values[~learned] = bag([text for text, used in zip(every, learned, strict=True) if not used])
    threshold, _ = threshold_of(values[counts[0] :], fpr)
    return FlaggedTexts.of(values, counts[0], threshold, fpr)
