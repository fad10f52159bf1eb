"""Relevance of the tokens for several parts of one answer, from one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from icebear.concepts.methods.lrp import ATTNLRP, AttnLRP
from icebear.concepts.models.model import Model
from icebear.concepts.models.objective import ObjectiveKind, answer_scores
from icebear.concepts.passes.inputs import Inputs
from icebear.concepts.passes.run import Recorder, forward_backward
from icebear.concepts.passes.stream import Stream

Part = Sequence[int]
"""Positions of tokens that are explained together, each by those before it."""


class Parts:
    """For each part the sum of its tokens' logits where each was predicted."""

    def __init__(self, ids: Sequence[int], parts: Sequence[Part], objective: ObjectiveKind) -> None:
        self.ids, self.parts, self.objective = ids, parts, objective

    def reading(self, model: Model) -> nullcontext[None]:
        return nullcontext()

    def numbers(self, model: Model) -> list[Tensor]:
        needed = sorted({place - 1 for part in self.parts for place in part})
        logits = model.logits(model.read_ids([list(self.ids)]), needed)[0]  # (P, V)
        own = answer_scores(logits, [self.ids[place + 1] for place in needed], self.objective)
        row = {place: at for at, place in enumerate(needed)}
        return [torch.stack([own[row[place - 1]] for place in part]).sum()[None] for part in self.parts]


class _Each(Inputs):
    """Keeps the tokens' relevance of every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[Tensor] = []

    def finish(self, gradients: Sequence[Tensor | None]) -> None:
        super().finish(gradients)
        self.passes.append(self.relevance()[0][0].sum(-1).cpu())


def several(
    model: Model,
    ids: Sequence[int],
    parts: Sequence[Part],
    method: AttnLRP = ATTNLRP,
    objective: ObjectiveKind = "logit",
    checkpoint: bool | None = None,
) -> Tensor:
    """(S, T) the relevance of a text's tokens for each of its parts: one forward, S backward passes.

    The last token of `ids` is read by none of them, so that it has no relevance.
    """
    read = list(ids)
    each = _Each()
    recorders: list[Recorder] = [each, Stream(model, model.read_ids([read]))]
    forward_backward(model, Parts(read, parts, objective), recorders, method, checkpoint=checkpoint)
    return torch.stack(each.passes)
