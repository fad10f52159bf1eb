"""The answer to a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from icebear.claims.kind import Kind, Measured, PromptText
from icebear.models.model import Model
from icebear.steering.flipping.phrases import wanted_ids
from icebear.steering.side_effects import HeldOutContexts

CONTEXTS = 16


@dataclass(frozen=True)
class AnswerClaim(Kind):
    """The model answers this prompt so: the probability of a token, phrase or label. The control is its mean
    probability after held-out contexts."""

    prompt: PromptText
    answer: str
    kind = "answer"
    value_is = "probability of the answer"
    control_is = "its mean probability after held-out contexts"

    def measure(self, model: Model, seed: int = 0) -> Measured:
        phrase = wanted_ids(model, self.answer, self.prompt)
        contexts = HeldOutContexts(model).contexts
        some = contexts[:: max(1, len(contexts) // CONTEXTS)]
        return Measured(
            _probability(model, model.ids(self.prompt), phrase),
            fmean(_probability(model, context, phrase) for context in some),
        )

    def __str__(self) -> str:
        return f"{self.answer!r} after {self.prompt!r}"


def _probability(model: Model, prompt: list[int], phrase: Sequence[int]) -> float:
    if not model.task.generates:
        return model.next_logits(prompt).softmax(-1)[phrase[0]].item()
    logs = model.continuation_logits(prompt, phrase).log_softmax(-1)
    return logs[range(len(phrase)), list(phrase)].sum().exp().item()
