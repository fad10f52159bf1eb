"""One forward and one backward pass, which every explanation goes through: the number that it explains, and its
conservation accounting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from icebear.concepts.passes.sites import hooks
from icebear.lrp.context import relevance_rules
from icebear.lrp.linear_rules import Rules
from icebear.lrp.model_pairs import PairedWeights
from icebear.lrp.module_hooks import ModuleHooks
from icebear.lrp.operation_table import RelevanceMode
from icebear.models.batch import Batch
from icebear.models.lock import replaced
from icebear.models.model import Model
from icebear.models.modules import modules_of
from icebear.models.objective import Objective
from icebear.models.parts import experts, vision
from icebear.records import Neuron

TokenNode = tuple[Neuron, int]
"""A neuron (or a head) at a token."""


class Target(Protocol):
    """The number that is explained, one a row. Rows do not see each other, so one backward pass from the sum of all
    rows explains each. Several numbers a row take one forward pass and a backward pass each."""

    batch: Batch | None = None
    """What the model reads, if all of it is a batch."""

    def reading(self, model: Model) -> AbstractContextManager[None]:
        """Return hooks for a number that is read inside the model."""
        return nullcontext()

    def numbers(self, model: Model) -> Tensor | list[Tensor]:
        """Run a forward pass, and return the numbers (B,), or S of them."""


class Logits(Target):
    """The number of an objective: a logit, the difference of two, or the sum over the tokens of a continuation."""

    def __init__(self, objective: Objective) -> None:
        self.objective, self.batch = objective, objective.batch
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

    def __init__(self, batch: Batch, rows: Sequence[TokenNode]) -> None:
        self.batch: Batch = batch
        self.rows = rows
        self.seen: dict[tuple[str, int], Tensor] = {}

    @contextmanager
    def reading(self, model: Model) -> Iterator[None]:
        site_layers = {(neuron.site, neuron.layer) for neuron, _ in self.rows}
        with ExitStack() as undo:
            if model.task.stacks == 1:  # the layers above have no part in it
                undo.enter_context(first_layers(model, 1 + max(layer for _, layer in site_layers)))
            see = lambda site, layer, x: self.seen.__setitem__((site, layer), x)  # noqa: E731
            undo.enter_context(hooks(model, site_layers, see))
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
    modules = getattr(parent, name)
    setattr(parent, name, nn.ModuleList(model.layer_modules[:count]))
    try:
        yield
    finally:
        setattr(parent, name, modules)


class Recorder(Protocol):
    """What is recorded of a pass."""

    def reading(self, model: Model) -> AbstractContextManager[None]:
        """Return hooks on the forward pass."""

    @property
    def leaves(self) -> Sequence[Tensor]:
        """Values of the forward pass whose gradients are recorded."""
        return ()

    def finish(self, gradients: Sequence[Tensor | None]) -> None:
        """Take the gradients of the leaves, None where the number does not depend on one; called S times."""
        return


@dataclass(frozen=True)
class Conservation:
    """Where the relevance of the target went; the parts sum to `target`.

    `softmax` is the share of the bias term of the Taylor rule (AttnLRP Eq. 13; 0 in CP-LRP). `remainder` is relevance
    that no rule accounts for: rounding, and functions with f(0) != 0.
    """

    target: float
    tokens: float
    positions: float = 0.0
    biases: float = 0.0
    softmax: float = 0.0
    weights: float = 0.0
    """With a base model: the share that its changed weights caused."""

    @property
    def remainder(self) -> float:
        return self.target - self.tokens - self.positions - self.biases - self.softmax - self.weights

    def minus(self, other: Conservation) -> Conservation:
        return Conservation(*(getattr(self, part.name) - getattr(other, part.name) for part in fields(self)))

    def to_dict(self) -> dict[str, float]:
        return {**vars(self), "remainder": self.remainder}

    def __str__(self) -> str:
        names = ("positions", "biases", "softmax bias (not attributable to a token)")
        others = zip(names, (self.positions, self.biases, self.softmax), strict=True)
        parts = [f"{name} {value:z.3f}" for name, value in others if abs(value) >= 5e-4]
        parts = [f"tokens {self.tokens:z.3f}", *parts, f"remainder {self.remainder:.1e}"]
        return f"{self.target:z.3f}: {', '.join(parts)}"


LONG = 2048
"""From this number of tokens, memory matters more than the third of a pass that recomputation takes."""


@torch.inference_mode(False)
def new_accounting(model: Model, count: int) -> dict[str, Tensor]:
    """Return zeros (B,) for conservation accounting, by name, in float32 (float64 for a float64 model)."""
    return {name: torch.zeros(count, **model.sums_in) for name in ("softmax", "biases", "positions")}


def forward(model: Model, target: Target, recorders: Sequence[Recorder]) -> Tensor:
    """Run a forward pass, and return its numbers (B,); recorders get no gradients."""
    with ExitStack() as stack:
        stack.enter_context(model.lock)
        stack.enter_context(torch.inference_mode(False))  # what is kept may be part of a later backward pass
        stack.enter_context(torch.no_grad())
        for reading in (target.reading, *(recorder.reading for recorder in recorders)):
            stack.enter_context(reading(model))
        numbers = target.numbers(model)
    return numbers if isinstance(numbers, Tensor) else torch.cat(numbers)


def forward_backward(
    model: Model,
    target: Target,
    recorders: Sequence[Recorder],
    method: Rules | None = None,
    *,
    accounting: dict[str, Tensor] | None = None,
    strict: bool = True,
    checkpoint: bool | None = None,
    paired: PairedWeights | None = None,
    at_modules: ModuleHooks | None = None,
) -> tuple[Tensor, RelevanceMode | None]:
    """Return the numbers (B,) that were explained (one after the other, if there are several a row), and the rules
    that were applied (with strict=False they name the operations without one).

    method: None takes the plain gradient; with paired rules the second half of rows are counterfactuals of the first.
        At least one recorder must make leaves (`Inputs` does).
    accounting: from `new_accounting`; the relevance that rules retain is added to it.
    checkpoint: store one residual stream a layer and recompute everything else; None does so from `LONG` tokens, but
        keeps the outputs of fused attention of very long prompts (`icebear.lrp.context.ATTENTION_KEPT`).
    paired: the weights of a base model, for the counterfactuals.
    at_modules: from `icebear.concepts.passes.proved`; None looks every operation up.
    """
    mode = None
    with ExitStack() as stack:
        stack.enter_context(model.lock)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if method is not None and at_modules is not None:
            mode = RelevanceMode(model.net, method, accounting)
            stack.enter_context(at_modules.below_recorders(mode))
        elif method is not None:
            start = 0 if checkpoint or model.offloaded else LONG  # offloaded: a graph would keep all loaded weights
            layers = model.layer_modules if checkpoint is not False else ()
            rules = relevance_rules(model.net, method, accounting, strict, layers, start, paired)
            mode = stack.enter_context(rules)
            # Our experts know the experts of both prompts, and whose tokens an expert's bias was added to.
            count = len(target.batch.images or ()) if target.batch is not None else 0
            for module in modules_of(model.net):
                forward = experts.forward_in_pass(module, method.paired)
                if count and forward is None:
                    forward = vision.forward_in_pass(module, count)
                if forward is not None:
                    stack.enter_context(replaced(module, "forward", forward))
        # The target sees values before a recorder stops the gradient at them: it may start where others stop.
        for reading in (target.reading, *(recorder.reading for recorder in recorders)):
            stack.enter_context(reading(model))
        if mode is not None and at_modules is not None:
            stack.enter_context(at_modules.above_recorders(mode))
        numbers = target.numbers(model)
        seeds = [numbers] if isinstance(numbers, Tensor) else numbers  # a backward pass costs only what is below it
        counts = [len(recorder.leaves) for recorder in recorders]
        leaves = [leaf for recorder in recorders for leaf in recorder.leaves]
        for left, seed in zip(reversed(range(len(seeds))), seeds, strict=True):
            gradients = list(torch.autograd.grad(seed.sum(), leaves, retain_graph=left > 0, allow_unused=True))
            for recorder, count in zip(recorders, counts, strict=True):
                recorder.finish(gradients[:count])
                del gradients[:count]
    return torch.cat(seeds).detach(), mode


class Checked(TorchFunctionMode):
    """Calls `check` before each operation of torch in this thread; an error that it raises ends the computation."""

    def __init__(self, check: Callable[[], None]) -> None:
        super().__init__()
        self.check = check

    def __torch_function__(
        self, func: Callable, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.check()
        return func(*args, **(kwargs or {}))
