"""`PromptRequest`: what is explained of one prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from icebear.models.text.prompts import Prompt

ObjectiveKind = Literal["logit", "log-odds", "centered-logit", "mean-centered-logit"]
"""The number that is explained, a sum over the tokens of an answer: ``logit``; ``log-odds``, the logit minus the mean
of all other logits weighted by probability (it has the gradient of the log-odds); ``centered-logit``, the logit minus
the mean over the vocabulary; ``mean-centered-logit``, the mean of that, to compare answers of different lengths."""


@dataclass(frozen=True)
class PromptRequest:
    """What is explained of one prompt, in token ids: it is made once (`request_of`), and passed whole."""

    prompt: Prompt
    answer: tuple[int, ...] | None = None
    """The tokens, or the label, that are explained; None for the most probable ones."""
    contrast: int | None = None
    is_phrase: bool = False
    """Whether the answer is a whole continuation, not a token."""
    contrast_phrase: tuple[int, ...] | None = None
    """The phrase that a phrase is explained against."""
    before: Prompt | None = None
    """What precedes the answer, see `Task.before`."""
    position: int | None = None
    """The token whose output is explained."""
    counterfactuals: tuple[Prompt, ...] = ()
    kind: ObjectiveKind = "logit"
    answer_start: int | None = None
    """The position of the first token of the model's own answer."""

    @property
    def is_open(self) -> bool:
        """Whether the target or the contrast of a comparison is the model's own answer."""
        return not self.is_phrase and (self.answer is None or self.contrast is None)
