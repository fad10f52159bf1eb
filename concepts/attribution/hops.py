"""Hops: what relevance a model's own words have goes on to what these words rest on.

The relevance on a generated token is handed to the tokens before it in proportion to the positive parts of that token's
own explanation; what has none stays (DESIGN section 16; the idea is FlashTrace's, arXiv 2602.01914).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from icebear.concepts.attribution.parts import several
from icebear.concepts.attribution.result import Relevance
from icebear.concepts.lrp.method import AttnLRP
from icebear.concepts.models.model import Model
from icebear.concepts.models.plan import Number
from icebear.errors import InputError
from icebear.values import whole


def hopped(
    model: Model,
    relevance: Relevance,
    hops: int,
    number: Number = "logits",
    strict: bool = True,
    checkpoint: bool | None = None,
) -> Relevance:
    """With the tokens' relevance handed on; neurons, and all sums, are as they were. Raises `InputError`."""
    method, first = relevance.method, relevance.answer_from
    hops = whole(hops, "The number of hops", 0)
    if not isinstance(method, AttnLRP) or relevance.counterfactual or first is None or not model.task.looks_back:
        raise InputError(
            "Hops are for the tokens of an answer, by attnlrp or cp-lrp, and without another prompt to compare with."
        )
    written = list(range(first, len(relevance.tokens)))
    found = [relevance.tokens]
    if written and hops:
        own = several(model, relevance.token_ids, [[place] for place in written], method, number, strict, checkpoint)
        for _ in range(hops):
            found.append(handed_on(found[-1], written, own))
    return replace(relevance, tokens=found[-1], hops=(*found, *found[-1:] * (hops + 1 - len(found))))


def handed_on(tokens: Tensor, written: list[int], own: Tensor) -> Tensor:
    """One hop of relevance (T,): that of each written token by its explanation, a row of own (S, T)."""
    positive = own.to(tokens).clamp(min=0)
    for row, place in enumerate(written):
        positive[row, place:] = 0  # nothing looks ahead
    sums = positive.sum(1, keepdim=True)
    shares = torch.where(sums > 0, positive / sums, 0)  # (S, T)
    moving = torch.where(sums[:, 0] > 0, tokens[written], 0)
    found = tokens + moving @ shares
    found[written] -= moving
    return found
