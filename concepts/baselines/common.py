"""What several baselines need: a plan's numbers, and variants of a prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from icebear.concepts.models.model import Model
from icebear.concepts.models.plan import Plan
from icebear.concepts.passes.inputs import changing
from icebear.errors import InputError

ROWS = 32
"""How many variants of a prompt go through the model at once."""


def value(model: Model, plan: Plan) -> Tensor:
    """(B,) the number explained."""
    return plan.explained(model.logits(plan.batch, plan.needed))[1]


def log_probability(model: Model, plan: Plan) -> Tensor:
    """(B,) of the answers explained, summed. Raises `InputError` for a model that has no probabilities."""
    found = model.log_probabilities(model.logits(plan.batch, plan.needed).float())
    if found is None:
        raise InputError(f"{model.name} predicts a number, not probabilities; choose another method.")
    return replace(plan, contrasts=(None,) * len(plan.contrasts), number="logits").explained(found)[1]


def without(model: Model, plan: Plan, row: int, removed: Tensor, measure: Callable[[Model, Plan], Tensor]) -> Tensor:
    """(N,) `measure` of one prompt where the embeddings of tokens are zero; removed (N, T) is True for those."""
    found = []
    read = plan.batch.lengths[row]
    for part in removed.to(model.device).split(ROWS):

        def change(stack: int, x: Tensor, part: Tensor = part) -> Tensor:
            gone = part[:, read:] if stack else part[:, :read]
            return x.masked_fill(gone[..., None], 0)

        with model.lock, torch.no_grad(), changing(model, change):
            found.append(measure(model, plan.repeated(row, len(part))))
    return torch.cat(found)
