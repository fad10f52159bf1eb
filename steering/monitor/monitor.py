"""`Monitor`: a detector with a threshold, which flags texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from icebear.convert import Saved
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.models.text.prompts import PromptLike
from icebear.records import Neuron
from icebear.steering.concept.detectors import ConceptNeuron, ConceptVector, Detector, contributions
from icebear.steering.concept.reading import require_counted_positions
from icebear.steering.monitor.text_values import Unit, interval, unit_values
from icebear.values import plural, real, several, typed

NEURONS_NAMED = 5
HELD_OUT = "held-out texts"
BAG = "bag of words"
CONTROLS_TEXT = (
    "Each detector has the threshold that the same negatives give it. Random neurons: mean of 5 sets of as many of the "
    "same layers. Shuffled labels: found like the monitor with the labels of the texts shuffled. Chance is AUROC 0.5."
)
"""What is said below a table of rates."""
AS_GOOD = 0.01
"""A control whose AUROC is at most this much lower does as well."""


@dataclass(frozen=True)
class Passage:
    """A unit of a text whose value is above the threshold."""

    start: int
    stop: int
    """Its tokens are from `start` to before `stop`."""
    text: str
    value: float
    neurons: tuple[tuple[Neuron, float], ...]
    """The neurons that contribute most to the value, with their contributions; none for a vector."""


@dataclass(frozen=True)
class Verdict:
    """What a monitor says about a text."""

    monitor: str
    tokens: tuple[str, ...]
    values: tuple[float, ...]
    """One for each token; 0 for tokens that do not count (the first of a text, and special tokens)."""
    value: float
    """The largest value of a unit, the mean of its tokens."""
    threshold: float
    flags: tuple[Passage, ...]
    """In the order of the text."""

    @property
    def flagged(self) -> bool:
        return bool(self.flags)

    def to_dict(self) -> dict[str, Any]:
        flags = [
            {**vars(flag), "neurons": [[str(neuron), value] for neuron, value in flag.neurons]} for flag in self.flags
        ]
        return {**vars(self), "flagged": self.flagged, "flags": flags}


@dataclass(frozen=True)
class Rate:
    """How often a detector flags texts of one kind, beside the controls."""

    texts: str
    """What the texts are, such as ``held-out texts`` or ``five times longer``."""
    detector: str
    """``monitor``, or a control."""
    true_positive_rate: float
    false_positive_rate: float
    auroc: float
    positives: int
    negatives: int


@dataclass(frozen=True, repr=False)
class Monitor(Saved):
    """A concept's detector with a threshold of a known false positive rate.

    A text is flagged if one of its units (tokens, sentences, or the whole message) has a value above the threshold.
    """

    name: str
    unit: Unit
    threshold: float
    fpr: float
    """The false positive rate that was asked for."""
    negatives: int
    """The texts without the concept that set the threshold."""
    false_positives: int
    """Those of them that are flagged."""
    neurons: tuple[ConceptNeuron, ...]
    vector: ConceptVector | None
    """Instead of neurons."""
    model_name: str
    model_fingerprint: str
    rates: tuple[Rate, ...] = ()
    provenance: dict[str, Any] = field(default_factory=dict)
    held_out: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    """The texts with and without the concept that `rates` are of, if it has them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        real(self.threshold, "The threshold of a monitor")
        if bool(self.neurons) is (self.vector is not None):
            raise InputError("A monitor reads either neurons or a vector; give one of them.")

    @property
    def detector(self) -> Detector:
        return self.vector or self.neurons

    @cached_property
    def interval(self) -> tuple[float, float]:
        """The exact 95 % interval of the false positive rate (Clopper and Pearson 1934)."""
        return interval(self.false_positives, self.negatives)

    def rate(self, texts: str, detector: str = "monitor") -> Rate | None:
        """Return the measured rates on these texts; None if they were not measured."""
        return next((row for row in self.rates if (row.texts, row.detector) == (texts, detector)), None)

    @property
    def about(self) -> list[str]:
        """Say in sentences how often it flags texts with and without the concept, what a bag of words does first."""
        count = plural(len(self.neurons), "neuron")
        of = f"residual stream after layer {self.vector.layer}, {self.vector.fit}" if self.vector else count
        low, high = (f"{100 * limit:.2g}" for limit in self.interval)
        lines = [
            f"{self.name} ({of}; a {self.unit} is flagged above {self.threshold:.2f}) flags {self.false_positives} of "
            f"{self.negatives} texts without the concept: a false positive rate of {low} to {high} % (95 % interval) "
            "on texts like them."
        ]
        held, bag = self.rate(HELD_OUT), self.rate(HELD_OUT, BAG)
        if not (held and bag):
            return [*lines, "It was not measured on texts with the concept, because the concept has no texts."]
        if bag.auroc >= held.auroc - AS_GOOD:
            lines.insert(0, f"A bag of words does as well (AUROC {bag.auroc:.2f}, this monitor {held.auroc:.2f}).")
        flagged = round(held.true_positive_rate * held.positives)
        return [*lines, f"It flags {flagged} of {held.positives} held-out texts with the concept."]

    @typed
    def check(self, model: Model) -> None:
        """Raise `InputError` if this monitor was made in another model."""
        if self.model_fingerprint != model.fingerprint:
            raise InputError(
                f"The monitor {self.name!r} was made in {self.model_name} ({self.model_fingerprint}), not in "
                f"{model.name} ({model.fingerprint}); load {self.model_name}, or make the monitor again."
            )
        for part in self.neurons:
            model.check(part.neuron)

    def measure(self, model: Model, text: PromptLike) -> Verdict:
        """Read a text. Raises `InputError` for a text without a token that counts, and for another model."""
        return self.measures(model, [text])[0]

    def measures(self, model: Model, texts: Sequence[PromptLike]) -> list[Verdict]:
        """Return `measure` of many texts, which are read in batches."""
        self.check(model)
        rows = [model.ids(text) for text in several(texts)]
        (every,) = contributions(model, [self.detector], rows)
        return [
            self.judge(model.pieces(ids), parts, require_counted_positions(model, ids))
            for ids, parts in zip(rows, every, strict=True)
        ]

    def judge(self, pieces: Sequence[str], parts: np.ndarray, counted: Sequence[int]) -> Verdict:
        """Return the verdict of a text of tokens (T) with these contributions (T, n), of which some count."""
        is_counted = np.isin(np.arange(len(pieces)), counted)
        values = np.where(is_counted, parts.sum(1, dtype=np.float64), 0)
        units = unit_values(pieces, values, is_counted, self.unit)
        flags = tuple(
            self._flag(pieces, parts[start:stop][is_counted[start:stop]], start, stop, value)
            for start, stop, value in units
            if value > self.threshold
        )
        largest = max((value for *_, value in units), default=0.0)
        return Verdict(self.name, tuple(pieces), tuple(values.tolist()), largest, self.threshold, flags)

    def _flag(self, pieces: Sequence[str], parts: np.ndarray, start: int, stop: int, value: float) -> Passage:
        means = parts.mean(0)
        largest = np.argsort(-means, kind="stable")[:NEURONS_NAMED] if self.neurons else ()
        neurons = tuple((self.neurons[row].neuron, float(means[row])) for row in largest if means[row] > 0)
        return Passage(start, stop, "".join(pieces[start:stop]), value, neurons)
