"""Prompts read once up to their last token: edits there, or after it, change nothing before it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from icebear.concepts.methods.attnlrp import AttnLRP
from icebear.concepts.passes.inputs import Inputs
from icebear.concepts.passes.prefix import Prefix
from icebear.concepts.passes.run import Target, forward_backward
from icebear.concepts.passes.sites import hooks
from icebear.edits import Edit, SwapSource
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.records import Neuron

NeuronStep = tuple[int, int, int]
"""Layer and index of an FFN neuron (of a head: the number of FFN neurons, and its index after them), and the step: 0 at
the last token, s at the s-th token of the phrase after it."""
Edits = Mapping[NeuronStep, float]
"""The values that activations are set to; of a head, how far its output moves to the one after the source prompt: 1 is
a swap."""

PASS_TOKENS = 8192
"""Tokens in all copies of a prompt in one pass; bounds the memory of their keys and values."""
PASS_ROWS = 64
"""Copies of a prompt in one pass; bounds the memory of their logits."""


def values_by_step(model: Model, edits: Iterable[Edit]) -> dict[NeuronStep, float]:
    """Return the edits of a flip as values by neuron and step. Raises `InputError` for other edits."""
    values = {}
    for edit in edits:
        neuron, step = edit.neuron, "0" if edit.where == "last" else edit.where.removeprefix("step:")
        is_swap = edit.source is not None
        index = neuron.index + is_swap * model.width("ffn")
        neuron_step = neuron.layer, index, int(step) if step.isdecimal() else 0
        value = 1.0 if is_swap else edit.value
        if edit != as_edit(model, neuron_step, value, edit.source):
            raise InputError(
                f"{edit} is not an edit that flip makes; choose edits that set FFN neurons, or swap heads, at the last "
                "token or a step after it."
            )
        values[neuron_step] = value
    return values


def as_edit(model: Model, neuron_step: NeuronStep, value: float, source: SwapSource | None = None) -> Edit:
    """source: the source prompt of a swap."""
    (layer, index, step), neurons = neuron_step, model.width("ffn")
    where = f"step:{step}" if step else "last"
    if index >= neurons and source is not None:
        return Edit.from_prompt(Neuron(layer, "head", index - neurons), source, where)
    return Edit(Neuron(layer, "ffn", index), "set", value, where=where)


class LastToken:
    """Passes over the last token of a prompt, and a phrase after it, with cached keys and values of the tokens before
    (exact if no token attends to a later one; else, and where a mixer has a state, all tokens are read)."""

    def __init__(
        self, model: Model, ids: Sequence[int], phrase: Sequence[int] = (), source: Sequence[int] | None = None
    ) -> None:
        """phrase: tokens after the prompt; all S of them are predicted, and all but the last are read. source: a prompt
        after whose last token heads have the outputs that they are swapped for; without it there are no heads."""
        self.model, self.ids = model, list(ids)
        self.swapped = {} if source is None else head_outputs(model, model.inputs(model.padded([list(source)])))
        self.read = [self.ids[-1], *phrase[:-1]]
        self.steps = len(self.read)
        self.rows = max(1, min(PASS_ROWS, PASS_TOKENS // (len(self.ids) + self.steps)))
        cached = len(self.ids) > 1 and model.task.is_causal and "mixer" not in model.sites
        prefix = Prefix.read(model, [self.ids[:-1]]) if cached else None
        self.prefix = None if prefix is None or prefix.cache is None else prefix  # GPT-1 keeps nothing
        self.again = [] if self.prefix else self.ids[:-1]
        """The tokens before, which are read in every pass if later tokens have an influence on them."""
        self.predicting = slice(len(self.again), None)

    def with_swaps(self, swapped: dict[int, Tensor]) -> LastToken:
        """Return the same passes with other outputs (R, A) of heads, one row for all proposals or one for each."""
        other = copy.copy(self)
        other.swapped = swapped
        return other

    def before(self, step: int) -> list[int]:
        """Return the token ids before the prediction of a step."""
        return [*self.ids, *self.read[1 : step + 1]]

    def _inputs(self, count: int) -> dict[str, Any]:
        """Return the inputs of a pass with `count` rows."""
        ids = torch.tensor([[*self.again, *self.read]] * count, device=self.model.device)
        if self.prefix is None:
            return {"input_ids": ids}
        return self.prefix.inputs(ids, [0] * count, [self.prefix.length] * count)

    def activations(self) -> Tensor:
        """(L, F, S) of the FFN neurons, and 0 for each head after them."""
        values = self._zeros()
        for layer, x in _read(self.model, "ffn", self._inputs(1)).items():
            values[layer, : x.shape[-1]] = x[0, self.predicting].float().T
        return values.cpu()  # at once, because each move waits for the device

    def _zeros(self) -> Tensor:
        heads = self.model.width("head") if self.swapped else 0
        shape = self.model.layers, self.model.width("ffn") + heads, self.steps
        return torch.zeros(shape, device=self.model.device)

    @torch.no_grad()
    def logits(self, proposals: Sequence[Edits]) -> Tensor:
        """(P, S, V) of the next tokens, float32 on the CPU, under each of P proposals of edits."""
        logits = []
        for start in range(0, len(proposals), self.rows):
            part = proposals[start : start + self.rows]
            edits = _Edited(self, part, start)
            with self.model.lock, hooks(self.model, edits.moved, edits.set):
                logits.append(self.model.net(**self._inputs(len(part))).logits[:, self.predicting].float().cpu())
        return torch.cat(logits)

    def gradients(self, edits: Edits, explained: Callable[[Tensor], Tensor], method: AttnLRP | None) -> Tensor:
        """(L, F, S) the gradient of `explained` (a number of the logits (S, V)) at each FFN neuron, and how much it
        grows with the move of each head to its swap, under edits, by the rules of a method; None is the plain gradient.
        Activation x gradient is the relevance."""
        model, edited = self.model, _Edited(self, [edits])
        margin = _Margin(self._inputs(1), lambda logits: explained(logits[self.predicting]))
        forward_backward(model, margin, [Inputs(), edited], method)
        gradients = self._zeros()
        for (site, layer), x, gradient in zip(edited.at, edited.leaves, edited.gradients, strict=True):
            if gradient is None:
                continue
            gradient = gradient[0, self.predicting]
            if site == "attn":
                moves = gradient[:1] * (self.swapped[layer] - x[0, self.predicting][:1])
                gradients[layer, model.width("ffn") :, 0] = moves.unflatten(-1, (-1, model.head_dim)).sum(-1)[0]
            else:
                gradients[layer, : gradient.shape[-1]] = gradient.float().T
        return gradients.nan_to_num(0.0, 0.0, 0.0).cpu()


class _Margin(Target):
    """The objective is a number of the next tokens' logits."""

    def __init__(self, inputs: dict[str, Any], explained: Callable[[Tensor], Tensor]) -> None:
        self.inputs, self.explained = inputs, explained

    def numbers(self, model: Model) -> Tensor:
        return self.explained(model.net(**self.inputs).logits[0].float())[None]


class _Edited:
    """Moves FFN neurons and heads of each row by its edits, and records the gradient at all of them."""

    def __init__(self, last: LastToken, rows: Sequence[Edits], start: int = 0) -> None:
        """start: the number of the first row among all proposals."""
        self.last, self.start, model = last, start, last.model
        step_0, neurons = len(last.again), model.width("ffn")
        self.moved: dict[tuple[str, int], list[tuple[int, int, int, float]]] = {}
        for row, edits in enumerate(rows):
            for (layer, index, step), value in edits.items():
                site, column = ("attn", index - neurons) if index >= neurons else ("ffn", index)
                self.moved.setdefault((site, layer), []).append((row, step_0 + step, column, value))
        self.at: list[tuple[str, int]] = []
        self.leaves: list[Tensor] = []
        self.gradients: Sequence[Tensor | None] = ()

    def set(self, site: str, layer: int, x: Tensor) -> Tensor:
        """x (B, S, F), or (B, S, heads x head_dim)"""
        if (site, layer) in self.moved:
            rows, steps, columns, values = (list(part) for part in zip(*self.moved[site, layer], strict=True))
            x, value = x.clone(), torch.tensor(values, dtype=x.dtype, device=x.device)
            if site == "attn":
                by_head = (-1, self.last.model.head_dim)
                heads, swapped = x.unflatten(-1, by_head), self.last.swapped[layer].unflatten(-1, by_head)
                sources = [min(self.start + row, len(swapped) - 1) for row in rows]
                moves = swapped[sources, columns] - heads[rows, steps, columns]
                heads[rows, steps, columns] += value[:, None] * moves
            else:
                x[rows, steps, columns] = value
        self.at.append((site, layer))
        self.leaves.append(x)
        return x

    def reading(self, model: Model) -> AbstractContextManager[None]:
        sites = ("attn", "ffn") if self.last.swapped else ("ffn",)
        return hooks(model, [(site, layer) for site in sites for layer in model.layers_with(site)], self.set)

    def finish(self, gradients: Sequence[Tensor | None]) -> None:
        self.gradients = gradients


def head_outputs(model: Model, inputs: dict[str, Any]) -> dict[int, Tensor]:
    """Return layer -> the outputs (B, A) of its heads at the last column of a pass, before the output projection."""
    return {layer: x[:, -1] for layer, x in _read(model, "attn", inputs).items()}


def _read(model: Model, site: str, inputs: dict[str, Any]) -> dict[int, Tensor]:
    """Return layer -> the activations (B, T, N) of a site in one pass."""
    read: dict[int, Tensor] = {}
    at = [(site, layer) for layer in model.layers_with(site)]
    with model.lock, torch.no_grad(), hooks(model, at, lambda _, layer, x: read.update({layer: x})):
        model.net(**inputs)
    return read
