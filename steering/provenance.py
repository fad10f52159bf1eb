"""Records in a recipe's provenance: how a flip was found, and its outcome. Reading them needs no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from icebear.concepts.statistics import auroc_by_chance
from icebear.convert import CONVERTER
from icebear.errors import RecipeError
from icebear.recipe import Recipe
from icebear.records import Neuron, RandomControl, TokenScore
from icebear.values import check_int

if TYPE_CHECKING:
    from icebear.models.model import Model

LARGEST_DOSE = 1.0
"""Above it the edits outweigh what they are added to."""


class Noted:
    """A record in a recipe's provenance."""

    key: ClassVar[str]

    def provenance(self) -> dict[str, Any]:
        """JSON-ready, for a recipe."""
        return {self.key: CONVERTER.unstructure(self)}

    @classmethod
    def of(cls, recipe: Recipe) -> Self | None:
        """Return the record of a recipe, None if it has none. Raises `RecipeError` where it is not as icebear writes
        it."""
        return cls._read(recipe.name, recipe.provenance)

    @classmethod
    def _read(cls, name: str, provenance: dict[str, Any]) -> Self | None:
        try:
            return CONVERTER.structure(provenance[cls.key], cls) if cls.key in provenance else None
        except Exception as error:
            raise RecipeError(
                f"The provenance of the recipe {name!r} cannot be read ({error}); make the recipe again."
            ) from None


@dataclass(frozen=True)
class EditedNeuron:
    """A neuron that a flip sets, or a head that it swaps."""

    neuron: Neuron
    alone: float
    """The probability of the wanted token, at the step of the edit, with this edit alone."""
    raises: tuple[str, ...]
    """The likely next words that this edit alone raises most, at its step, relative to the other likely tokens."""
    lowers: tuple[str, ...]
    activation: float | None = None
    """Of a neuron, without edits."""
    relevance: float | None = None
    """Of a neuron, for the margin of the flip, without edits; activation x gradient in a model with scans."""
    range_share: float | None = None
    """The value that a neuron is set to, as a multiple of its activation range (`Calibration.share`); None outside."""
    examples: tuple[str, ...] = ()
    """Sentences with large activations of the sign that a neuron is set to, if there was an index."""


@dataclass(frozen=True)
class FlipRecord(Noted):
    """How a recipe was found by `icebear.steering.flipping.flip.flip`."""

    key: ClassVar = "flip"
    prompt: Any
    """A text, token ids, or the messages of a chat; so is `source`."""
    text: str
    """The wanted or suppressed token or phrase."""
    phrase: tuple[int, ...]
    """Its token ids."""
    top_k: int | None
    """None if `text` is wanted; else `text` is suppressed: it shall leave the k most probable tokens."""
    source: Any
    unbounded: bool
    left_source: bool
    """Whether moving towards the source prompt (or, to suppress, towards zero) was not enough."""
    before: tuple[TokenScore, ...]
    """The most probable next tokens without the edits."""
    rounds: tuple[tuple[int, float], ...]
    """For each round of the search the total of edited rows, and the margin in logits."""
    neurons: tuple[EditedNeuron, ...]

    @classmethod
    def all_of(cls, recipe: Recipe) -> list[FlipRecord]:
        """Return the records of a recipe and of the recipes that it combines. Raises `RecipeError`."""
        sources = [recipe.provenance, *recipe.provenance.get("parts", [])]
        return [record for source in sources if (record := cls._read(recipe.name, source))]

    def check(self, model: Model) -> None:
        """Raise `InputError` if its tokens are not in the model's vocabulary."""
        check_int(len(self.phrase), "The number of a flip's tokens")
        for token in self.phrase:
            model.answer_id(token, "token of a flip")
        if self.top_k is not None:
            check_int(self.top_k, "top_k", 1, model.output_size - 1)


class Score(NamedTuple):
    """The AUROC of a concept on test texts with it (positive) and without (negative), with its error."""

    auroc: float
    error: float
    positive: int
    negative: int

    @property
    def by_chance(self) -> float:
        """The AUROC that 95 % of random guesses stay below; above 1 where no score can beat chance."""
        return auroc_by_chance(self.positive, self.negative)


def score_of(provenance: Mapping[str, Any]) -> Score | None:
    """Return the score of a concept that was tested; None for others, such as those made by hand."""
    match provenance:
        case {
            "auroc": int() | float() as auroc,
            "error": int() | float() as error,
            "tested_on": [int() as positive, int() as negative],
        } if positive > 0 and negative > 0:
            return Score(auroc, error, positive, negative)
    return None


def chosen_by_words(provenance: Mapping[str, Any]) -> str:
    """Say that a concept's sentences were chosen by words, which its AUROC repeats; empty if they were not."""
    words = provenance.get("chosen_by_words")
    if not isinstance(words, str) or not words:
        return ""
    return f"The sentences were chosen by the words {words!r}, so neurons for these words are enough for this AUROC."


@dataclass(frozen=True)
class Outcome(Noted):
    """What edits do to their prompt and elsewhere, and what the same edits of random other neurons do. What is None is
    not measured yet."""

    key: ClassVar = "outcome"
    control: RandomControl
    """The number that the edits are for, without and with them, and for each draw of random edits: the probability of
    a flip's token or phrase, or a concept's measure of the text."""
    aim: str
    """What the edits are for, as the end of a sentence: "3 of 20 draws ..."."""
    reached: bool
    """Whether the flip holds, or the concept's measure moved in the wanted direction."""
    as_far: int
    """The draws for which the flip holds, or whose measure is at least as far in the wanted direction."""
    contexts: int
    """The held-out contexts of the off-target KL."""
    seed: int
    """Of the draws."""
    plain: str | None = None
    """The continuation without edits."""
    edited: str | None = None
    off_target_kl: float | None = None
    """The mean KL divergence, in nats, of the edited from the plain next-token probabilities at these contexts."""
    random_off_target_kl: tuple[float, ...] = ()
    """Of the first draws."""
    old: RandomControl | None = None
    """Of a flip: the probability of the token that is the answer without edits."""
    other_sources: RandomControl | None = None
    """Of swapped heads: the probability of the flip's token or phrase when they take their outputs after other
    prompts."""
    dose: float | None = None
    """Of a concept: the norm of what the edits add to the residual stream, divided by the stream's (`dose`)."""

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers with their controls, JSON-ready, without the texts."""
        return {
            "before": self.control.before,
            "after": self.control.after,
            "reached": self.reached,
            "control": {
                **self.control.to_dict(),
                "verdict": self.control_text,
                "as_far": self.as_far,
                "seed": self.seed,
            },
            "other_sources": self.other_sources.to_dict() if self.other_sources else None,
            "off_target_kl": self.off_target_kl,
            "random_off_target_kl": list(self.random_off_target_kl),
            "side_effects": self.side_effects_text,
            "dose": self.dose,
            "warning": self.warning,
        }

    @property
    def control_text(self) -> str:
        """The number without and with the edits, and under random edits, in a sentence."""
        control, drawn = self.control, self.control.drawn
        change = f"{control.number} goes from {number_text(control.before)} to {number_text(control.after)}"
        if not drawn:
            return f"{change}. There are not enough others for a random control."
        text = (
            f"{change}; with {control.others} ({len(drawn)} draws, seed {self.seed}) it becomes "
            f"{number_text(min(drawn))} to {number_text(max(drawn))}. {self.as_far} of {len(drawn)} draws {self.aim}."
        )
        if self.other_sources:
            values = self.other_sources.drawn
            text += (
                f" With the outputs that the same heads have after {len(values)} other prompts, it becomes "
                f"{number_text(min(values))} to {number_text(max(values))}."
            )
        return text

    @property
    def side_effects_text(self) -> str:
        """The off-target KL of the edits and of random edits, in a sentence."""
        kl, drawn = self.off_target_kl, self.random_off_target_kl
        if not self.contexts:
            return "Side effects are not measured on images."
        if kl is None:
            return f"Side effects in {self.contexts} held-out contexts: not measured yet."
        measured = f"off-target KL {kl:.3f} nats in {self.contexts} held-out contexts (0 is none)"
        if not drawn:
            return f"Side effects: {measured}."
        compared = "smaller than" if kl < min(drawn) else "larger than" if kl > max(drawn) else "as large as"
        return (
            f"Side effects are {compared} those of random edits: {measured}; random edits {min(drawn):.3f} to "
            f"{max(drawn):.3f} ({len(drawn)} draws)."
        )

    @property
    def dose_text(self) -> str:
        """The dose in a sentence; empty if it is not measured."""
        if self.dose is None:
            return ""
        return f"Dose: the edits add {self.dose:.2f} times the norm of the residual stream."

    @property
    def warning(self) -> str:
        """Sentences where the dose is large, or the numbers are no evidence that these neurons matter; else empty."""
        too_much = self.dose is not None and self.dose > LARGEST_DOSE
        texts = [f"A dose above {LARGEST_DOSE:.0f} tends to break texts; allow fewer side effects."] if too_much else []
        return " ".join(filter(None, [*texts, self._no_evidence]))

    @property
    def _no_evidence(self) -> str:
        if not self.reached:
            return (
                f"{self.control.number} did not move in the wanted direction. Allow more side effects, or do not trust "
                "that these neurons cause it."
            )
        if self.as_far:
            return f"Random edits {self.aim} too ({self.as_far} of {len(self.control.drawn)} draws)."
        return ""


def number_text(number: float) -> str:
    """Return a probability (or a logit) with three decimals, or if it is small with two significant digits."""
    return f"{number:.3f}" if abs(number) >= 0.01 or number == 0 else f"{number:.2g}"
