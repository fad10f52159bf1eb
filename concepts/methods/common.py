"""What several methods need: relevance by a backward pass, an objective's numbers, and variants of a prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from icebear.concepts.lrp.positions import Reading, Sinks, over_layers
from icebear.concepts.models.model import Model
from icebear.concepts.models.objective import Objective
from icebear.concepts.passes.inputs import Inputs, input_hooks
from icebear.concepts.passes.neurons import AllNeurons
from icebear.concepts.passes.run import forward_backward
from icebear.concepts.passes.targets import Logits
from icebear.errors import InputError

if TYPE_CHECKING:
    from icebear.concepts.methods.lrp import AttnLRP

ROWS = 32
"""How many variants of a prompt go through the model at once."""


def token_relevance(model: Model, objective: Objective, rules: AttnLRP | None = None) -> list[Tensor]:
    """(T,) input x gradient of each prompt's tokens, by relevance rules or by the plain gradient."""
    inputs = Inputs()
    forward_backward(model, Logits(objective), [inputs], rules)
    return by_row(objective, [relevance.sum(-1) for relevance in inputs.relevance()])


def with_positions(
    model: Model, objective: Objective, rules: AttnLRP, reading: Reading, tokens: bool = True
) -> list[Tensor]:
    """(T,) relevance of each prompt's tokens and of their positions in all layers together, or of positions alone."""
    inputs, sinks = Inputs(), Sinks(model, objective.batch)
    forward_backward(model, Logits(objective), [inputs, sinks], rules)
    own = by_row(objective, [relevance.sum(-1) for relevance in inputs.relevance()])
    rows = [sinks.relevance[row][:, objective.batch.columns(row)].cpu() for row in range(len(own))]
    positions = [over_layers(row, reading) for row in rows]
    return [a + b for a, b in zip(own, positions, strict=True)] if tokens else positions


def neuron_relevance(model: Model, objective: Objective, site: str, rules: AttnLRP | None = None) -> Tensor:
    """(L, T, N) activation x gradient of a site's neurons, for an objective of one prompt."""
    neurons = AllNeurons(model, objective.batch, (site,))
    forward_backward(model, Logits(objective), [Inputs(), neurons], rules)
    return neurons.row(0)[0][site]


def by_row(objective: Objective, stacks: list[Tensor]) -> list[Tensor]:
    """The (B, T) of each stack as one (T,) for each prompt, without padding."""
    joined = torch.cat(stacks, 1).cpu()
    return [joined[row, objective.batch.columns(row)] for row in range(len(joined))]


def value(model: Model, objective: Objective) -> Tensor:
    """(B,) the number explained."""
    return objective.evaluate(model.logits(objective.batch, objective.all_positions))[1]


def log_probability(model: Model, objective: Objective) -> Tensor:
    """(B,) of the answers explained, summed. Raises `InputError` for a model that has no probabilities."""
    found = model.task.log_probabilities(model, model.logits(objective.batch, objective.all_positions).float())
    if found is None:
        raise InputError(f"{model.name} predicts a number, not probabilities; choose another method.")
    return replace(objective, contrasts=(None,) * len(objective.contrasts), kind="logit").evaluate(found)[1]


def without(
    model: Model, objective: Objective, row: int, removed: Tensor, measure: Callable[[Model, Objective], Tensor]
) -> Tensor:
    """(N,) `measure` of one prompt where the embeddings of tokens are zero; removed (N, T) is True for those."""
    found = []
    read = objective.batch.lengths[row]
    for part in removed.to(model.device).split(ROWS):

        def change(stack: int, x: Tensor, part: Tensor = part) -> Tensor:
            gone = part[:, read:] if stack else part[:, :read]
            return x.masked_fill(gone[..., None], 0)

        with model.lock, torch.no_grad(), input_hooks(model, change):
            found.append(measure(model, objective.rows([row] * len(part))))
    return torch.cat(found)
