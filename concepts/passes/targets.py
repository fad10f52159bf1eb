"""The number that a pass explains: a prediction of the model, or the activation of a neuron."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from icebear.concepts.models.model import Model
from icebear.concepts.models.objective import Objective
from icebear.concepts.models.prompts import Batch
from icebear.concepts.passes.run import Target
from icebear.concepts.passes.sites import hooks
from icebear.records import Neuron

Place = tuple[Neuron, int]
"""A neuron (or a head) at a token."""


class Logits(Target):
    """The number of an objective: a logit, the difference of two, or the sum over the tokens of a continuation."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.logits = torch.empty(0)
        """(B, P, V) at `all_positions` of the objective."""
        self.targets: list[tuple[int, ...]] = []
        """The explained answers; the most probable ones if the objective leaves them open."""

    def numbers(self, model: Model) -> Tensor:
        logits = model.logits(self.objective.batch, self.objective.all_positions)
        self.targets, numbers = self.objective.evaluate(logits)
        self.logits = logits.detach()
        return numbers


class Activations(Target):
    """The activation of a neuron at a token, one a row."""

    def __init__(self, batch: Batch, rows: Sequence[Place]) -> None:
        self.batch, self.rows = batch, rows
        self.seen: dict[tuple[str, int], Tensor] = {}

    @contextmanager
    def reading(self, model: Model) -> Iterator[None]:
        places = {(neuron.site, neuron.layer) for neuron, _ in self.rows}
        with ExitStack() as undo:
            if model.task.stacks == 1:  # the layers above have no part in it
                undo.enter_context(first_layers(model, 1 + max(layer for _, layer in places)))
            see = lambda site, layer, x: self.seen.__setitem__((site, layer), x)  # noqa: E731
            undo.enter_context(hooks(model, places, see))
            yield

    def numbers(self, model: Model) -> Tensor:
        model.logits(self.batch, [0])
        rows = enumerate(self.rows)
        return torch.stack([self.seen[n.site, n.layer][row, position, n.index] for row, (n, position) in rows])


@contextmanager
def first_layers(model: Model, count: int) -> Iterator[None]:
    """Run only the first `count` layers of the model."""
    path, _, name = model.family.layers.rpartition(".")
    parent = model.net.get_submodule(path)
    whole = getattr(parent, name)
    setattr(parent, name, nn.ModuleList(model.layer_modules[:count]))
    try:
        yield
    finally:
        setattr(parent, name, whole)
