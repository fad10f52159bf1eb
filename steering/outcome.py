"""`outcome_of`: what the edits of a flip do to their prompt and elsewhere, beside random edits of equal size; and
`outcomes`, the same as far as it is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from icebear.concepts.nodes.random_controls import DRAWS
from icebear.convert import CONVERTER
from icebear.edits import Edit
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.recipe import Recipe
from icebear.steering.comparison import both_texts
from icebear.steering.flipping.last_token import LastToken, edits_by_place
from icebear.steering.random_edits import random_edits
from icebear.steering.records import FlipRecord, from_provenance
from icebear.steering.side_effects import HeldOutContexts

KEY = "outcome"
NEW_TOKENS = 24
KL_DRAWS = 5
"""The draws of random edits whose off-target KL is measured."""
KL_STEPS = 8
"""The steps of an off-target KL, which takes as long as so many tokens."""


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
    """What the edits of a flip do. What is None is not measured yet."""

    old: str
    """The answer without edits."""
    new: str
    """The wanted token or phrase."""
    plain: str | None
    """The continuation without edits."""
    edited: str | None
    before: Probabilities
    after: Probabilities
    random: tuple[Probabilities, ...]
    """With the same edits of random other neurons of the same layers, for each draw."""
    off_target_kl: float | None
    """As of `SideEffects`."""
    contexts: int
    """The held-out contexts of the off-target KL."""
    random_off_target_kl: tuple[float, ...] = ()
    """Of the first draws of random edits."""

    def provenance(self) -> dict[str, Any]:
        """JSON-ready, for a recipe."""
        return {KEY: CONVERTER.unstructure(self)}

    @classmethod
    def of(cls, recipe: Recipe) -> FlipOutcome | None:
        """Return the outcome in a recipe's provenance, if any. Raises `RecipeError` if it is malformed."""
        return from_provenance(recipe.name, recipe.provenance, KEY, cls)


OnProgress = Callable[[int, int], None]


def outcome_of(
    model: Model, recipe: Recipe, seed: int = 0, on_progress: OnProgress = lambda done, total: None
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
    *_, outcome = outcomes(model, recipe, seed, on_progress)
    return outcome


def outcomes(
    model: Model, recipe: Recipe, seed: int = 0, on_progress: OnProgress = lambda done, total: None
) -> Iterator[FlipOutcome]:
    """Yield what `outcome_of` measures, what is quick first: probabilities, also under random edits; then with both
    texts; then with the side effects, also of random edits."""
    recipe.check(model)
    record = FlipRecord.of(recipe)
    if record is None or record.top_k is not None:
        raise InputError(f"The recipe {recipe.name!r} has no wanted token or phrase; make one with flip.")
    record.check(model)
    edits, contexts = list(recipe), HeldOutContexts(model)
    draws = random_edits(model, edits, DRAWS, seed)
    measured = [edits, *draws[:KL_DRAWS]]
    total = NEW_TOKENS + KL_STEPS * len(measured)
    old, plain, edited = record.before[0], record.before[0].text, record.text
    before, after, *random = _probabilities(model, record, [[], edits, *draws])
    size = len(contexts.contexts)
    outcome = FlipOutcome(old.text, record.text, None, None, before, after, tuple(random), None, size)
    yield outcome
    if model.task.generates:
        plain, edited = both_texts(
            model, record.prompt, edits, NEW_TOKENS, on_token=lambda done: on_progress(done, total)
        )
    outcome = replace(outcome, plain=plain, edited=edited)
    yield outcome
    kls = []
    for done, some in enumerate(measured):
        on_progress(NEW_TOKENS + KL_STEPS * done, total)
        kls.append(contexts.off_target_kl(some))
    yield replace(outcome, off_target_kl=kls[0], random_off_target_kl=tuple(kls[1:]))


def _probabilities(model: Model, record: FlipRecord, rows: list[list[Edit]]) -> list[Probabilities]:
    """Return the probabilities under each of several edits, which are rows of a batch."""
    last = LastToken(model, model.ids(record.prompt), record.phrase)
    logs = last.logits([edits_by_place(edits) for edits in rows]).log_softmax(-1)  # (N, S, V)
    new = logs[:, range(last.steps), record.phrase].sum(1).exp().tolist()
    first = logs[:, 0, record.before[0].id].exp().tolist()
    flipped = [tuple(ids) == record.phrase for ids in logs.argmax(-1).tolist()]
    return [Probabilities(*one) for one in zip(first, new, flipped, strict=True)]
