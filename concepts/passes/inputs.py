"""The input of a model as leaves of the graph: token embeddings or pixels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from icebear.concepts.passes.run import Recorder
from icebear.errors import ModelError
from icebear.models.model import Model

InputHook = Callable[[int, Tensor], Tensor]
"""Takes a stack (0 for the encoder or the only one, 1 for the decoder) and its input, embeddings (B, T, D) or pixels
(B, C, H, W), and returns the input that the stack reads."""


@contextmanager
def input_hooks(model: Model, hook: InputHook) -> Iterator[None]:
    """Call the hook on the input of each stack."""
    calls = [0]
    shape: list[int] = []

    def enter(module: Any, args: Any, kwargs: dict) -> None:
        ids = kwargs.get("input_ids")
        shape[:] = [] if ids is None else ids.shape

    def embedded(module: Any, args: Any, output: Tensor) -> Tensor:
        calls[0] += 1
        if not isinstance(output, Tensor) or (calls[0] == 1 and shape and list(output.shape[:-1]) != shape):
            raise ModelError(
                f"{model.name} ({type(model.net).__name__}) does not embed its tokens as rows of vectors (prompts x "
                "tokens x width), so icebear cannot explain it."
            )
        return hook((calls[0] - 1) % model.task.stacks, output)

    def pixels(module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, {**kwargs, "pixel_values": hook(0, kwargs["pixel_values"])}

    with ExitStack() as undo:
        if not model.task.reads_text:
            undo.callback(model.net.register_forward_pre_hook(pixels, with_kwargs=True).remove)
        else:
            undo.callback(model.net.register_forward_pre_hook(enter, with_kwargs=True).remove)
            for module in model.embeddings:
                undo.callback(module.register_forward_hook(embedded).remove)
        yield


class Inputs(Recorder):
    """Record the input of each stack and its gradient."""

    def __init__(self, change: InputHook = lambda stack, x: x) -> None:
        """change: returns the input to use in place of the model's own."""
        self.change = change
        self._leaves: dict[int, Tensor] = {}
        self.values: list[Tensor] = []
        """The input of each stack, (B, T, D) or (B, C, H, W)."""
        self.gradients: list[Tensor] = []
        """Zero where the number explained does not depend on the input."""

    @contextmanager
    def reading(self, model: Model) -> Iterator[None]:
        def leaf(stack: int, x: Tensor) -> Tensor:
            if stack not in self._leaves:  # else the pass is repeated to find an operation without a rule
                self._leaves[stack] = self.change(stack, x.detach()).detach().requires_grad_()
            return self._leaves[stack].clone()  # some models change it in place

        with input_hooks(model, leaf):
            yield

    @property
    def leaves(self) -> Sequence[Tensor]:
        return list(self._leaves.values())

    def finish(self, gradients: Sequence[Tensor | None]) -> None:
        self.values = [leaf.detach() for leaf in self.leaves]
        self.gradients = [torch.zeros_like(x) if g is None else g for x, g in zip(self.values, gradients, strict=True)]

    def relevance(self) -> list[Tensor]:
        """Return input x gradient of each stack, in float32 (float64 for a float64 model)."""
        return [product(x, g) for x, g in zip(self.values, self.gradients, strict=True)]


def product(x: Tensor, gradient: Tensor) -> Tensor:
    """Return the product in float32, or float64."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.to(dtype) * gradient.to(dtype)
