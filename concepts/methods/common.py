"""Shared code of the methods: relevance by a backward pass, measures of an objective, and variants of a prompt."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from icebear.concepts.passes.inputs import PIXELS, Inputs, input_hooks
from icebear.concepts.passes.neuron_recorders import AllNeurons
from icebear.concepts.passes.run import Logits, forward_backward
from icebear.lrp.linear_rules import Rules
from icebear.lrp.positions import Reading, Sinks, over_layers
from icebear.models.model import Model
from icebear.models.objective import Objective

VARIANTS_PER_PASS = 32
"""Variants of a prompt in a batch."""


def token_relevance(
    model: Model, objective: Objective, rules: Rules | None = None, reading: Reading | None = None, tokens: bool = True
) -> list[Tensor]:
    """Return input x gradient (T,) of the tokens of each prompt, by relevance rules or by the plain gradient.

    reading: of the relevance of positions in all layers together, which is added to the relevance of tokens; with
        tokens=False it is returned alone.
    """
    inputs, sinks = Inputs(), Sinks(model, objective.batch)
    forward_backward(model, Logits(objective), [inputs, *([sinks] if reading else [])], rules)
    rows = by_row(objective, [relevance.sum(-1) for relevance in inputs.relevance()])
    if reading is None:
        return rows
    columns = [objective.batch.columns(row) for row in range(len(rows))]
    positions = [over_layers(x[:, column].cpu(), reading) for x, column in zip(sinks.relevance, columns, strict=True)]
    return [a + b for a, b in zip(rows, positions, strict=True)] if tokens else positions


def neuron_relevance(model: Model, objective: Objective, site: str, rules: Rules | None = None) -> Tensor:
    """Return activation x gradient (L, T, N) of the neurons of a site, for an objective of one prompt."""
    neurons = AllNeurons(model, objective.batch, (site,))
    forward_backward(model, Logits(objective), [Inputs(), neurons], rules)
    return neurons.row(0)[0][site]


def by_row(objective: Objective, stacks: list[Tensor]) -> list[Tensor]:
    """Return scores (B, T) of each stack as one (T,) for each prompt, without padding."""
    joined = torch.cat(stacks, 1).cpu()
    return [joined[row, objective.batch.columns(row)] for row in range(len(joined))]


def explained_numbers(model: Model, objective: Objective) -> Tensor:
    """Return the explained numbers (B,)."""
    return objective.evaluate(model.logits(objective.batch, objective.all_positions))[1]


def measure_variants(
    model: Model,
    objective: Objective,
    row: int,
    masks: Tensor,
    measure: Callable[[Model, Objective], Tensor],
    changed: Callable[[Tensor], AbstractContextManager[None]],
) -> Tensor:
    """Measure variants of one prompt, (N,); `changed` changes the model for a part (n, T) of masks (N, T)."""
    measured = []
    for part in masks.to(model.device).split(VARIANTS_PER_PASS):
        with model.lock, torch.no_grad(), changed(part):
            measured.append(measure(model, objective.rows([row] * len(part))))
    return torch.cat(measured)


def measure_without(
    model: Model, objective: Objective, row: int, removed: Tensor, measure: Callable[[Model, Objective], Tensor]
) -> Tensor:
    """Measure one prompt with some embeddings at zero, (N,); removed (N, T) is True for those tokens."""
    read = objective.batch.lengths[row]

    def zeroed(part: Tensor) -> AbstractContextManager[None]:
        stacks = part[:, :read, None], part[:, read:, None]
        pixels = objective.batch.images is not None and PIXELS
        return input_hooks(model, lambda stack, x: x if stack is pixels else x.masked_fill(stacks[stack], 0))

    return measure_variants(model, objective, row, removed, measure, zeroed)
