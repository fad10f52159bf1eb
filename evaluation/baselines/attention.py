"""Methods from attention maps, for one stack of layers: rollouts, GradCAM, ALTI and ALTI-Logit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from icebear.concepts.methods.method import Method
from icebear.concepts.passes.inputs import Inputs
from icebear.concepts.passes.run import Target, forward_backward
from icebear.concepts.passes.sites import eager, hooks
from icebear.concepts.vocabulary.vocabulary import unembedding
from icebear.errors import InputError
from icebear.models.model import Model, at
from icebear.models.objective import Objective
from icebear.models.parts.linear import Linear, norm_divisor, through_norm


@dataclass(frozen=True, repr=False)
class AttentionRollout(Method):
    """The product over layers of attention (mean of heads) and the residual stream (Abnar & Zuidema 2020)."""

    def scores(self, model: Model, objective: Objective) -> list[Tensor]:
        maps, _ = _attention(model, objective)
        joint = torch.eye(maps[0].shape[-1], device=maps[0].device)
        for attention in maps:
            mean = attention.mean(1)  # (B, T, T)
            joint = (mean + torch.eye(mean.shape[-1], device=mean.device)) / 2 @ joint
        return _rows(objective, joint)


@dataclass(frozen=True, repr=False)
class GradientRollout(Method):
    """R + mean(gradient x attention)+ R from layer to layer, from R = 1 (Chefer et al. 2021b, "G x AttnRollout")."""

    def scores(self, model: Model, objective: Objective) -> list[Tensor]:
        maps, gradients = _attention(model, objective)
        eye = torch.eye(maps[0].shape[-1], device=maps[0].device)
        joint = eye.expand(len(maps[0]), -1, -1)
        for attention, gradient in zip(maps, gradients, strict=True):
            joint = joint + (attention * gradient).clamp(min=0).mean(1) @ joint
        return _rows(objective, joint - eye)


@dataclass(frozen=True, repr=False)
class GradCAM(Method):
    """The attention of the last layer, its heads weighted by their mean gradient, above zero (Chefer et al. 2021)."""

    def scores(self, model: Model, objective: Objective) -> list[Tensor]:
        maps, gradients = _attention(model, objective)
        parts = zip(gradients[-1], objective.batch.lengths, strict=True)  # without padding
        weights = torch.stack([g[:, :n, :n].mean((-1, -2), keepdim=True) for g, n in parts])  # (B, H, 1, 1)
        return _rows(objective, (weights * maps[-1]).mean(1).clamp(min=0))


class _Maps(Target):
    """The number of an objective, from a pass that records attention maps (B, H, T, T) and their gradients."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.leaves: tuple[Tensor, ...] = ()
        self.gradients: list[Tensor] = []

    def numbers(self, model: Model) -> Tensor:
        output = model.task.forward(model, self.objective.batch, output_attentions=True)
        self.leaves = output.attentions
        return self.objective.evaluate(at(output.logits, self.objective.all_positions))[1]

    def finish(self, gradients: Sequence[Tensor | None]) -> None:
        self.gradients = [torch.zeros_like(x) if g is None else g for x, g in zip(self.leaves, gradients, strict=True)]


def _attention(model: Model, objective: Objective) -> tuple[list[Tensor], list[Tensor]]:
    """Return the attention maps (B, H, T, T) of each layer in float32, and their gradients."""
    if model.task.stacks == 2:
        raise InputError(
            f"Methods of attention maps do not support encoder-decoders such as {model.name}; choose another method."
        )
    maps = _Maps(objective)
    with eager(model):
        forward_backward(model, maps, [Inputs(), maps])
    return [x.detach().float() for x in maps.leaves], [g.float() for g in maps.gradients]


def _rows(objective: Objective, joint: Tensor) -> list[Tensor]:
    """Return the sum of the rows of (B, T, T) at the explained positions."""
    rows = zip(joint, objective.positions, objective.batch.lengths, strict=True)
    return [matrix[list(positions)].sum(0)[:length].cpu() for matrix, positions, length in rows]


# --- ALTI ----------------------------------------------------------------------------------------------
#
# The output of attention at i is a sum over j of T_i(x_j) (with the residual stream at j = i). The contribution of j is
# large if T_i(x_j) alone is close to the sum in L1. Norms are linear maps at their divisor; FFNs are skipped.


def _contributions(parts: Tensor) -> Tensor:
    """Return the shares (T, T) of j in the sum over j of parts (T, T, D): at least zero, and 1 in sum for each i."""
    total_part = parts.sum(1, keepdim=True)  # (T, 1, D)
    near = (total_part.abs().sum(-1) - (total_part - parts).abs().sum(-1)).clamp(min=0)
    return near / near.sum(1, keepdim=True).clamp(min=1e-30)


@dataclass(frozen=True, repr=False)
class AltiLogit(Method):
    """ALTI-Logit (Ferrando et al. 2023): the logit update of each layer's attention by token, traced to the input by
    ALTI. For causal models with the norm before attention. The embedding itself contributes to its own token."""

    @torch.no_grad()
    def scores(self, model: Model, objective: Objective) -> list[Tensor]:
        if not model.task.is_causal or model.family.attn_norm:
            raise InputError(
                f"ALTI-Logit needs a causal model with the norm before attention, which {model.name} is not; choose "
                "another method."
            )
        norm, offset = model.net.get_submodule(model.family.final_norm), model.family.norm_offset
        rows = []
        for row, (positions, targets, contrast) in enumerate(
            zip(map(list, objective.positions), objective.targets, objective.contrasts, strict=True)
        ):
            streams, outputs = _layers(model, objective, row)
            words = unembedding(model, torch.tensor(targets))  # (P, D)
            words = words if contrast is None else words - unembedding(model, contrast)
            by = norm_divisor(norm, streams[-1][positions])[:, None]  # (P, 1, 1)
            logits = lambda parts, by=by, words=words: through_norm(norm, parts, offset, by) @ words[..., None]  # noqa: E731
            total = torch.zeros(len(streams[0]))
            down = torch.eye(len(total))  # (T, T) tokens of this layer by tokens of the input
            for x, parts in zip(streams, outputs, strict=False):
                total += (logits(parts[positions])[..., 0] @ down).sum(0)
                parts[range(len(parts)), range(len(parts))] += x
                down = _contributions(parts) @ down
            total[positions] += logits(streams[0][positions, None])[:, 0, 0]
            rows.append(total)
        return rows


@dataclass(frozen=True, repr=False)
class Alti(Method):
    """ALTI (Ferrando et al. 2022): contributions of tokens to the vectors of each layer by distance, multiplied layer
    by layer, at the explained positions. For encoders with the norm after attention (BERT)."""

    @torch.no_grad()
    def scores(self, model: Model, objective: Objective) -> list[Tensor]:
        if model.task.generates or not model.task.reads_text or not model.family.attn_norm:
            raise InputError(
                f"ALTI needs an encoder of text with norms after attention (BERT), which {model.name} is not; choose "
                "another method."
            )
        rows = []
        for row, positions in enumerate(objective.positions):
            streams, outputs = _layers(model, objective, row)
            down = torch.eye(len(streams[0]))
            for module, x, parts in zip(model.layer_modules, streams, outputs, strict=False):
                parts[range(len(parts)), range(len(parts))] += x
                norm = module.get_submodule(model.family.attn_norm)
                by = norm_divisor(norm, parts.sum(1, keepdim=True))
                down = _contributions(through_norm(norm, parts, model.family.norm_offset, by)) @ down
            rows.append(down[list(positions)].sum(0))
        return rows


def _layers(model: Model, objective: Objective, row: int) -> tuple[list[Tensor], Iterator[Tensor]]:
    """Return the residual streams (T, D) of one prompt before each layer and after the last, and the output of each
    layer's attention at i by token j, (T, T, D)."""
    batch = objective.batch.rows([row])
    values: dict[int, Tensor] = {}
    streams: list[Tensor] = []
    with ExitStack() as stack:
        stack.enter_context(model.lock)
        stack.enter_context(eager(model))
        keep = lambda site, layer, x: values.__setitem__(layer, x[0].float())  # noqa: E731
        stack.enter_context(hooks(model, [("v", layer) for layer in range(model.layers)], keep))
        for module in model.layer_modules:
            before = lambda module, args: streams.append(args[0][0].float())  # noqa: E731
            stack.callback(module.register_forward_pre_hook(before).remove)
        after = lambda module, args, y: streams.append((y[0] if isinstance(y, tuple) else y)[0].float())  # noqa: E731
        stack.callback(model.layer_modules[-1].register_forward_hook(after).remove)
        output = model.net(input_ids=batch.ids, attention_mask=batch.mask, output_attentions=True)

    def by_token(layer: int) -> Tensor:
        v = values[layer].unflatten(-1, (-1, model.head_dim))  # (T, KV, d)
        v = v.repeat_interleave(model.heads // v.shape[1], 1)
        w_o = Linear(model.site_module("attn", layer)).columns().T * model.residual_scale("attn")
        attention = output.attentions[layer][0].float()
        return torch.einsum("hij,jhd,hdD->ijD", attention, v, w_o.unflatten(0, (model.heads, -1)))

    return streams, map(by_token, range(model.layers))
