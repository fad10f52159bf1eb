"""What baselines share: the number explained, changed embeddings, one prompt many times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from concepts.models import tasks
from concepts.models.batch import Batch
from concepts.models.model import Model
from concepts.models.tasks import Plan
from icebear.errors import InputError

ROWS = 32
"""How many variants of a prompt go through the model at once."""

Change = Callable[[int, Tensor], Tensor]


def scores(model: Model, plan: Plan) -> Tensor:
    """(B, P, V) logits at the positions of `places`."""
    return tasks.logits(model, plan.batch, places(plan))


def places(plan: Plan) -> list[int]:
    return sorted({place for row in plan.positions for place in row})


def value(model: Model, plan: Plan) -> Tensor:
    """(B,) the number explained, with a graph where gradients are enabled."""
    return tasks.explained(plan, scores(model, plan), places(plan))[1]


def log_probability(model: Model, plan: Plan) -> Tensor:
    """(B,) of the answers explained, summed. Raises `InputError` for a model that has no probabilities."""
    found = model.log_probabilities(scores(model, plan).float())
    if found is None:
        raise InputError(f"{model.name} predicts a number, not probabilities; choose another method.")
    return tasks.explained(replace(plan, contrasts=(None,) * len(plan.contrasts)), found, places(plan))[1]


def resolved(model: Model, plan: Plan) -> Plan:
    """The plan with the most probable answers in place of those left open."""
    if all(target is not None for target in plan.targets):
        return plan
    with model.lock, torch.no_grad():
        targets, _ = tasks.explained(plan, scores(model, plan), places(plan))
    return replace(plan, targets=tuple(targets))


def repeated(plan: Plan, row: int, count: int) -> Plan:
    """One prompt of a plan, without padding, `count` times."""

    def rows(batch: Batch) -> Batch:
        length = batch.lengths[row]
        ids, mask = (x[row : row + 1, :length].expand(count, -1) for x in (batch.ids, batch.mask))
        decoder = rows(batch.decoder) if batch.decoder else None
        pixels = batch.pixels[row : row + 1].expand(count, -1, -1, -1) if batch.pixels is not None else None
        return Batch(ids, mask, (length,) * count, decoder, pixels)

    return Plan(
        rows(plan.batch), (plan.positions[row],) * count, (plan.targets[row],) * count, (plan.contrasts[row],) * count
    )


@contextmanager
def embeddings_changed(model: Model, change: Change) -> Iterator[None]:
    """Token embeddings (B, T, D) go through `change(stack, x)`: stack 0 is the encoder's or the only one."""
    calls = [0]

    def hook(module: Any, args: Any, output: Tensor) -> Tensor:
        calls[0] += 1
        return change((calls[0] - 1) % (2 if model.task == "seq2seq" else 1), output)

    handles = [module.register_forward_hook(hook) for module in model.embeddings]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def without(model: Model, plan: Plan, row: int, removed: Tensor, measure: Callable[[Model, Plan], Tensor]) -> Tensor:
    """(N,) `measure` of one prompt where the embeddings of tokens are zero; removed (N, T) is True for those."""
    found = []
    read = plan.batch.lengths[row]
    for part in removed.to(model.device).split(ROWS):

        def change(stack: int, x: Tensor, part: Tensor = part) -> Tensor:
            gone = part[:, read:] if stack else part[:, :read]
            return x.masked_fill(gone[..., None], 0)

        with model.lock, torch.no_grad(), embeddings_changed(model, change):
            found.append(measure(model, repeated(plan, row, len(part))))
    return torch.cat(found)
