"""ALTI and ALTI-Logit: how much of each layer's vectors comes from which token, by distance.

Attention's output at i is a sum over j of T_i(x_j) (with the residual stream at j = i); the closer T_i(x_j) alone comes
to it in L1, the more it contributes. Norms are linear maps at the divisor they have; FFNs are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from icebear.concepts.methods.attention import eager
from icebear.concepts.methods.method import Method
from icebear.concepts.models.linear import Linear, norm_divisor, through_norm
from icebear.concepts.models.model import Model
from icebear.concepts.models.objective import Objective
from icebear.concepts.passes.sites import hooks
from icebear.concepts.vocabulary import unembedding
from icebear.errors import InputError


@dataclass
class _Layer:
    """Of one prompt: the residual stream (T, D) before, attention (H, T, T), values (T, H, d), W_O (H, d, D)."""

    x: Tensor
    attention: Tensor
    v: Tensor
    o: Tensor

    def from_tokens(self) -> Tensor:
        """(T, T, D) what attention adds at i, by the token j that it comes from."""
        return torch.einsum("hij,jhd,hdD->ijD", self.attention, self.v, self.o)

    def contributions(self, parts: Tensor) -> Tensor:
        """(T, T) shares of j in the sum over j of parts (T, T, D): above zero, and 1 for each i."""
        whole = parts.sum(1, keepdim=True)  # (T, 1, D)
        near = (whole.abs().sum(-1) - (whole - parts).abs().sum(-1)).clamp(min=0)
        return near / near.sum(1, keepdim=True).clamp(min=1e-30)


@dataclass(frozen=True, repr=False)
class AltiLogit(Method):
    """ALTI-Logit (Ferrando et al. 2023): what each layer's attention adds to the logit, by token, traced to the input
    by ALTI. Causal models with the norm in front of attention. What the embedding itself adds counts for its own
    token."""

    per_token = True

    @torch.no_grad()
    def scores(self, model: Model, objective: Objective) -> list[Tensor]:
        if not model.task.is_causal or model.family.attn_norm:
            raise InputError(f"ALTI-Logit is for causal models with the norm before attention, not for {model.name}.")
        rows = []
        for row in range(len(objective.positions)):
            layers, last = _read(model, objective, row)
            total = torch.zeros(len(last))
            targets = objective.targets[row]
            assert targets is not None
            for at, target in zip(objective.positions[row], targets, strict=True):
                reading = partial(_logit, model, last[at], target, objective.contrasts[row])
                down = torch.eye(len(last))  # (T, T) tokens of this layer by tokens of the input
                for layer in layers:
                    parts = layer.from_tokens()
                    total += reading(parts[at]) @ down
                    parts[range(len(parts)), range(len(parts))] += layer.x
                    down = layer.contributions(parts) @ down
                total[at] += reading(layers[0].x[at])
            rows.append(total)
        return rows


@dataclass(frozen=True, repr=False)
class Alti(Method):
    """ALTI (Ferrando et al. 2022): contributions of tokens to each layer's vectors by distance, multiplied layer by
    layer, at the positions explained. Encoders with the norm behind attention (BERT)."""

    per_token = True

    @torch.no_grad()
    def scores(self, model: Model, objective: Objective) -> list[Tensor]:
        if model.task.generates or not model.task.reads_text or not model.family.attn_norm:
            raise InputError(
                f"ALTI is for encoders of text with the norm behind attention (BERT), not for {model.name}."
            )
        rows = []
        for row in range(len(objective.positions)):
            layers, last = _read(model, objective, row)
            down = torch.eye(len(last))
            for number, layer in enumerate(layers):
                parts = layer.from_tokens()
                parts[range(len(parts)), range(len(parts))] += layer.x
                norm = model.layer_modules[number].get_submodule(model.family.attn_norm)
                by = norm_divisor(norm, parts.sum(1, keepdim=True))
                down = layer.contributions(through_norm(norm, parts, model.family.norm_offset, by)) @ down
            rows.append(down[list(objective.positions[row])].sum(0))
        return rows


def _logit(model: Model, last: Tensor, target: int, contrast: int | None, rows: Tensor) -> Tensor:
    """(...) what the logit reads off parts (..., D) of the final residual stream `last` (D,), at its norm's divisor."""
    norm = model.net.get_submodule(model.family.final_norm)
    word = unembedding(model, target) - (0 if contrast is None else unembedding(model, contrast))
    return through_norm(norm, rows, model.family.norm_offset, norm_divisor(norm, last)) @ word


def _read(model: Model, objective: Objective, row: int) -> tuple[list[_Layer], Tensor]:
    """The layers of one prompt, and the residual stream (T, D) behind the last."""
    length = objective.batch.lengths[row]
    ids, mask = objective.batch.ids[row : row + 1, :length], objective.batch.mask[row : row + 1, :length]
    streams: dict[int, Tensor] = {}
    values: dict[int, Tensor] = {}
    with ExitStack() as stack:
        stack.enter_context(model.lock)
        stack.enter_context(eager(model))
        stack.enter_context(_streams(model, streams))
        keep = lambda site, layer, x: values.__setitem__(layer, x[0].float())  # noqa: E731
        stack.enter_context(hooks(model, [("v", layer) for layer in range(model.layers)], keep))
        output = model.net(input_ids=ids, attention_mask=mask, output_attentions=True)
    heads, dim = model.heads, model.head_dim
    layers = []
    for number in range(model.layers):
        v = values[number].unflatten(-1, (-1, dim))  # (T, KV, d)
        v = v.repeat_interleave(heads // v.shape[1], 1)
        o = Linear(model.site_module("attn", number)).columns().T.unflatten(0, (heads, dim)) * model.residual_scale
        layers.append(_Layer(streams[number], output.attentions[number][0].float(), v, o))
    return layers, streams[model.layers]


@contextmanager
def _streams(model: Model, found: dict[int, Tensor]) -> Iterator[None]:
    """Keeps the residual stream (T, D) before each layer, and behind the last."""

    def before(number: int) -> object:
        return lambda module, args: found.__setitem__(number, args[0][0].float())

    def behind(module: object, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        found[model.layers] = (output[0] if isinstance(output, tuple) else output)[0].float()

    with ExitStack() as undo:
        for number, module in enumerate(model.layer_modules):
            undo.callback(module.register_forward_pre_hook(before(number)).remove)  # type: ignore[arg-type]
        undo.callback(model.layer_modules[-1].register_forward_hook(behind).remove)
        yield
