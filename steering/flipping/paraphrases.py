"""Several prompts that say the same, as one: what is edited acts at the last token of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from icebear.concepts.methods.lrp import AttnLRP
from icebear.concepts.models.model import Model
from icebear.steering.flipping.last_token import Edits, LastToken


class Paraphrases:
    """In the place of a `LastToken` of one token: each prompt's prediction of it is as one of a phrase."""

    steps = 1

    def __init__(self, model: Model, prompts: Sequence[Sequence[int]]) -> None:
        self.model, self.ids = model, list(prompts[0])
        self.each = [LastToken(model, ids) for ids in prompts]

    def before(self, number: int) -> list[int]:
        """What is read before the prediction of one of them."""
        return self.each[number].ids

    def activations(self) -> Tensor:
        """(L, F, 1) of the FFN neurons at the last token of the first prompt."""
        return self.each[0].activations()

    def logits(self, proposals: Sequence[Edits]) -> Tensor:
        """(N, P, V) of the next tokens, under each of the proposed edits."""
        return torch.cat([one.logits(proposals) for one in self.each], 1)

    def slopes(self, edits: Edits, explained: Callable[[Tensor], Tensor], method: AttnLRP | None) -> Tensor:
        """(L, F, 1) the sum over prompts of the gradients of `explained`, a number of all their logits (P, V)."""
        rows = [one.logits([edits])[0] for one in self.each]
        total = torch.zeros(self.model.layers, self.model.width("ffn"), 1)
        for number, one in enumerate(self.each):

            def of_one(own: Tensor, number: int = number) -> Tensor:
                others = [row.to(own) for row in rows]
                return explained(torch.cat([*others[:number], own, *others[number + 1 :]]))

            total += one.slopes(edits, of_one, method)
        return total
