"""`Concept`: neurons with weights, which are measured in a text, steered, and saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from icebear.concepts.vocabulary.calibration import TEXTS
from icebear.convert import Saved, Tabled
from icebear.edits import AnyEdit, Edit, VectorEdit
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.models.text.prompts import PromptLike
from icebear.recipe import Recipe
from icebear.render import page, render
from icebear.steering.concept.detectors import (
    DETECTORS,
    ConceptNeuron,
    ConceptVector,
    Detector,
    contributions,
)
from icebear.steering.concept.reading import read, require_counted_positions
from icebear.steering.concept.texts import ConceptTexts
from icebear.steering.provenance import chosen_by_words, score_of
from icebear.steering.side_effects import HeldOutContexts, strength_at
from icebear.steps import OnProgress, unwatched
from icebear.values import POSITIVE, one_of, plural, real, several, text_of, typed

if TYPE_CHECKING:
    import pandas

SHUFFLED = "shuffled labels"
RANDOM = "random neurons"
ROUNDING = 1e-6
"""A neuron whose standard deviation is no larger than this share of its largest mean is constant."""


@dataclass(frozen=True)
class Measured:
    """A concept measured in a text, in standard deviations over the texts without the concept."""

    concept: str
    tokens: tuple[str, ...]
    values: tuple[float, ...]
    """One for each token; 0 for tokens that do not count (the first one, and special tokens)."""
    value: float
    """The value of the text: the mean over the tokens that count."""
    excluded: tuple[int, ...]
    """The positions of the tokens that do not count."""

    def to_dict(self) -> dict[str, Any]:
        return {"concept": self.concept, "value": self.value, "tokens": list(self.tokens), "values": list(self.values)}

    def to_html(self) -> str:
        """Return a self-contained page."""
        return page(f"icebear concept {self.concept}", self._repr_html_())

    def _repr_html_(self) -> Markup:
        return render("icebear.steering/measured.html", measured=self)


@dataclass(frozen=True)
class ControlDetector:
    """Neurons and vectors that the same texts fit by chance, which a monitor is compared with."""

    name: str
    parts: tuple[ConceptNeuron, ...]
    vectors: tuple[ConceptVector, ...] = ()


@dataclass(frozen=True, repr=False)
class Concept(Saved, Tabled):
    """A latent concept: a weighted set of neurons, which can be measured in a text and steered.

    The value of a token is the weighted sum of the neurons' standardized activations; the value of a text is the mean
    over its tokens. Zero is the mean, and one the standard deviation, of the texts without the concept.
    """

    name: str
    parts: tuple[ConceptNeuron, ...]
    model_name: str
    model_fingerprint: str
    provenance: dict[str, Any] = field(default_factory=dict)
    vectors: tuple[ConceptVector, ...] = ()
    """The residual stream's detectors of the same concept, one for each fit; empty for a concept that was made by
    hand."""
    texts: ConceptTexts | None = None
    controls: tuple[ControlDetector, ...] = ()

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def made_with(self) -> dict[str, Any]:  # type: ignore[override]
        return self.provenance.get("made_with", {})

    @property
    def about(self) -> str:
        """Describe in one line how many neurons it has, and their AUROC on held-out texts."""
        count = f"{plural(len(self), 'neuron')} of {self.model_name}"
        tested = score_of(self.provenance)
        if tested is None:
            return f"{count}; not measured on other texts"
        held = f"{tested.positive} and {tested.negative}"
        score = f"{count}; AUROC {tested.auroc:.2f} on {held} other texts with it and without (chance 0.5)"
        circular = chosen_by_words(self.provenance)
        return f"{score}. {circular}" if circular else score

    def __mul__(self, weight: float) -> Concept:
        """Multiply the weight of each neuron."""
        weight = real(weight, "The weight of a concept", POSITIVE)
        return replace(self, parts=tuple(replace(part, weight=part.weight * weight) for part in self.parts))

    __rmul__ = __mul__

    def check_usable(self, model: Model) -> None:
        """Raise `InputError` if this concept was found in another model, or has no neurons to measure and to steer."""
        self.check(model)
        if not any(part.weight for part in self.parts):
            raise InputError(
                f"The concept {self.name!r} has no neurons to steer or measure; find it again with other texts."
            )

    @typed
    def check(self, model: Model) -> None:
        """Raise `InputError` if this concept was found in another model."""
        if self.model_fingerprint != model.fingerprint:
            raise InputError(
                f"The concept {self.name!r} was found in {self.model_name} ({self.model_fingerprint}), not in "
                f"{model.name} ({model.fingerprint}); load {self.model_name}, or find the concept again."
            )
        for part in self.parts:
            model.check(part.neuron)

    @classmethod
    @typed
    def of(
        cls,
        model: Model,
        name: str,
        weights: Mapping[Any, float],
        on_progress: OnProgress = unwatched,
        **provenance: Any,
    ) -> Concept:
        """Make a concept by hand, of (neuron or its id, polarity) -> weight above 0; other keywords are provenance.

        Means and standard deviations are over icebear's calibration texts; `on_progress` is called with (done, total)
        of them. Raises `InputError` for a neuron that is given twice or that the model does not have, and for another
        weight.
        """
        name = text_of(name)
        if not isinstance(weights, Mapping) or not all(isinstance(key, tuple) and len(key) == 2 for key in weights):
            raise InputError('The weights of a concept must be a dict such as {("L1.ffn.3", "+"): 1.0}.')
        neurons = [model.check(neuron) for neuron, _ in weights]
        if len(set(neurons)) < len(neurons):
            raise InputError("A concept cannot have the same neuron twice; leave out one.")
        seen = read(model, [text for text in TEXTS if len(model.token_ids(text)) > 2], neurons, on_progress)
        parts = []
        for column, ((_, polarity), weight) in enumerate(weights.items()):
            weight = real(weight, f"The weight of {neurons[column]}", POSITIVE)
            values, end = seen.means[:, column], (seen.high if polarity == "+" else seen.low)[column]
            spread = float(values.std())
            if spread <= ROUNDING * abs(values).max():  # a neuron that never changes
                spread = 1.0
            parts.append(ConceptNeuron(neurons[column], polarity, weight, float(values.mean()), spread, float(end)))
        provenance = {"found_by": "hand", **provenance, "made_with": model.made_with}
        return cls(name, tuple(parts), model.name, model.fingerprint, provenance)

    def measure(self, model: Model, text: PromptLike) -> Measured:
        """Measure the concept in a text and in each of its tokens. Raises `InputError` for a text without a token that
        counts, and for another model."""
        return self.measures(model, [text])[0]

    def measures(self, model: Model, texts: Sequence[PromptLike]) -> list[Measured]:
        """Return `measure` of many texts, which are read in batches."""
        self.check_usable(model)
        rows = [model.ids(text) for text in several(texts)]
        counted = [require_counted_positions(model, ids) for ids in rows]
        measured = []
        (every,) = contributions(model, [self.parts], rows)
        for ids, positions, parts in zip(rows, counted, every, strict=True):
            excluded = sorted(set(range(len(ids))) - set(positions))
            values = parts.sum(1, dtype=np.float64)
            values[excluded] = 0
            mean = float(values[positions].mean())
            measured.append(Measured(self.name, model.pieces(ids), tuple(values.tolist()), mean, tuple(excluded)))
        return measured

    def detector(self, kind: str) -> Detector:
        """Return the neurons (``neurons``) or the vector of a fit (``means``, ``logistic``). Raises `InputError` if it
        has none."""
        if kind == "neurons":
            return self.parts
        vectors = {vector.fit: vector for vector in self.vectors}
        if kind not in vectors:
            one_of(kind, "detector", DETECTORS)
            raise InputError(f"The concept {self.name!r} has no vector; find it again from texts with find_concept.")
        return vectors[kind]

    def recipe(
        self,
        model: Model,
        strength: float | None = None,
        kl: float | None = None,
        where: str = "all",
        decay: float = 1.0,
        suppress: bool = False,
        held_out: HeldOutContexts | None = None,
        detector: str = "neurons",
    ) -> Recipe:
        """Return edits that amplify the concept, or suppress it.

        Parameters
        ----------
        strength
            The neuron with the largest weight is moved by this multiple of its max activation, the others in proportion
            to their weights. A vector is added this many times.
        kl
            Instead of `strength`: the off-target KL in nats (see `icebear.steering.side_effects`), for which the
            strength is searched.
        where, decay
            As of `Edit`.
        held_out
            The contexts at which the off-target KL is measured; default icebear's.
        detector
            ``neurons`` edits the neurons; ``means`` and ``logistic`` add that vector to the residual stream.

        Raises
        ------
        InputError
            If the off-target KL cannot be reached, if both or neither of `strength` and `kl` are given, or if the
            concept has no neurons, or no vector.

        References
        ----------
        The vector: Rimsky et al. 2024 (arXiv 2312.06681).
        """
        self.check_usable(model)
        self.detector(detector)
        if (strength is None) is (kl is None):
            raise InputError("Give either a strength or an off-target KL (kl).")
        cost: dict[str, float] = {}
        if kl is None:
            real(strength, "The strength of a concept", 0)
        else:
            real(kl, "The off-target KL (kl)", POSITIVE)
            contexts = held_out or HeldOutContexts(model)
            strength, cost["off_target_kl"] = strength_at(
                kl, lambda strength: contexts.off_target_kl(self._edits(strength, where, decay, suppress, detector))
            )
        edits = self._edits(strength, where, decay, suppress, detector) if strength else []
        neurons = [{"neuron": str(p.neuron), "polarity": p.polarity, "weight": p.weight} for p in self.parts]
        used = {"neurons": neurons} if detector == "neurons" else {}
        provenance = {**used, "detector": detector, "strength": float(strength), "suppress": suppress, **cost}  # type: ignore[arg-type]
        return Recipe.for_model(model, self.name, edits, found_by="concept", **provenance)

    def _edits(self, strength: float, where: str, decay: float, suppress: bool, kind: str) -> list[AnyEdit]:
        step = -strength if suppress else strength
        vector = self.detector(kind)
        if isinstance(vector, ConceptVector):
            return [VectorEdit(vector.layer, tuple(step * number for number in vector.vector), where, decay)]
        step /= max(part.weight for part in self.parts)
        edits: list[AnyEdit] = []
        for part in self.parts:
            value = step * part.weight * part.sign * max(part.sign * part.max_activation, 0)
            edits.append(Edit(part.neuron, "add", value, "", where, decay))
        return edits

    def to_frame(self) -> pandas.DataFrame:
        """Return a pandas table with one row for each neuron; `to_arrow` returns an Arrow table."""
        import pandas

        return pandas.DataFrame([part.to_dict() for part in self.parts])

    def _repr_html_(self) -> str:
        return render("icebear.steering/concept.html", concept=self)


def overlap(left: Concept, right: Concept) -> float:
    mine, theirs = ({(part.neuron, part.polarity) for part in concept.parts} for concept in (left, right))
    return len(mine & theirs) / len(mine | theirs) if mine | theirs else 0.0


def similar_concepts(concept: Concept, others: Sequence[Concept]) -> list[tuple[str, float]]:
    """Return the concepts of the same model that share neurons with `concept`, by this share, the largest first."""
    same = [other for other in others if other.model_fingerprint == concept.model_fingerprint]
    overlaps = [(other.name, overlap(concept, other)) for other in same]
    return sorted((row for row in overlaps if row[1]), key=lambda row: -row[1])
