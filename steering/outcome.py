"""`outcome_of`: what the edits of a flip do to their prompt and elsewhere, beside random edits of equal size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from icebear.concepts.attribution.random_controls import DRAWS
from icebear.concepts.models.model import Model
from icebear.convert import CONVERTER
from icebear.edits import Edit
from icebear.errors import InputError
from icebear.recipe import Recipe
from icebear.steering.apply import steer
from icebear.steering.flipping.phrases import phrase_logits
from icebear.steering.random_edits import random_edits
from icebear.steering.records import FlipRecord, from_provenance
from icebear.steering.side_effects import HeldOutContexts

KEY = "outcome"
NEW_TOKENS = 24


@dataclass(frozen=True)
class Probabilities:
    """Probabilities after the prompt, and whether the wanted phrase is the answer."""

    old: float
    """Of the token that is the answer without edits."""
    new: float
    """Of the wanted phrase: the product over its tokens."""
    flipped: bool


@dataclass(frozen=True)
class FlipOutcome:
    """What the edits of a flip do."""

    old: str
    """The answer without edits."""
    new: str
    """The wanted token or phrase."""
    plain: str
    """The continuation without edits."""
    edited: str
    before: Probabilities
    after: Probabilities
    random: tuple[Probabilities, ...]
    """With the same edits of random other neurons of the same layers, for each draw."""
    off_target_kl: float
    """As of `SideEffects`."""
    contexts: int

    def provenance(self) -> dict[str, Any]:
        """JSON-ready, for a recipe."""
        return {KEY: CONVERTER.unstructure(self)}

    @classmethod
    def of(cls, recipe: Recipe) -> FlipOutcome | None:
        """Return the outcome in a recipe's provenance, if any. Raises `RecipeError` if it is malformed."""
        return from_provenance(recipe.name, recipe.provenance, KEY, cls)


def outcome_of(
    model: Model, recipe: Recipe, seed: int = 0, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> FlipOutcome:
    """Measure what a flip to a token or phrase does to its prompt and elsewhere, and what random edits do.

    Parameters
    ----------
    model, recipe
        A recipe that `flip` made for this model, with a wanted token or phrase.
    seed
        The seed of the random draws.
    on_progress
        Called with (done, total) after each step.

    Returns
    -------
    FlipOutcome

    Raises
    ------
    InputError
        If the recipe has no wanted token or phrase.
    """
    recipe.check(model)
    record = FlipRecord.of(recipe)
    if record is None or record.top_k is not None:
        raise InputError(f"The recipe {recipe.name!r} has no wanted token or phrase; make it with flip.")
    record.check(model)
    edits = list(recipe)
    draws = random_edits(model, edits, DRAWS, seed)
    total = 2 * NEW_TOKENS + len(draws) + 1

    def continuation(some: list[Edit], done: int) -> str:
        if not model.task.generates:
            return record.text if some else record.before[0].text
        with steer(model, some):
            return model.generate(record.prompt, NEW_TOKENS, on_token=lambda count: on_progress(done + count, total))

    plain, edited = continuation([], 0), continuation(edits, NEW_TOKENS)
    before, after = (_probabilities(model, record, some) for some in ([], edits))
    random = []
    for number, others in enumerate(draws):
        on_progress(2 * NEW_TOKENS + number, total)
        random.append(_probabilities(model, record, others))
    contexts = HeldOutContexts(model)
    kl = contexts.off_target_kl(edits)
    old = record.before[0].text
    return FlipOutcome(old, record.text, plain, edited, before, after, tuple(random), kl, len(contexts.contexts))


def _probabilities(model: Model, record: FlipRecord, edits: list[Edit]) -> Probabilities:
    logits = phrase_logits(model, edits, record.prompt, record.phrase)
    logs = logits.log_softmax(-1)
    new = logs[range(len(record.phrase)), list(record.phrase)].sum().exp().item()
    flipped = tuple(logits.argmax(-1).tolist()) == record.phrase
    return Probabilities(logs[0, record.before[0].id].exp().item(), new, flipped)
