"""A prompt read once up to its last token: what is edited there, or behind it, changes nothing before it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from icebear.concepts.methods.lrp import AttnLRP
from icebear.concepts.models.model import Model
from icebear.concepts.passes.inputs import Inputs
from icebear.concepts.passes.run import forward_backward
from icebear.concepts.passes.sites import hooks

Place = tuple[int, int, int]
"""Layer and index of an FFN neuron, and the step: 0 at the last token, s at the s-th token of the phrase behind it."""
Edits = Mapping[Place, float]
"""What activations are set to."""

TOKENS = 8192
"""Of all copies of a prompt that are read at once, which bounds the memory of their keys and values."""
ROWS = 64


class LastToken:
    """Passes of the last token alone, and of a phrase behind it, behind the keys and values of those before it (exact,
    because no token looks at a later one)."""

    def __init__(self, model: Model, ids: Sequence[int], phrase: Sequence[int] = ()) -> None:
        """phrase: tokens written there; S of them are predicted, and all but the last are read."""
        self.model, self.ids = model, list(ids)
        self.read = [self.ids[-1], *phrase[:-1]]
        self.steps = len(self.read)
        self.rows = max(1, min(ROWS, TOKENS // (len(self.ids) + self.steps)))
        self.cache: Any = None
        if len(self.ids) > 1:
            before = torch.tensor([self.ids[:-1]], device=model.device)
            with model.lock, torch.no_grad():
                self.cache = model.net.base_model(input_ids=before, use_cache=True).past_key_values

    def before(self, step: int) -> list[int]:
        """What is read before the prediction of a step."""
        return [*self.ids, *self.read[1 : step + 1]]

    def _inputs(self, count: int) -> dict[str, Any]:
        """What is read `count` times; passes write to the cache, so each has its copy."""
        cache = copy.deepcopy(self.cache)
        if cache is not None:
            cache.batch_repeat_interleave(count)
        ids = torch.tensor([[*self.ids[:-1], *self.read]], device=self.model.device).expand(count, -1)
        return {"input_ids": ids[:, -self.steps :], "attention_mask": torch.ones_like(ids), "past_key_values": cache}

    def activations(self) -> Tensor:
        """(L, F, S) of the FFN neurons."""
        values = torch.zeros(self.model.layers, self.model.width("ffn"), self.steps)

        def visit(site: str, layer: int, x: Tensor) -> None:
            values[layer] = x[0].float().cpu().T

        places = [("ffn", layer) for layer in self.model.layers_with("ffn")]
        with self.model.lock, torch.no_grad(), hooks(self.model, places, visit):
            self.model.net(**self._inputs(1))
        return values

    @torch.no_grad()
    def logits(self, proposals: Sequence[Edits]) -> Tensor:
        """(N, S, V) of the next tokens, float32 on the CPU, under each of the proposed edits."""
        logits = []
        for start in range(0, len(proposals), self.rows):
            part = proposals[start : start + self.rows]
            by_layer: dict[int, list[tuple[int, int, int, float]]] = {}
            for row, proposal in enumerate(part):
                for (layer, index, step), value in proposal.items():
                    by_layer.setdefault(layer, []).append((row, step, index, value))

            def visit(site: str, layer: int, x: Tensor, edits: dict = by_layer) -> Tensor:
                return _set(x, edits[layer])

            with self.model.lock, hooks(self.model, [("ffn", layer) for layer in by_layer], visit):
                logits.append(self.model.net(**self._inputs(len(part))).logits.float().cpu())
        return torch.cat(logits)

    def slopes(self, edits: Edits, explained: Callable[[Tensor], Tensor], method: AttnLRP | None) -> Tensor:
        """(L, F, S) the gradient of `explained` (a number of the logits (S, V)) at each FFN neuron, under edits, by the
        rules of a method; None is the plain gradient. Times the activation it is the relevance."""
        model, slopes = self.model, _Slopes(edits)
        forward_backward(model, _Margin(self._inputs(1), explained), [Inputs(), slopes], method)
        gradients = torch.zeros(model.layers, model.width("ffn"), self.steps)
        for layer, gradient in zip(model.layers_with("ffn"), slopes.gradients, strict=True):
            if gradient is not None:
                gradients[layer] = gradient[0].float().cpu().T
        return gradients.nan_to_num(0.0, 0.0, 0.0)


class _Margin:
    """Explains a number of the next tokens' logits."""

    def __init__(self, inputs: dict[str, Any], explained: Callable[[Tensor], Tensor]) -> None:
        self.inputs, self.explained = inputs, explained

    def reading(self, model: Model) -> nullcontext[None]:
        return nullcontext()

    def numbers(self, model: Model) -> Tensor:
        return self.explained(model.net(**self.inputs).logits[0].float())[None]


class _Slopes:
    """Records the gradient at every FFN neuron, some of which are set to values."""

    def __init__(self, edits: Edits) -> None:
        self.edits: dict[int, list[tuple[int, int, int, float]]] = {}
        for (layer, index, step), value in edits.items():
            self.edits.setdefault(layer, []).append((0, step, index, value))
        self.leaves: list[Tensor] = []
        self.gradients: Sequence[Tensor | None] = ()

    @contextmanager
    def reading(self, model: Model) -> Iterator[None]:
        with hooks(model, [("ffn", layer) for layer in model.layers_with("ffn")], self._visit):
            yield

    def _visit(self, site: str, layer: int, x: Tensor) -> Tensor:
        if layer in self.edits:
            x = _set(x, self.edits[layer])
        self.leaves.append(x)
        return x

    def finish(self, gradients: Sequence[Tensor | None]) -> None:
        self.gradients = gradients


def _set(x: Tensor, edits: Sequence[tuple[int, int, int, float]]) -> Tensor:
    """x (B, S, F) with the values of edits: row, step, index, value."""
    x = x.clone()
    rows, steps, columns, values = (list(part) for part in zip(*edits, strict=True))
    x[rows, steps, columns] = torch.tensor(values, dtype=x.dtype, device=x.device)
    return x
