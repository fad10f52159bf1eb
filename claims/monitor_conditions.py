"""Monitors under conditions: how often one flags texts with and without its concept, at the threshold as it was set."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from icebear.claims.checked_monitor import CheckedMonitor, FlaggedTexts, MonitorRun
from icebear.claims.conditions import AUTO, TEMPLATES, Condition, conditions_of
from icebear.claims.rephrasing import by_template, read_paraphrases
from icebear.claims.under_conditions import Load, model_under, reload_model, same_shape, threads_of
from icebear.errors import IcebearError, InputError, known_error
from icebear.models.model import Model
from icebear.render import percent
from icebear.steering.concept.detectors import Detector
from icebear.steering.concept.finding import vectors_of
from icebear.steering.concept.reading import read
from icebear.steering.concept.texts import prepared
from icebear.steering.monitor.controls import BagOfWords
from icebear.steering.monitor.monitor import Monitor
from icebear.steering.monitor.text_values import text_values, threshold_of
from icebear.steps import OnProgress, counting, unwatched
from icebear.values import several, text_of, typed

PLAIN = "plain run"
FOLDS = 5
"""The bag of words learns from the texts of all folds but the one that it is measured on."""
NO_EFFECT = "A monitor has no random control, so a seed changes nothing."
NO_NEURONS = "A server gives no activations of neurons; load its weights with model=FOLDER."
Texts = tuple[tuple[str, ...], tuple[str, ...]]
"""With the concept, and without it."""


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
    return monitor_under(
        model, partial(reload_model, model), monitor, texts, conditions_of(several(under)), on_progress
    )


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
        by_name = {f"{condition} ({name})": by_template(template) for name, template in TEMPLATES.items()}
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
    with threads_of(condition):
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
