"""Claims about edits: an answer that they flip."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from icebear.claims.kind import Draft, Kind, Measured, PromptText, claimed_prompt
from icebear.concepts.nodes.random_controls import RANDOM_DRAWS
from icebear.edits import Edit
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.recipe import Recipe
from icebear.steering.flipping.phrases import flip_holds, phrase_probability, wanted_ids
from icebear.steering.provenance import FlipRecord, Outcome
from icebear.steering.random_edits import random_edits
from icebear.steering.side_effects import HeldOutContexts
from icebear.values import plural


@dataclass(frozen=True)
class FlipClaim(Kind):
    """These edits make a token or phrase the answer, at an off-target KL of at most `max_kl` nats: the probability of
    the phrase. The control is the mean probability with the same edits of random other neurons."""

    prompt: PromptText
    to: str
    edits: tuple[Edit, ...]
    max_kl: float
    kind = "flip"
    value_is = "probability of the wanted answer"
    control_is = "its mean probability with the same edits of other neurons"

    def measured(self, model: Model, seed: int = 0) -> Measured:
        edits, phrase = list(self.edits), wanted_ids(model, self.to, self.prompt)
        value = phrase_probability(model, edits, self.prompt, phrase)
        drawn = random_edits(model, edits, RANDOM_DRAWS, seed)
        control = fmean(phrase_probability(model, draw, self.prompt, phrase) for draw in drawn) if drawn else 1.0
        kl = HeldOutContexts(model).off_target_kl(edits)
        why = ""
        if not flip_holds(model, edits, self.prompt, phrase):
            why = f"The edits do not make {self.to!r} the answer."
        elif not kl <= self.max_kl:
            why = f"The off-target KL is {kl:.3f} nats, over {self.max_kl:.3f}."
        return Measured(value, control, broken_by=why)

    @classmethod
    def of(cls, recipe: Recipe) -> list[Draft]:
        """Return the claim of a flip: its edits, at no more than its side effects. Raises `InputError`."""
        record, outcome = FlipRecord.of(recipe), Outcome.of(recipe)
        if record is None or record.top_k is not None:
            raise InputError("A claim is about a flip to a token or phrase; give --to.")
        if not recipe.edits or outcome is None or outcome.off_target_kl is None:
            raise InputError(
                "A claim of a flip needs edits, and the model gives this answer without any; leave out --claim."
            )
        most = 1.05 * outcome.off_target_kl + 1e-3
        return [(cls(claimed_prompt(record.prompt), record.text, tuple(recipe.neuron_edits()), round(most, 6)), None)]

    def __str__(self) -> str:
        count = plural(len(self.edits), "edit")
        return f"{self.to!r} by {count} after {self.prompt!r}"
