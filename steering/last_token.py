"""A prompt read once up to its last token: what is edited there changes nothing before it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from concepts.attribution import embedding_leaf
from concepts.lrp.context import relevance_rules
from concepts.lrp.method import AttnLRP
from concepts.models.model import Model
from concepts.passes.taps import visiting

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
        model, seen = self.model, {}
        by_layer: dict[int, list[tuple[int, float]]] = {}
        for (layer, index), value in edits.items():
            by_layer.setdefault(layer, []).append((index, value))

        def visit(site: str, layer: int, x: Tensor) -> Tensor:
            if layer in by_layer:
                columns, values = zip(*by_layer[layer], strict=True)
                x = _set(x, [0] * len(columns), columns, values)
            seen[layer] = x
            return x

        rules = relevance_rules(model.net, method) if method else nullcontext()
        places = [("ffn", layer) for layer in range(model.layers)]
        with model.lock, torch.enable_grad(), rules, embedding_leaf(model), visiting(model, places, visit):
            number = explained(model.net(**self._inputs(1)).logits[0, -1].float())
            gradients = torch.autograd.grad(number, [seen[layer] for layer in range(model.layers)], allow_unused=True)
        found = torch.zeros(model.layers, model.width("ffn"))
        for layer, gradient in enumerate(gradients):
            if gradient is not None:
                found[layer] = gradient[0, -1].float().cpu()
        return found.nan_to_num(0.0, 0.0, 0.0)


def _set(x: Tensor, rows: Sequence[int], columns: Sequence[int], values: Sequence[float]) -> Tensor:
    """x (B, T, F) with values at the last token."""
    x = x.clone()
    x[list(rows), -1, list(columns)] = torch.tensor(values, dtype=x.dtype, device=x.device)
    return x
