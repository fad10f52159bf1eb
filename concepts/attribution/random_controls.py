"""A change of an answer beside what chance makes of it, and which tokens of a prompt make one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Any

import torch

from icebear.concepts.attribution.result import Relevance
from icebear.concepts.methods.common import explained_numbers, measure_without
from icebear.concepts.models.model import Model
from icebear.concepts.models.objective import objective_of
from icebear.concepts.models.prompts import PromptLike
from icebear.errors import InputError
from icebear.records import TokenScore

DRAWS = 20
"""Of others, so that chance passes in less than one case of twenty."""


@dataclass(frozen=True)
class RandomControl:
    """What a number is without and with a change, and with the same change made elsewhere, at random."""

    what: str
    """Was changed, in words, and"""
    others: str
    """what was instead."""
    number: str
    """What is measured."""
    before: float
    after: float
    drawn: tuple[float, ...]
    """After, for each draw of others."""

    @property
    def change(self) -> float:
        return self.after - self.before

    @property
    def largest(self) -> float:
        """The largest change, in size, that a draw made."""
        return max((number - self.before for number in self.drawn), key=abs, default=0.0)

    @property
    def as_large(self) -> int:
        """How many draws change it as much, in either direction."""
        return sum(abs(number - self.before) >= abs(self.change) for number in self.drawn)

    @property
    def p(self) -> float:
        """That chance changes it as much; what was measured counts as one of the draws (Phipson & Smyth 2010)."""
        return (1 + self.as_large) / (1 + len(self.drawn))

    @property
    def beyond_chance(self) -> bool | None:
        """Whether chance changes it as much in at most one case of twenty; None where no draw does, but they are too
        few to say."""
        return None if self.p > 0.05 and not self.as_large else self.p <= 0.05

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: the verdict in a sentence, and its numbers."""
        return {
            "verdict": str(self),
            "beyond_chance": self.beyond_chance,
            "change": self.change,
            "largest_by_chance": self.largest,
            "draws": len(self.drawn),
            "p": self.p,
        }

    def __str__(self) -> str:
        told = f"{self.number} goes from {self.before:+.3f} to {self.after:+.3f} ({self.change:+.3f}) with {self.what}"
        if not self.drawn:
            return f"{told}; there is nothing else to compare with."
        chance = f"{self.others} ({len(self.drawn)} draws) change it by {self.largest:+.3f} at most"
        if self.beyond_chance:
            return f"{told}; {chance}: more than chance (p {self.p:.2f})."
        if not self.as_large:
            return f"{told}; {chance}: more than any of these, which are too few to rule out chance (p {self.p:.2f})."
        return (
            f"{told}; {chance}, and {self.as_large} of them as much: NOT more than chance (p {self.p:.2f}), so this is "
            "no evidence that they matter."
        )


def objective_text(target: TokenScore | None, contrast: TokenScore | None) -> str:
    """The number, in words."""
    if target is None:
        return "The sum of the answer's logits"
    return f"The logit of {target.text!r}" + (f" less that of {contrast.text!r}" if contrast else "")


def token_removal_control(
    model: Model, prompt: PromptLike, relevance: Relevance, k: int = 2, seed: int = 0
) -> RandomControl:
    """The k tokens of a text that speak most for the answer removed (their embeddings are zero), or k others, drawn but
    for sinks and what a chat's template wrote; all choices where there are few. Measured is the number explained.
    Raises `InputError`."""
    apart = {*relevance.prompt.sinks, *relevance.prompt.template}
    free = [place for place in range(len(relevance.tokens)) if place not in apart]
    order = sorted(free, key=lambda place: -relevance.tokens[place].item())
    first, rest = order[:k], sorted(order[k:])
    if relevance.target is None or relevance.image:
        raise InputError("Tokens of a text are removed where one answer is explained; explain one.")
    contrast = relevance.contrast and relevance.contrast.id
    found = objective_of(model, [prompt], relevance.target.id, contrast, kind=relevance.prediction.objective)
    choices = [(), first, *_drawn(rest, len(first), seed)]
    masks = torch.zeros(len(choices), len(relevance.tokens), dtype=torch.bool)
    for mask, places in zip(masks, choices, strict=True):
        mask[list(places)] = True
    before, after, *drawn = measure_without(model, found, 0, masks, explained_numbers).float().tolist()
    names = ", ".join(repr(relevance.prompt.strings[place]) for place in sorted(first))
    number = objective_text(relevance.target, relevance.contrast)
    number += " against all others" if relevance.prediction.objective == "log-odds" else ""
    return RandomControl(f"{names} removed", "as many other tokens", number, before, after, tuple(drawn))


def _drawn(places: Sequence[int], k: int, seed: int) -> list[Sequence[int]]:
    """At most `DRAWS` choices of k places."""
    if comb(len(places), k) <= DRAWS:
        return list(combinations(places, k))
    generator = random.Random(seed)
    return [generator.sample(places, k) for _ in range(DRAWS)]
