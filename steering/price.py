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
class Standing:
    """A token's probability and rank (1 is the first) after a recipe's prompt, without and with the edits."""

    text: str
    before: float
    after: float
    rank_before: int
    rank_after: int


@dataclass(frozen=True)
class Price:
    """What a recipe does, and what else it changes; nats and counts."""

    old: Standing | None
    """The token that was first, if the recipe knows its prompt, and the one that was wanted:"""
    new: Standing | None
    kl: float
    """Mean KL divergence of the next-token probabilities on neutral texts with the edits where the recipe has them, at
    the tokens before the last: zero by construction for edits at the last token of a prompt."""
    kl_everywhere: float
    """The same with the edits at every token."""
    perplexity: float
    """Of held-out sentences (of the neutral texts where none are given), and with the edits at every token:"""
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


def price(
    model: Model, recipe: Recipe, neutral: Sequence[str] = NEUTRAL, held_out: Sequence[str] = (),
    statistic: Statistic | None = None,
) -> Price:  # fmt: skip
    """The price of a recipe.

    neutral: texts that it should leave alone.
    held_out: sentences for the perplexity, such as `actmax.corpus.held_out` gives.
    statistic: as of `steer`, an index's.
    """
    recipe.check(model)
    everywhere = [replace(edit, where="all") for edit in recipe]
    batch, held = (token_rows(model, texts) for texts in (neutral, held_out or neutral))
    here, all_over = [], []
    for ids in batch:
        plain, own, all_on = (_log_probabilities(model, edits, ids, statistic) for edits in ([], recipe, everywhere))
        here.append(_kl(plain, own)[:-1])
        all_over.append(_kl(plain, all_on))
    usual, changed = (_perplexity(model, edits, held, statistic) for edits in ([], everywhere))
    prompt, wanted = recipe.provenance.get("prompt"), recipe.provenance.get("to")
    old = new = repetition = repetition_plain = None
    if prompt:
        before, repetition_plain = _written(model, prompt)
        with steer(model, recipe, statistic):
            after, repetition = _written(model, prompt)
        old = _standing(model, int(before.argmax()), before, after)
        new = _standing(model, model.answer_id(wanted, "wanted token"), before, after) if wanted else None
    return Price(
        old, new, _mean(here), _mean(all_over), usual, changed, repetition, repetition_plain,
        _strengths(recipe, statistic),
    )  # fmt: skip


def check_budget(cost: Price, budget: float) -> None:
    """Raise `InputError` if the KL with the edits at every token is above `budget`, in nats."""
    if cost.kl_everywhere > budget:
        raise InputError(
            f"The recipe costs {cost.kl_everywhere:.3f} nats on neutral texts, more than the budget of {budget}; "
            "raise the budget, or name another source prompt."
        )


def token_rows(model: Model, texts: Sequence[str]) -> list[list[int]]:
    """The ids of neutral texts. Raises `InputError` where there is nothing to predict in one, or none."""
    rows = [model.token_ids(text) for text in texts]
    if not rows or any(len(ids) < 2 for ids in rows):
        raise InputError("A neutral text is shorter than two tokens, or there is none; give whole sentences.")
    return rows


def _written(model: Model, prompt: str) -> tuple[Tensor, float]:
    """(V,) the next token's probabilities, and how much the continuation repeats itself."""
    room = model.context_length - len(model.token_ids(prompt))
    text = model.generate(prompt, max_new_tokens=min(40, room)) if room > 0 else ""
    return model.next_logits(prompt).softmax(-1), repeated_trigrams(model.tokens_of(text))


def _standing(model: Model, token: int, before: Tensor, after: Tensor) -> Standing:
    ranks = [1 + int((found > found[token]).sum()) for found in (before, after)]
    return Standing(model.answer(token), before[token].item(), after[token].item(), *ranks)


@torch.no_grad()
def _log_probabilities(
    model: Model, edits: Recipe | Sequence[Edit], ids: list[int], statistic: Statistic | None
) -> Tensor:
    """(T, V) of the next tokens of one text."""
    with steer(model, edits, statistic):
        logits = tasks.logits(model, model.encode([ids]), list(range(len(ids))))[0]
    return logits.float().log_softmax(-1).cpu()


def _kl(plain: Tensor, other: Tensor) -> Tensor:
    """(T,) of log-probabilities (T, V)."""
    return (plain.exp() * (plain - other)).sum(-1)


def _mean(rows: list[Tensor]) -> float:
    return float(torch.cat(rows).mean().clamp(min=0))


def _perplexity(
    model: Model, edits: Recipe | Sequence[Edit], rows: Sequence[list[int]], statistic: Statistic | None
) -> float:
    losses = [-_log_probabilities(model, edits, ids, statistic)[range(len(ids) - 1), ids[1:]] for ids in rows]
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
