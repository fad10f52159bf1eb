"""The input of a model as leaves of the graph, and its residual stream: whether it is finite, and where sinks are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from icebear.concepts.passes.run import Recorder
from icebear.errors import ModelError, NumericalError
from icebear.models.batch import Batch
from icebear.models.model import Model

InputHook = Callable[[int, Tensor], Tensor]
"""Takes a stack (0 for the encoder or the only one, 1 for the decoder) and its input, embeddings (B, T, D) or pixels
(B, C, H, W), and returns the input that the stack reads. The pixels of images in prompts come as the input of another
stack, `PIXELS`."""
PIXELS = 1


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
        if kwargs.get("pixel_values") is None:
            return args, kwargs
        return args, {**kwargs, "pixel_values": hook(PIXELS if model.task.reads_text else 0, kwargs["pixel_values"])}

    with ExitStack() as undo:
        undo.callback(model.net.register_forward_pre_hook(pixels, with_kwargs=True).remove)
        if model.task.reads_text:
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
        """The input of each stack, (B, T, D) or (B, C, H, W), and then the pixels of images in prompts."""
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
        return [self._leaves[stack] for stack in sorted(self._leaves)]

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


SINK_RATIO = 4
"""In most layers, the norm at a sink is above this multiple of the median norm. Massive activations (Sun et al. 2024)
reach 10 to 150 on SmolLM2 and Gemma 3; other positions stay under 2."""


class Stream(Recorder):
    """Record the norm of the residual stream after each layer."""

    def __init__(self, model: Model, batch: Batch, gradients: bool = False) -> None:
        """gradients: read them too, to find where a backward pass breaks."""
        self.model, self.batch, self.gradients = model, batch, gradients
        self.options = model.sums_in
        self.norms = torch.zeros(len(batch.ids), model.layers, batch.spans[1].stop, **self.options)
        """(B, L, T); zero in layers of the other stack."""
        self.gradient = torch.zeros(model.layers, **self.options)
        """The sum of the gradient after each layer: finite if the gradient is."""

    @contextmanager
    def reading(self, model: Model) -> Iterator[None]:
        with ExitStack() as undo:
            for layer, module in enumerate(model.layer_modules):
                undo.callback(module.register_forward_hook(partial(self._read, layer)).remove)
            yield

    def _read(self, layer: int, module: Any, args: Any, output: Any) -> None:
        x = output[0] if isinstance(output, tuple | list) else output  # (B, T, D)
        columns = self.batch.span_of(self.model.stack_of(layer))
        if x.shape[:2] != self.norms[:, 0, columns].shape:  # of an unknown family: no residual stream
            return
        x = x.flatten(2)  # some keep several
        self.norms[:, layer, columns] = torch.linalg.vector_norm(x.detach(), dim=-1, dtype=self.options["dtype"])
        if self.gradients and x.requires_grad:
            x.register_hook(partial(self._read_gradient, layer))

    def _read_gradient(self, layer: int, g: Tensor) -> None:
        self.gradient[layer] = g.sum()

    def finish(self, gradients: Sequence[Tensor | None] = ()) -> None:
        """Raises `NumericalError` naming the first layer whose output, or gradient, is not finite."""
        bad = torch.zeros(self.model.layers, dtype=torch.bool)
        for row in range(len(self.batch.ids)):
            bad |= ~torch.isfinite(self.norms[row, :, self.batch.columns(row)]).all(-1).cpu()
        if bad.any():
            raise NumericalError(
                f"The output of layer {int(bad.nonzero()[0])} is NaN or infinite; try other weights or --dtype float32."
            )
        bad = ~torch.isfinite(self.gradient)
        if bad.any():
            raise NumericalError(
                f"The backward pass is NaN or infinite from layer {int(bad.nonzero()[-1])} down; try --dtype float32."
            )

    def sinks(self, row: int) -> tuple[int, ...]:
        """Return the sinks of a prompt: the first position (if `Family.first_is_sink`) and special tokens, or the
        tokens that a model of images adds to its patches; and huge residual streams."""
        ids, read = self.batch.row_ids(row), self.batch.lengths[row]
        stream = self.norms[row][:, self.batch.columns(row)]  # (L, T)
        own_tokens = self.model.task.own_tokens(self.model)
        first_is_sink = own_tokens is None and (not self.model.has_family or self.model.family.first_is_sink)
        special = self.model.special_ids() if own_tokens is None else ()
        sinks = {*[0] * first_is_sink, *(position for position, token in enumerate(ids) if token in special)}
        sinks |= {*(own_tokens or ())}
        for start, part in ((0, stream[:, :read]), (read, stream[:, read:])):  # of the encoder, of the decoder
            norms = part[(part != 0).any(1)]
            if norms.numel():
                ratio = norms / norms.median(dim=1, keepdim=True).values
                huge = (ratio.median(dim=0).values > SINK_RATIO).nonzero().flatten()
                sinks |= {*[start] * first_is_sink, *(huge + start).tolist()}
        return tuple(sorted(sinks))
