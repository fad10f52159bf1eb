"""`monitor`: set the threshold of a concept's detector by texts without the concept.

1. The value of a text is the largest mean of one of its units (tokens, sentences, or the whole text).
2. Of n texts that took no part in finding the concept, the threshold is the value of the (x + 1)-th largest, where x is
   the largest number with (x + 1) / (n + 1) <= fpr. Then the expected false positive rate of such texts is at most fpr
   (Vovk, Gammerman and Shafer 2005), and the rate is distributed as Beta(x + 1, n - x) (Wilks 1941). So the interval
   of Clopper and Pearson of x in n holds, although the same texts set the threshold.
3. The concept's own test texts say how many texts with it are flagged, and how many without, beside the same numbers of
   controls (`icebear.steering.monitor.controls`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from icebear.errors import InputError
from icebear.models.model import Model
from icebear.steering.concept.concept import Concept
from icebear.steering.concept.detectors import DETECTORS, ConceptVector
from icebear.steering.monitor.controls import Shifts, control_detectors, with_rates
from icebear.steering.monitor.monitor import Monitor
from icebear.steering.monitor.text_values import UNITS, interval, text_values, threshold_of
from icebear.steps import OnProgress, unwatched
from icebear.values import one_of, real, several, text_of, typed

LARGEST_FACTOR = 3
"""With no false positive among the negatives, the upper limit of the rate may be this multiple of what was asked."""


@typed
def monitor(
    model: Model,
    concept: Concept,
    negatives: Sequence[str],
    fpr: float = 0.01,
    unit: str = "sentence",
    detector: str = "neurons",
    shifts: Shifts | None = None,
    on_progress: OnProgress = unwatched,
) -> Monitor:
    """Make a monitor of a concept, with a threshold that few texts without the concept pass.

    Parameters
    ----------
    model
        The model that the concept was found in.
    concept
        A concept of `find_concept`, whose test texts measure the monitor; one that was made by hand is not measured.
    negatives
        Texts without the concept that did not find it, at least 122 for a rate of 0.01 and 23 for 0.05. They should be
        like the texts that the monitor will read.
    fpr
        The false positive rate: the share of such texts that may be flagged.
    unit
        What is flagged: a ``sentence``, a ``token``, or a whole ``message``.
    detector
        ``neurons``, or the residual stream's vector: ``means`` or ``logistic``.
    shifts
        Name -> (texts with the concept, texts without it), of another domain, language or length. The monitor is
        measured on them, too.
    on_progress
        Called with (done, total) texts.

    Returns
    -------
    Monitor
        Its `rates` have the true and false positive rate and the AUROC, beside controls, on held-out texts and under
        shift.

    Raises
    ------
    InputError
        For too few negatives, or such that found the concept; for another model; for a concept without the detector.

    References
    ----------
    Order statistics as limits: Wilks 1941. Interval: Clopper & Pearson 1934.
    """
    concept.check_usable(model)
    real(fpr, "The false positive rate", 1e-6, 0.3)
    one_of(unit, "unit", UNITS)
    chosen = concept.detector(one_of(detector, "detector", DETECTORS))
    texts = fresh(negatives, concept, fpr)
    names, detectors = zip(("monitor", chosen), *control_detectors(concept, chosen), strict=True)
    scores = text_values(model, detectors, texts, unit, on_progress)
    threshold, above = threshold_of(scores[0], fpr)
    neurons, vector = ((), chosen) if isinstance(chosen, ConceptVector) else (chosen, None)
    result = Monitor(
        concept.name,
        unit,  # type: ignore[arg-type]
        threshold,
        float(fpr),
        len(texts),
        above,
        neurons,
        vector,
        model.name,
        model.fingerprint,
        (),
        {"detector": detector, "concept": concept.about, "made_with": model.made_with},
    )
    if not concept.texts:
        return result
    scored = list(zip(names, detectors, scores, strict=True))
    return with_rates(model, result, concept.texts, scored, texts, shifts or {}, on_progress)


def fewest(fpr: float) -> int:
    """Return how many negatives are needed so that none flagged bounds the rate by `LARGEST_FACTOR` times `fpr`."""
    return math.ceil(math.log(0.025) / math.log1p(-min(LARGEST_FACTOR * fpr, 0.999)))


def fresh(negatives: Sequence[str], concept: Concept, fpr: float) -> list[str]:
    """Return the different texts. Raises `InputError` for too few, and for those that found the concept."""
    texts = list(dict.fromkeys(filter(None, (text_of(text).strip() for text in several(negatives)))))
    if concept.texts and (used := {*concept.texts.examples, *concept.texts.others}.intersection(texts)):
        raise InputError(
            f"{len(used)} of the negatives found the concept {concept.name!r}, such as {min(used)[:40]!r}; a rate on "
            "them would be too low, so give other texts without the concept."
        )
    if len(texts) < fewest(fpr):
        limit = interval(0, len(texts))[1] if texts else 1
        raise InputError(
            f"A false positive rate of {fpr:g} needs at least {fewest(fpr)} different texts without the concept. With "
            f"{len(texts)}, of which none is flagged, it may be {limit:.2g}; add texts, or ask for a larger rate."
        )
    return texts
