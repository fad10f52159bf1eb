"""Prompts read once up to their last token: edits there, or after it, change nothing before it."""

from __future__ import annotations

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
from icebear.edits import Edit
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.records import Neuron

NeuronStep = tuple[int, int, int]
"""Layer and index of an FFN neuron, and the step: 0 at the last token, s at the s-th token of the phrase after it."""
Edits = Mapping[NeuronStep, float]
"""The values that activations are set to."""

PASS_TOKENS = 8192
"""Tokens in all copies of a prompt in one pass; bounds the memory of their keys and values."""
PASS_ROWS = 64
"""Copies of a prompt in one pass; bounds the memory of their logits."""


def values_by_step(edits: Iterable[Edit]) -> dict[NeuronStep, float]:
    """Return the edits of a flip as values by neuron and step. Raises `InputError` for other edits."""
    values = {}
    for edit in edits:
        step = "0" if edit.where == "last" else edit.where.removeprefix("step:")
        neuron_step = edit.neuron.layer, edit.neuron.index, int(step) if step.isdecimal() else 0
        if edit != as_edit(neuron_step, edit.value):
            raise InputError(
                f"{edit} is not an edit that flip makes; choose edits that set FFN neurons at the last token or a step "
                "after it."
            )
        values[neuron_step] = edit.value
    return values


def as_edit(neuron_step: NeuronStep, value: float) -> Edit:
    layer, index, step = neuron_step
    return Edit(Neuron(layer, "ffn", index), "set", value, where=f"step:{step}" if step else "last")


class LastToken:
    """Passes over the last token of a prompt, and a phrase after it, with cached keys and values of the tokens before
    (exact if no token attends to a later one; else, and where a mixer has a state, all tokens are read)."""

    def __init__(self, model: Model, ids: Sequence[int], phrase: Sequence[int] = ()) -> None:
        """phrase: tokens after the prompt; all S of them are predicted, and all but the last are read."""
        self.model, self.ids = model, list(ids)
        self.read = [self.ids[-1], *phrase[:-1]]
        self.steps = len(self.read)
        self.rows = max(1, min(PASS_ROWS, PASS_TOKENS // (len(self.ids) + self.steps)))
        cached = len(self.ids) > 1 and model.task.is_causal and "mixer" not in model.sites
        self.prefix = Prefix.read(model, [self.ids[:-1]]) if cached else None
        self.again = [] if self.prefix else self.ids[:-1]
        """The tokens before, which are read in every pass if later tokens have an influence on them."""
        self.predicting = slice(len(self.again), None)

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
        """(L, F, S) of the FFN neurons."""
        values = torch.zeros(self.model.layers, self.model.width("ffn"), self.steps)

        def visit(site: str, layer: int, x: Tensor) -> None:
            values[layer] = x[0, self.predicting].float().cpu().T

        ffn_layers = [("ffn", layer) for layer in self.model.layers_with("ffn")]
        with self.model.lock, torch.no_grad(), hooks(self.model, ffn_layers, visit):
            self.model.net(**self._inputs(1))
        return values

    @torch.no_grad()
    def logits(self, proposals: Sequence[Edits]) -> Tensor:
        """(N, S, V) of the next tokens, float32 on the CPU, under each of the proposed edits."""
        logits = []
        for start in range(0, len(proposals), self.rows):
            part = proposals[start : start + self.rows]
            edits = _Edited(part, len(self.again))
            with self.model.lock, hooks(self.model, [("ffn", layer) for layer in edits.by_layer], edits.set):
                logits.append(self.model.net(**self._inputs(len(part))).logits[:, self.predicting].float().cpu())
        return torch.cat(logits)

    def gradients(self, edits: Edits, explained: Callable[[Tensor], Tensor], method: AttnLRP | None) -> Tensor:
        """(L, F, S) the gradient of `explained` (a number of the logits (S, V)) at each FFN neuron, under edits, by the
        rules of a method; None is the plain gradient. Activation x gradient is the relevance."""
        model, edited = self.model, _Edited([edits], len(self.again))
        margin = _Margin(self._inputs(1), lambda logits: explained(logits[self.predicting]))
        forward_backward(model, margin, [Inputs(), edited], method)
        gradients = torch.zeros(model.layers, model.width("ffn"), self.steps)
        for layer, gradient in zip(model.layers_with("ffn"), edited.gradients, strict=True):
            if gradient is not None:
                gradients[layer] = gradient[0, self.predicting].float().cpu().T
        return gradients.nan_to_num(0.0, 0.0, 0.0)


class _Margin(Target):
    """The objective is a number of the next tokens' logits."""

    def __init__(self, inputs: dict[str, Any], explained: Callable[[Tensor], Tensor]) -> None:
        self.inputs, self.explained = inputs, explained

    def numbers(self, model: Model) -> Tensor:
        return self.explained(model.net(**self.inputs).logits[0].float())[None]


class _Edited:
    """Sets FFN neurons of each row to the values of its edits, and records the gradient at all of them."""

    def __init__(self, rows: Sequence[Edits], step_0: int) -> None:
        """step_0: its position in a pass."""
        self.by_layer: dict[int, list[tuple[int, int, int, float]]] = {}
        for row, edits in enumerate(rows):
            for (layer, index, step), value in edits.items():
                self.by_layer.setdefault(layer, []).append((row, step_0 + step, index, value))
        self.leaves: list[Tensor] = []
        self.gradients: Sequence[Tensor | None] = ()

    def set(self, site: str, layer: int, x: Tensor) -> Tensor:
        """x (B, S, F)"""
        if layer in self.by_layer:
            rows, steps, columns, values = (list(part) for part in zip(*self.by_layer[layer], strict=True))
            x = x.clone()
            x[rows, steps, columns] = torch.tensor(values, dtype=x.dtype, device=x.device)
        self.leaves.append(x)
        return x

    def reading(self, model: Model) -> AbstractContextManager[None]:
        return hooks(model, [("ffn", layer) for layer in model.layers_with("ffn")], self.set)

    def finish(self, gradients: Sequence[Tensor | None]) -> None:
        self.gradients = gradients


class Paraphrases:
    """Several prompts in place of a `LastToken` of one token: edits act at the last token of each, and the prediction
    of each prompt counts as that of one token of a phrase."""

    steps = 1

    def __init__(self, model: Model, prompts: Sequence[Sequence[int]]) -> None:
        self.model, self.ids = model, list(prompts[0])
        self.each = [LastToken(model, ids) for ids in prompts]

    def before(self, number: int) -> list[int]:
        """Return the token ids before the prediction of one of the prompts."""
        return self.each[number].ids

    def activations(self) -> Tensor:
        """(L, F, 1) of the FFN neurons at the last token of the first prompt."""
        return self.each[0].activations()

    def logits(self, proposals: Sequence[Edits]) -> Tensor:
        """(N, P, V) of the next tokens, under each of the proposed edits."""
        return torch.cat([prompt.logits(proposals) for prompt in self.each], 1)

    def gradients(self, edits: Edits, explained: Callable[[Tensor], Tensor], method: AttnLRP | None) -> Tensor:
        """(L, F, 1) the sum over prompts of the gradients of `explained`, a number of all their logits (P, V)."""
        rows = self.logits([edits])[0]
        total = torch.zeros(self.model.layers, self.model.width("ffn"), 1)
        for number, prompt in enumerate(self.each):

            def of_prompt(prompt_logits: Tensor, number: int = number) -> Tensor:
                others = rows.to(prompt_logits)
                return explained(torch.cat([others[:number], prompt_logits, others[number + 1 :]]))

            total += prompt.gradients(edits, of_prompt, method)
        return total
