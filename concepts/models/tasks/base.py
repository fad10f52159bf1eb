"""What tasks have in common: which part of a model's input is what, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from icebear.concepts.models.batch import Batch
from icebear.concepts.models.prompts import Prompt
from icebear.errors import InputError

if TYPE_CHECKING:
    from icebear.concepts.models.model import Model

Positions = list[tuple[int, ...]]
"""For each prompt, where what is explained is predicted (of what the decoder reads, where there is one)."""


@dataclass(frozen=True)
class Asked:
    """What is asked about one prompt."""

    prompt: Prompt
    answer: tuple[int, ...] | None
    """The tokens, or the label, explained; None for the most probable ones."""
    before: Prompt | None
    """What the answer is written behind, see `Task.before`."""
    position: int | None
    """The token whose label is explained."""


class Task:
    """What a model reads, what it predicts, and at which of its tokens."""

    name: str
    auto_class: str
    """Of transformers, which loads such a model."""
    stacks = 1
    """Stacks of layers: 2 for an encoder-decoder."""
    reads_text = True
    labelled = False
    """Its answers are labels, not tokens."""
    labels_tokens = False
    """Each token has a label, of which one is explained."""
    generates = False
    is_masked_lm = False
    """Its answers stand in the text, not behind it."""
    is_causal = False
    """No token looks at a later one, so that what comes behind a token has no part in it."""

    # --- what it reads --------------------------------------------------------------------------------

    def encode(self, model: Model, prompts: Sequence[Prompt], padding_side: str = "right") -> Batch:
        return model.padded([model.ids(prompt) for prompt in prompts], padding_side)

    def read(self, model: Model, rows: Sequence[list[int]]) -> Batch:
        """Texts to look at neurons by."""
        return model.read_ids(rows)

    def completed(self, model: Model, text: str) -> str:
        """A text made a prompt of this task."""
        return text

    def own_tokens(self, model: Model) -> tuple[int, ...] | None:
        """Positions that are the model's own, not of what it reads; None where residual streams tell."""
        return None

    # --- what it predicts -----------------------------------------------------------------------------

    def refuse(self, model: Model, **given: Sequence[Any]) -> None:
        """Raise `InputError` for an argument of `attribute` (target_text, prefix, position) that this task has no use
        for.

        given: a value for each prompt, None where there is none.
        """
        reasons = {
            "target_text": f"{model.name} gives labels; use target" if self.labelled else "",
            "prefix": f"{model.name} has no decoder of its own" if self.stacks == 1 else "",
            "position": f"{model.name} does not label single tokens" if not self.labels_tokens else "",
        }
        for name, values in given.items():
            if reasons[name] and any(value is not None for value in values):
                raise InputError(f"{name} does not suit this model: {reasons[name]}.")

    def before(self, prompt: Prompt, prefix: str | None) -> Prompt | None:
        """What an answer is written behind; None where it stands in the text."""
        return Prompt(text=prefix) if prefix else None

    def places(self, model: Model, asked: Sequence[Asked]) -> tuple[Batch, Positions]:
        """The prompts as the model reads them, the answers written behind but for their last token; and where the
        answers are predicted."""
        raise NotImplementedError

    def log_probabilities(self, model: Model, logits: Tensor) -> Tensor | None:
        """Of all answers, by logits (..., V); None for a number, which has no probabilities."""
        return logits.log_softmax(-1)

    def forward(self, model: Model, batch: Batch, **options: Any) -> Any:
        """What the network gives for a batch."""
        return model.net(**model.inputs(batch), **options)

    def written(self, batch: Batch) -> int:
        """How many columns of what `generate` returns were there before."""
        raise InputError("This model does not generate text.")


def followed(ids: Sequence[int], answer: tuple[int, ...] | None) -> list[int]:
    """Ids with an answer behind but for its last token, which is not read but predicted."""
    return [*ids, *(answer or ())[:-1]]


def from_start(start: int, answer: tuple[int, ...] | None) -> tuple[int, ...]:
    """One position for each token of an answer whose first one is predicted at `start`."""
    return tuple(range(start, start + len(answer or (0,))))
