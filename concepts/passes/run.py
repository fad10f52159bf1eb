"""One forward and one backward pass. Everything that explains anything goes through it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from icebear.concepts.lrp.context import relevance_rules
from icebear.concepts.models.model import Model
from icebear.concepts.passes.sites import hooks

if TYPE_CHECKING:
    from icebear.concepts.methods.lrp import AttnLRP, Difference


class Target(Protocol):
    """The number that is explained, one a row; rows do not see each other, so that one backward pass from the sum of
    them explains each. Of several numbers a row there are as many backward passes from the one forward pass."""

    def reading(self, model: Model) -> AbstractContextManager[None]:
        """Hooks, where the number is read inside the model."""
        return nullcontext()

    def numbers(self, model: Model) -> Tensor | list[Tensor]:
        """(B,), or S of them, after a forward pass, which it makes."""


class Recorder(Protocol):
    """What is kept of the pass."""

    def reading(self, model: Model) -> AbstractContextManager[None]:
        """Hooks that see the forward pass."""

    @property
    def leaves(self) -> Sequence[Tensor]:
        """Values of the forward pass whose gradients it wants."""

    def finish(self, gradients: Sequence[Tensor | None]) -> None:
        """The gradients of its leaves, None where the number does not depend on one; S times."""


@dataclass(frozen=True)
class Conservation:
    """Where the relevance of the target went; the parts add up to `target`.

    `softmax` is what the bias term of the Taylor rule keeps (AttnLRP Eq. 13; 0 in CP-LRP), `rest` what no
    rule accounts for: rounding, and functions with f(0) != 0.
    """

    target: float
    tokens: float
    positions: float = 0.0
    biases: float = 0.0
    softmax: float = 0.0

    @property
    def rest(self) -> float:
        return self.target - self.tokens - self.positions - self.biases - self.softmax

    def less(self, other: Conservation) -> Conservation:
        return Conservation(*(getattr(self, part.name) - getattr(other, part.name) for part in fields(self)))

    def to_dict(self) -> dict[str, float]:
        return {**vars(self), "rest": self.rest}

    def __str__(self) -> str:
        others = {
            "positions": self.positions,
            "biases": self.biases,
            "softmax bias (not attributable to a token)": self.softmax,
        }
        parts = [f"{name} {value:z.3f}" for name, value in others.items() if abs(value) >= 5e-4]
        return f"{self.target:z.3f}: {', '.join([f'tokens {self.tokens:z.3f}', *parts, f'rest {self.rest:.1e}'])}"


LONG = 2048
"""Tokens from which on memory matters more than the third of a pass that it takes to compute twice."""


def new_accounting(model: Model, count: int) -> dict[str, Tensor]:
    """Conservation accounting: zeros (B,) for what rules keep, by name, in float32 (float64 for a float64 model)."""
    dtype = torch.promote_types(model.dtype, torch.float32)
    return {name: torch.zeros(count, dtype=dtype, device=model.device) for name in ("softmax", "biases", "positions")}


def forward(model: Model, target: Target, recorders: Sequence[Recorder]) -> Tensor:
    """The numbers (B,) of a forward pass alone, seen by recorders; those that ask for gradients get none."""
    with ExitStack() as stack:
        stack.enter_context(model.lock)
        stack.enter_context(torch.no_grad())
        stack.enter_context(target.reading(model))
        for recorder in recorders:
            stack.enter_context(recorder.reading(model))
        return _together(target.numbers(model))


def forward_backward(
    model: Model,
    target: Target,
    recorders: Sequence[Recorder],
    method: AttnLRP | Difference | None = None,
    *,
    accounting: dict[str, Tensor] | None = None,
    strict: bool = True,
    checkpoint: bool | None = None,
) -> tuple[Tensor, tuple[str, ...]]:
    """The numbers (B,) or (S, B) that were explained, and the operations without a rule (with strict=False).

    method: None takes the plain gradient; with a `Difference` the second half of rows are partners of the first. At
        least one recorder must make leaves (`Inputs` does).
    accounting: of `new_accounting`; what the rules keep is added to it.
    checkpoint: keep one residual stream a layer and recompute the rest; None does so from `LONG` tokens on.
    """
    missing: tuple[str, ...] = ()
    with ExitStack() as stack:
        stack.enter_context(model.lock)
        stack.enter_context(torch.enable_grad())
        if method is not None:
            start = 0 if checkpoint or model.offloaded else LONG  # the graph would keep what is loaded
            layers = model.layer_modules if checkpoint is not False else ()
            mode = stack.enter_context(
                relevance_rules(
                    model.net,
                    method,
                    accounting=accounting,
                    strict=strict,
                    checkpoint_layers=layers,
                    checkpoint_from=start,
                )
            )
            # Ours take both partners' experts for both, and know whose tokens an expert's bias was added to.
            if model.has_family and model.family.experts:
                routers = [("router", layer) for layer in model.layers_with("router")]
                stack.enter_context(hooks(model, routers, lambda site, layer, x: None))
        # The target sees values before a recorder stops the gradient at them: it may start where others stop.
        stack.enter_context(target.reading(model))
        for recorder in recorders:
            stack.enter_context(recorder.reading(model))
        numbers = target.numbers(model)
        counts = [len(recorder.leaves) for recorder in recorders]
        leaves = [leaf for recorder in recorders for leaf in recorder.leaves]
        seeds = [numbers] if isinstance(numbers, Tensor) else numbers  # apart: a pass costs what is below its own only
        for left, seed in zip(reversed(range(len(seeds))), seeds, strict=True):
            gradients = list(torch.autograd.grad(seed.sum(), leaves, retain_graph=left > 0, allow_unused=True))
            for recorder, count in zip(recorders, counts, strict=True):
                recorder.finish(gradients[:count])
                del gradients[:count]
        if method is not None:
            missing = tuple(dict.fromkeys(mode.missing))
    return _together(numbers).detach(), missing


def _together(numbers: Tensor | list[Tensor]) -> Tensor:
    """(B,) or (S, B)"""
    return numbers if isinstance(numbers, Tensor) else torch.stack(numbers)
