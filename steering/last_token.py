"""A prompt read once up to its last token: what is edited there changes nothing before it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from concepts.lrp.method import AttnLRP
from concepts.models.model import Model
from concepts.passes.inputs import Inputs
from concepts.passes.run import run
from concepts.passes.sites import visiting

Place = tuple[int, int]
"""Layer and index of an FFN neuron."""
Edits = Mapping[Place, float]
"""What activations are set to."""

TOKENS = 8192
"""Of all copies of a prompt that are read at once, which bounds the memory of their keys and values."""
ROWS = 64


class LastToken:
    """Passes of the last token alone behind the keys and values of those before it (exact, because no token looks at a
    later one)."""

    def __init__(self, model: Model, ids: Sequence[int]) -> None:
        self.model, self.ids = model, list(ids)
        self.rows = max(1, min(ROWS, TOKENS // len(self.ids)))
        self.cache: Any = None
        if len(self.ids) > 1:
            before = torch.tensor([self.ids[:-1]], device=model.device)
            with model.lock, torch.no_grad():
                self.cache = model.net.base_model(input_ids=before, use_cache=True).past_key_values

    def _inputs(self, count: int) -> dict[str, Any]:
        """The last token `count` times; passes write to the cache, so each has its copy."""
        cache = copy.deepcopy(self.cache)
        if cache is not None:
            cache.batch_repeat_interleave(count)
        ids = torch.tensor([self.ids], device=self.model.device).expand(count, -1)
        return {"input_ids": ids[:, -1:], "attention_mask": torch.ones_like(ids), "past_key_values": cache}

    def activations(self) -> Tensor:
        """(L, F) of the FFN neurons."""
        found = torch.zeros(self.model.layers, self.model.width("ffn"))

        def visit(site: str, layer: int, x: Tensor) -> None:
            found[layer] = x[0, -1].float().cpu()

        places = [("ffn", layer) for layer in range(self.model.layers)]
        with self.model.lock, torch.no_grad(), visiting(self.model, places, visit):
            self.model.net(**self._inputs(1))
        return found

    @torch.no_grad()
    def logits(self, proposals: Sequence[Edits]) -> Tensor:
        """(N, V) of the next token, float32 on the CPU, under each of the proposed edits."""
        found = []
        for start in range(0, len(proposals), self.rows):
            part = proposals[start : start + self.rows]
            by_layer: dict[int, list[tuple[int, int, float]]] = {}
            for row, proposal in enumerate(part):
                for (layer, index), value in proposal.items():
                    by_layer.setdefault(layer, []).append((row, index, value))

            def visit(site: str, layer: int, x: Tensor, edits: dict = by_layer) -> Tensor:
                rows, columns, values = zip(*edits[layer], strict=True)
                return _set(x, rows, columns, values)

            with self.model.lock, visiting(self.model, [("ffn", layer) for layer in by_layer], visit):
                found.append(self.model.net(**self._inputs(len(part))).logits[:, -1].float().cpu())
        return torch.cat(found)

    def slopes(self, edits: Edits, explained: Callable[[Tensor], Tensor], method: AttnLRP | None) -> Tensor:
        """(L, F) the gradient of `explained` (a number of the logits (V,)) at each FFN neuron, under edits, by the
        rules of a method; None is the plain gradient. Times the activation it is the relevance."""
        model, slopes = self.model, _Slopes(edits)
        run(model, _Margin(self._inputs(1), explained), [Inputs(), slopes], method)
        found = torch.zeros(model.layers, model.width("ffn"))
        for layer, gradient in enumerate(slopes.gradients):
            if gradient is not None:
                found[layer] = gradient[0, -1].float().cpu()
        return found.nan_to_num(0.0, 0.0, 0.0)


class _Margin:
    """Explains a number of the next token's logits."""

    def __init__(self, inputs: dict[str, Any], explained: Callable[[Tensor], Tensor]) -> None:
        self.inputs, self.explained = inputs, explained

    def reading(self, model: Model) -> nullcontext[None]:
        return nullcontext()

    def numbers(self, model: Model) -> Tensor:
        return self.explained(model.net(**self.inputs).logits[0, -1].float())[None]


class _Slopes:
    """Records the gradient at every FFN neuron, some of which are set to values."""

    def __init__(self, edits: Edits) -> None:
        self.edits: dict[int, list[tuple[int, float]]] = {}
        for (layer, index), value in edits.items():
            self.edits.setdefault(layer, []).append((index, value))
        self.leaves: list[Tensor] = []
        self.gradients: Sequence[Tensor | None] = ()

    @contextmanager
    def reading(self, model: Model) -> Iterator[None]:
        with visiting(model, [("ffn", layer) for layer in range(model.layers)], self._visit):
            yield

    def _visit(self, site: str, layer: int, x: Tensor) -> Tensor:
        if layer in self.edits:
            columns, values = zip(*self.edits[layer], strict=True)
            x = _set(x, [0] * len(columns), columns, values)
        self.leaves.append(x)
        return x

    def finish(self, gradients: Sequence[Tensor | None]) -> None:
        self.gradients = gradients


def _set(x: Tensor, rows: Sequence[int], columns: Sequence[int], values: Sequence[float]) -> Tensor:
    """x (B, T, F) with values at the last token."""
    x = x.clone()
    x[list(rows), -1, list(columns)] = torch.tensor(values, dtype=x.dtype, device=x.device)
    return x
