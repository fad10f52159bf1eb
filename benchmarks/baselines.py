"""Attribution methods that only our tables compare: gradients, attention maps, AtMan, ALTI and ALTI-Logit.

python -m benchmarks.baselines groundtruth --task agreement --samples 5 --methods grad-l2,random --out agreement

It is `icebear evaluate`, which then knows the names of `OTHERS`, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from icebear.app.cli.verbs.evaluate import evaluate
from icebear.concepts.methods import common
from icebear.concepts.methods.common import measure_variants
from icebear.concepts.methods.gradients import embedding_gradients
from icebear.concepts.methods.method import Method
from icebear.concepts.methods.registry import METHODS, method_of
from icebear.concepts.passes.inputs import Inputs
from icebear.concepts.passes.run import Target, forward_backward
from icebear.concepts.passes.sites import eager, hooks
from icebear.concepts.vocabulary.weight_rows import unembedding
from icebear.errors import InputError
from icebear.evaluation.baselines import BASELINES, each_token, explained_rows, split_names
from icebear.evaluation.protocol import MethodEvaluation
from icebear.models.model import Model, at
from icebear.models.objective import Objective
from icebear.models.parts.linear import Linear, norm_divisor, through_norm


@dataclass(frozen=True, repr=False)
class Gradient(Method):
    """The norm of the gradient at each token's embedding (Simonyan et al. 2014)."""

    norm: Literal[1, 2] = 2

    def scores(self, model: Model, objective: Objective) -> list[Tensor]:
        return common.by_row(
            objective, [torch.linalg.vector_norm(g, self.norm, -1) for _, g in embedding_gradients(model, objective)]
        )


@dataclass(frozen=True, repr=False)
class SmoothGrad(Method):
    """Gradient x embedding, averaged over noisy embeddings (Smilkov et al. 2017); noise: in standard deviations."""

    noise: float = 0.1
    samples: int = 10
    seed: int = 0

    def scores(self, model: Model, objective: Objective) -> list[Tensor]:
        rows = [torch.Generator().manual_seed(self.seed) for _ in objective.positions]  # so that a batch is one by one
        batches = (objective.batch, objective.batch.decoder)

        def noisy(stack: int, x: Tensor) -> Tensor:
            changed = x.clone()
            for row, length in enumerate(batches[stack].lengths):  # type: ignore[union-attr]
                embeddings = x[row, :length]
                noise = torch.randn(embeddings.shape, generator=rows[row]).to(x.device, x.dtype)
                changed[row, :length] = embeddings + self.noise * embeddings.std() * noise
            return changed

        plain = [x for x, _ in embedding_gradients(model, objective)]
        steps = [[g for _, g in embedding_gradients(model, objective, noisy)] for _ in range(self.samples)]
        means = [torch.stack(step).mean(0) for step in zip(*steps, strict=True)]
        return common.by_row(objective, [(x * g).sum(-1) for x, g in zip(plain, means, strict=True)])


def log_probability(model: Model, objective: Objective) -> Tensor:
    """Return log-probabilities (B,) of the explained answers. Raises `InputError` for models that have none."""
    scores = model.task.log_probabilities(model, model.logits(objective.batch, objective.all_positions).float())
    if scores is None:
        raise InputError(f"{model.name} predicts a number, not probabilities; choose another method.")
    return replace(objective, contrasts=(None,) * len(objective.contrasts), kind="logit").evaluate(scores)[1]


@dataclass(frozen=True, repr=False)
class AtMan(Method):
    """The decrease of the explained log-probability when attention to a token is scaled down (Deiseroth et al. 2023).

    A key times 1 - p scales its column of attention scores by 1 - p.
    """

    p: float = 0.9

    def scores(self, model: Model, objective: Objective) -> list[Tensor]:
        if model.task.stacks == 2:
            raise InputError(f"AtMan does not support encoder-decoders such as {model.name}; choose another method.")
        modules = (name.rpartition(".")[2] for name, _ in model.layer_modules[0].named_modules())
        if {"k_norm", "k_layernorm"} & set(modules):
            raise InputError(f"{model.name} normalizes its keys, so AtMan does not work; choose another method.")
        keys = [("k", layer) for layer in range(model.layers)]
        scale = lambda part: hooks(model, keys, lambda site, layer, x: x * (1 - self.p * part[..., None]).to(x))  # noqa: E731
        rows = []
        for row, length in enumerate(objective.batch.lengths):
            measured = measure_variants(model, objective, row, each_token(length), log_probability, scale).cpu()
            rows.append(measured[0] - measured[1:])
        return rows


@dataclass(frozen=True, repr=False)
class GradientRollout(Method):
    """R + mean(gradient x attention)+ R from layer to layer, from R = 1 (Chefer et al. 2021b, "G x AttnRollout")."""

    def scores(self, model: Model, objective: Objective) -> list[Tensor]:
        maps, gradients = _attention(model, objective)
        eye = torch.eye(maps[0].shape[-1], device=maps[0].device)
        joint = eye.expand(len(maps[0]), -1, -1)
        for attention, gradient in zip(maps, gradients, strict=True):
            joint = joint + (attention * gradient).clamp(min=0).mean(1) @ joint
        return explained_rows(objective, joint - eye)


@dataclass(frozen=True, repr=False)
class GradCAM(Method):
    """The attention of the last layer, its heads weighted by their mean gradient, above zero (Chefer et al. 2021)."""

    def scores(self, model: Model, objective: Objective) -> list[Tensor]:
        maps, gradients = _attention(model, objective)
        parts = zip(gradients[-1], objective.batch.lengths, strict=True)  # without padding
        weights = torch.stack([g[:, :n, :n].mean((-1, -2), keepdim=True) for g, n in parts])  # (B, H, 1, 1)
        return explained_rows(objective, (weights * maps[-1]).mean(1).clamp(min=0))


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


OTHERS: dict[str, Method] = {
    "grad-l1": Gradient(1),
    "grad-l2": Gradient(2),
    "smoothgrad": SmoothGrad(),
    "gradcam": GradCAM(),
    "grad-rollout": GradientRollout(),
    "atman": AtMan(),
    "alti-logit": AltiLogit(),
    "alti": Alti(),
}


@dataclass(frozen=True)
class ControlledEvaluation(MethodEvaluation):
    """An evaluation of methods and of controls, which it scores itself."""

    usual: ClassVar[Sequence[str]] = ()
    """The meaning of ``all``."""
    controls: ClassVar[Sequence[str]] = ()

    def chosen(self) -> dict[str, Any]:
        """Return the methods by name; a control is its name. Raises `UnknownName`."""
        return with_controls(self.methods, self.usual, self.controls)


def with_controls(names: str, usual: Sequence[str], controls: Collection[str]) -> dict[str, Any]:
    """Return the methods of a comma-separated list by their names; a control is its name. usual: for ``all``."""
    wanted = usual if names == "all" else split_names(names)
    return {name: name if name in controls else method_of(name, BASELINES | METHODS) for name in wanted}


if __name__ == "__main__":
    BASELINES.update(OTHERS)
    evaluate()
