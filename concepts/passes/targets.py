"""What a pass explains: numbers that the model predicts, or that neurons have on the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from icebear.concepts.models.model import Model
from icebear.concepts.models.objective import Objective
from icebear.concepts.models.prompts import Batch
from icebear.concepts.passes.sites import hooks
from icebear.records import Neuron


class Logits:
    """What a plan says: a logit, the difference of two, or the sum over a continuation's tokens."""

    def __init__(self, plan: Objective) -> None:
        self.plan = plan
        self.logits = torch.empty(0)
        """(B, P, V) at the objective's positions."""
        self.targets: list[tuple[int, ...]] = []
        """The answers explained, where the plan leaves them open the most probable ones."""

    def reading(self, model: Model) -> nullcontext[None]:
        return nullcontext()

    def numbers(self, model: Model) -> Tensor:
        logits = model.logits(self.plan.batch, self.plan.all_positions)
        self.targets, numbers = self.plan.evaluate(logits)
        self.logits = logits.detach()
        return numbers


Node = tuple[Neuron, int]
"""A neuron at a token."""


class Activations:
    """For each row the activation of a neuron at a token, or of several of them the sum."""

    def __init__(self, batch: Batch, rows: Sequence[Sequence[Node]]) -> None:
        self.batch, self.rows = batch, rows
        self.seen: dict[tuple[str, int], Tensor] = {}

    @contextmanager
    def reading(self, model: Model) -> Iterator[None]:
        places = {(neuron.site, neuron.layer) for row in self.rows for neuron, _ in row}
        with ExitStack() as undo:
            if model.task.stacks == 1:  # the layers above have no part in it
                undo.enter_context(first_layers(model, 1 + max(layer for _, layer in places)))
            undo.enter_context(hooks(model, places, self._see))
            yield

    def _see(self, site: str, layer: int, x: Tensor) -> None:
        self.seen.setdefault((site, layer), x)

    def numbers(self, model: Model) -> Tensor:
        model.logits(self.batch, [0])
        return torch.stack(
            [
                torch.stack([self.seen[n.site, n.layer][row, position, n.index] for n, position in nodes]).sum()
                for row, nodes in enumerate(self.rows)
            ]
        )


@contextmanager
def first_layers(model: Model, count: int) -> Iterator[None]:
    """The model with its first `count` layers only."""
    path, _, name = model.family.layers.rpartition(".")
    parent = model.net.get_submodule(path)
    whole = getattr(parent, name)
    setattr(parent, name, nn.ModuleList(model.layer_modules[:count]))
    try:
        yield
    finally:
        setattr(parent, name, whole)
