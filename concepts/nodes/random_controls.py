"""A measured change and its random control, and the control of removed tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Any

import torch

from icebear.concepts.methods.common import explained_numbers, measure_without
from icebear.concepts.results.result import Relevance
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.models.objective import objective_of
from icebear.records import TokenScore

RANDOM_DRAWS = 20
"""Random draws: enough for p < 0.05."""


@dataclass(frozen=True)
class RandomControl:
    """A number before and after an intervention, and after equal random interventions."""

    what: str
    """The intervention, in words."""
    others: str
    """The random interventions, in words."""
    number: str
    """The measured number, in words."""
    before: float
    after: float
    drawn: tuple[float, ...]
    """The number after each random intervention."""

    @property
    def change(self) -> float:
        return self.after - self.before

    @property
    def largest(self) -> float:
        """The largest change of a random intervention."""
        return max((number - self.before for number in self.drawn), key=abs, default=0.0)

    @property
    def as_large(self) -> int:
        """The number of random interventions that change the number as much, in either direction."""
        return sum(abs(number - self.before) >= abs(self.change) for number in self.drawn)

    @property
    def p(self) -> float:
        """The p value; the intervention itself counts as a draw (Phipson & Smyth 2010)."""
        return (1 + self.as_large) / (1 + len(self.drawn))

    @property
    def beyond_chance(self) -> bool | None:
        """Whether p <= 0.05; None if no random intervention is as large, but they are too few to decide."""
        return None if self.p > 0.05 and not self.as_large else self.p <= 0.05

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict: the verdict in a sentence, and its numbers."""
        return {
            "verdict": str(self),
            "beyond_chance": self.beyond_chance,
            "change": self.change,
            "largest_by_chance": self.largest,
            "draws": len(self.drawn),
            "p": self.p,
        }

    def __str__(self) -> str:
        claim = f"{self.number} goes from {self.before:+.3f} to {self.after:+.3f} ({self.change:+.3f}) with {self.what}"
        if not self.drawn:
            return f"{claim}; there is nothing for a random control."
        chance = f"{self.others} ({len(self.drawn)} draws) change it by {self.largest:+.3f} at most"
        if self.beyond_chance:
            return f"{claim}; {chance}: more than chance (p {self.p:.2f})."
        if not self.as_large:
            return f"{claim}; {chance}: more than any of these, which are too few to rule out chance (p {self.p:.2f})."
        return (
            f"{claim}; {chance}, and {self.as_large} of them as much: NOT more than chance (p {self.p:.2f}), so this "
            "is no evidence that they matter."
        )


def objective_text(target: TokenScore | None, contrast: TokenScore | None) -> str:
    """Return the explained number in words."""
    if target is None:
        return "The sum of the answer's logits"
    return f"The logit of {target.text!r}" + (f" minus that of {contrast.text!r}" if contrast else "")


def token_removal_control(model: Model, relevance: Relevance, k: int = 2, seed: int = 0) -> RandomControl | None:
    """Remove the k tokens that contribute most to the answer, or k random others, and measure the explained number.

    A removed token has an embedding of zero. Sinks and tokens of a chat's template stay. If there are few other
    choices, all are measured; if all tokens stay, there is no control. Raises `InputError`.
    """
    model.check_made(relevance.made_with["model"], "The relevance")
    excluded = {*relevance.prompt.sinks, *relevance.prompt.template}
    free = [position for position in range(len(relevance.tokens)) if position not in excluded]
    order = sorted(free, key=lambda position: -relevance.tokens[position].item())
    removed, others = order[:k], sorted(order[k:])
    if not removed:
        return None
    if relevance.target is None or relevance.image:
        raise InputError("Tokens can be removed only from a text, with one target token; explain one token of a text.")
    contrast = relevance.contrast and relevance.contrast.id
    kind, position = relevance.prediction.objective, relevance.predicted_at if model.task.takes_position else None
    objective = objective_of(model, [relevance.read], relevance.target.id, contrast, position=position, kind=kind)
    choices: list[Sequence[int]] = [(), removed, *_drawn(others, len(removed), seed)]
    masks = torch.zeros(len(choices), len(relevance.tokens), dtype=torch.bool)
    for mask, positions in zip(masks, choices, strict=True):
        mask[list(positions)] = True
    before, after, *drawn = measure_without(model, objective, 0, masks, explained_numbers).float().tolist()
    names = ", ".join(repr(relevance.prompt.strings[position]) for position in sorted(removed))
    number = objective_text(relevance.target, relevance.contrast)
    number += " against all others" if relevance.prediction.objective == "log-odds" else ""
    return RandomControl(f"{names} removed", "as many other tokens", number, before, after, tuple(drawn))


def _drawn(positions: Sequence[int], k: int, seed: int) -> list[Sequence[int]]:
    """Return at most `RANDOM_DRAWS` choices of k positions."""
    if comb(len(positions), k) <= RANDOM_DRAWS:
        return list(combinations(positions, k))
    generator = random.Random(seed)
    return [generator.sample(positions, k) for _ in range(RANDOM_DRAWS)]
