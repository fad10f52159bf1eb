"""Words that must appear in steered text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean
from typing import Any

from icebear.claims.kind import Kind, Measured, PromptText
from icebear.edits import Edit
from icebear.models.model import Model
from icebear.steering.apply import steer
from icebear.steering.random_edits import random_edits

DRAWS = 5


@dataclass(frozen=True)
class SteerClaim(Kind):
    """With these edits, this share of the continuations has one of these words. The control is the larger share of two:
    without edits, and with the same edits of random other neurons."""

    prompts: tuple[PromptText, ...]
    edits: tuple[Edit, ...]
    words: tuple[str, ...]
    max_new_tokens: int = 20
    kind = "steer"
    value_is = "share of continuations with one of the words"
    control_is = "that without edits, or with the same edits of other neurons"

    def measure(self, model: Model, seed: int = 0) -> Measured:
        edits = list(self.edits)
        value = self._share(model, edits)
        drawn = [self._share(model, some) for some in random_edits(model, edits, DRAWS, seed)]
        control = max(self._share(model, []), fmean(drawn) if drawn else 1.0)
        return Measured(value, control, sqrt(value * (1 - value) / len(self.prompts)))

    def _share(self, model: Model, edits: Sequence[Edit]) -> float:
        prompts: Any = list(self.prompts)
        with steer(model, edits):
            texts = model.generate(prompts, self.max_new_tokens)
        has = re.compile("|".join(rf"\b{re.escape(word.strip())}\b" for word in self.words), re.IGNORECASE)
        return fmean(bool(has.search(text)) for text in texts)

    def __str__(self) -> str:
        return f"{', '.join(map(repr, self.words))} by {', '.join(map(str, self.edits[:4]))}"
