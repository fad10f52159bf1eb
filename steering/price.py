"""What a recipe costs: what else changes when its edits act."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from concepts import tasks
from concepts.models import Model
from db.errors import InputError
from steering.apply import Statistic, steer
from steering.edits import Edit
from steering.recipe import Recipe

NEUTRAL = (
    "The committee will meet again on Thursday to discuss the budget for the coming year.",
    "She put the letter back into the envelope and walked slowly to the door.",
    "To bake bread you need flour, water, salt and a little patience.",
    "The train to the coast leaves at seven in the morning and is often late.",
    "My brother has been learning to play the violin since he was six.",
    "In the second half of the century the population of the town doubled.",
    "Please read the instructions carefully before you open the box.",
    "The results of the experiment were published in a small journal.",
    "He paid for the coffee, said thank you and went out into the rain.",
    "A good teacher listens more than she talks.",
    "The company sold its factory and moved its offices to another city.",
    "Most of the trees in the garden were planted by our grandmother.",
)
"""Texts that no recipe is about, our own."""


@dataclass(frozen=True)
class Price:
    """Before and after, and what else changed; probabilities, nats and counts."""

    before: float | None
    """The probability of the token that was wanted, if the recipe knows its prompt, and with the edits:"""
    after: float | None
    kl: float
    """Mean KL divergence of the next-token probabilities on neutral texts with the edits where the recipe has them, at
    the tokens before the last: zero by construction for edits at the last token of a prompt."""
    kl_everywhere: float
    """The same with the edits at every token."""
    perplexity: float
    """Of the neutral texts, and with the edits at every token:"""
    perplexity_everywhere: float
    repetition: float | None
    """The share of three-token sequences in 40 tokens after the prompt that were there before, with the edits, and
    without:"""
    repetition_plain: float | None
    strengths: dict[str, float]
    """Of each set neuron, in units of its own recorded maximum, where an index is given."""

    @property
    def warnings(self) -> list[str]:
        past = [f"{neuron} is set to {value:.1f} x its recorded maximum" for neuron, value in self.strengths.items()
                if abs(value) > 1]  # fmt: skip
        repeats = (self.repetition or 0) > (self.repetition_plain or 0) + 0.2
        return past + ["the continuation repeats itself"] * repeats

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "warnings": self.warnings}


def price(model: Model, recipe: Recipe, texts: Sequence[str] = NEUTRAL, statistic: Statistic | None = None) -> Price:
    """The price of a recipe; texts: those that it should leave alone. statistic: as of `steer`, an index's."""
    recipe.check(model)
    everywhere = [replace(edit, where="all") for edit in recipe]
    batch = [model.token_ids(text) for text in texts]
    plain, here = _log_probabilities(model, [], batch, statistic), _log_probabilities(model, recipe, batch, statistic)
    all_over = _log_probabilities(model, everywhere, batch, statistic)
    prompt, wanted = recipe.provenance.get("prompt"), recipe.provenance.get("to")
    before = after = repetition = repetition_plain = None
    if prompt and wanted:
        before = model.probability(prompt, wanted)
        repetition_plain = repeated_trigrams(model.tokens_of(model.generate(prompt, max_new_tokens=40)))
        with steer(model, recipe, statistic):
            after = model.probability(prompt, wanted)
            repetition = repeated_trigrams(model.tokens_of(model.generate(prompt, max_new_tokens=40)))
    return Price(
        before, after, _kl(plain, here, slice(0, -1)), _kl(plain, all_over, slice(None)), _perplexity(plain, batch),
        _perplexity(all_over, batch), repetition, repetition_plain, _strengths(recipe, statistic),
    )  # fmt: skip


def within(
    model: Model, recipe: Recipe, budget: float, texts: Sequence[str] = NEUTRAL, statistic: Statistic | None = None
) -> Price:
    """The price. Raises `InputError` if its KL with the edits at every token is above `budget`, in nats."""
    found = price(model, recipe, texts, statistic)
    if found.kl_everywhere > budget:
        raise InputError(
            f"The recipe costs {found.kl_everywhere:.3f} nats on neutral texts, more than the budget of {budget}; "
            "raise the budget, or name another source prompt."
        )
    return found


@torch.no_grad()
def _log_probabilities(
    model: Model, edits: Recipe | Sequence[Edit], rows: Sequence[list[int]], statistic: Statistic | None
) -> list[Tensor]:
    """(T, V) of each row."""
    found = []
    with steer(model, edits, statistic):
        for ids in rows:
            logits = tasks.logits(model, model.encode([ids]), list(range(len(ids))))[0]
            found.append(logits.float().log_softmax(-1).cpu())
    return found


def _kl(plain: Sequence[Tensor], other: Sequence[Tensor], tokens: slice) -> float:
    parts = [(p.exp() * (p - q)).sum(-1)[tokens] for p, q in zip(plain, other, strict=True)]
    return float(torch.cat(parts).mean().clamp(min=0))


def _perplexity(found: Sequence[Tensor], rows: Sequence[list[int]]) -> float:
    losses = [-p[range(len(ids) - 1), ids[1:]] for p, ids in zip(found, rows, strict=True)]
    return float(torch.cat(losses).mean().exp())


def repeated_trigrams(ids: Sequence[int]) -> float:
    threes = list(zip(ids, ids[1:], ids[2:], strict=False))
    return 1 - len(set(threes)) / len(threes) if threes else 0.0


def _strengths(recipe: Recipe, statistic: Statistic | None) -> dict[str, float]:
    """Of edits that set raw values."""
    if statistic is None:
        return {}
    return {
        str(edit.neuron): edit.value / max(abs(statistic(edit.neuron, "max")), 1e-9)
        for edit in recipe
        if edit.op == "set" and not edit.unit
    }
