"""Labels of texts, and of single tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from icebear.concepts.models.batch import Batch
from icebear.concepts.models.replaced import replaced
from icebear.concepts.models.tasks.base import Asked, Positions, Task
from icebear.errors import InputError

if TYPE_CHECKING:
    from icebear.concepts.models.model import Model


class Labelled(Task):
    """A model whose answers are labels."""

    labelled = True

    def log_probabilities(self, model: Model, logits: Tensor) -> Tensor | None:
        """A softmax, but sigmoids of labels that do not exclude each other; None for a regression."""
        kind = getattr(model.net.config, "problem_type", None)
        if kind == "multi_label_classification":
            return logsigmoid(logits)
        if kind == "regression" or (kind is None and len(model.labels) == 1):
            return None
        return logits.log_softmax(-1)


class TextLabel(Labelled):
    name = "sequence"
    auto_class = "AutoModelForSequenceClassification"

    def places(self, model: Model, asked: Sequence[Asked]) -> tuple[Batch, Positions]:
        batch = self.encode(model, [row.prompt for row in asked])
        return batch, [(_read_at(model, batch.row_ids(row)),) for row in range(len(asked))]

    def forward(self, model: Model, batch: Batch, **options: Any) -> Any:
        padding = model.padding([batch.row_ids(row) for row in range(len(batch.lengths))])
        with replaced(model.config, "pad_token_id", padding):  # before which decoders read labels, if they have one
            return super().forward(model, batch, **options)


class TokenLabel(Labelled):
    name = "token"
    auto_class = "AutoModelForTokenClassification"
    labels_tokens = True

    def places(self, model: Model, asked: Sequence[Asked]) -> tuple[Batch, Positions]:
        batch = self.encode(model, [row.prompt for row in asked])
        return batch, [_labelled(model, list(batch.row_ids(number)), row.position) for number, row in enumerate(asked)]

    def log_probabilities(self, model: Model, logits: Tensor) -> Tensor:
        return logits.log_softmax(-1)


def _read_at(model: Model, ids: Sequence[int]) -> int:
    """Where a text's label is read: encoders have a token for it in front, decoders (whose map to the labels is called
    `score`) take the last one that is not padding."""
    if not hasattr(model.net, "score"):
        return 0
    padding = model.config.pad_token_id
    return max((place for place, token in enumerate(ids) if token != padding), default=0)


def _labelled(model: Model, ids: list[int], position: int | None) -> tuple[int, ...]:
    """`position`; by default the token that most probably has another label than the first one (``O`` or the like)."""
    if position is None:
        with model.lock, torch.no_grad():
            scores = model.logits(model.read_ids([ids]), list(range(len(ids))))[0].float()  # (T, labels)
        special = model.special_ids()
        scores[[place for place, token in enumerate(ids) if token in special]] = -torch.inf
        first = scores.softmax(-1)[:, 0].nan_to_num(nan=2.0)
        return (int(first.argmin()),)
    if not -len(ids) <= position < len(ids):
        raise InputError(f"Position {position} is not one of 0 to {len(ids) - 1}.")
    return (position % len(ids),)
