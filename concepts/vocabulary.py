"""What a neuron writes: its W2 row through the final norm's gain and the unembedding (logit lens)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from concepts import experts
from concepts.models import Model
from db.errors import InputError
from db.records import Neuron, Projection, Promotion


def project(model: Model, neuron: Neuron, k: int = 20) -> Projection:
    """The k tokens that `neuron` (site ``ffn``, ``attn`` or ``cross``) promotes and suppresses most.

    Source: Geva et al. 2022 (value vectors in vocabulary space), with the gain of the norms on the way.
    """
    return project_many(model, [neuron], k)[0]


@torch.no_grad()
def project_many(model: Model, neurons: list[Neuron], k: int = 20) -> list[Projection]:
    """`project` for several neurons at once."""
    if k < 1:
        raise InputError(f"The number of tokens must be at least 1, not {k}.")
    if not neurons:
        return []
    rows = torch.stack([w2_row(model, neuron) for neuron in neurons])  # (N, D)
    words, names = unembedding(model), model.labels if model.task == "image" else {}
    logits = rows @ words.T.to(rows.dtype)  # (N, V)
    z = (logits - logits.mean(1, keepdim=True)) / logits.std(1, keepdim=True)
    k = min(k, logits.shape[1])

    def promotions(row: int, sign: int) -> tuple[Promotion, ...]:
        ids = (sign * logits[row]).topk(k).indices.tolist()
        return tuple(
            Promotion(id, names.get(id) or model.text(id), logits[row, id].item(), z[row, id].item()) for id in ids
        )

    return [Projection(neuron, promotions(row, +1), promotions(row, -1)) for row, neuron in enumerate(neurons)]


def w2_row(model: Model, neuron: Neuron) -> Tensor:
    """(D,) what one unit of the neuron's activation adds to the residual stream, times the final norm's gain."""
    model.check(neuron)
    rows = w2(model, neuron.site, neuron.layer)
    if rows is None:
        raise InputError(f"{neuron} does not write to the residual stream; project neurons of ffn and attn.")
    return rows[neuron.index] * final_gain(model, neuron.layer)


def w2(model: Model, site: str, layer: int) -> Tensor | None:
    """(N, D) in float32: the rows of W2 (or of the attention output projection), with a sandwich norm's gain.

    None for a site that does not write to the residual stream.
    """
    if site not in ("ffn", "attn", "cross"):
        return None
    mixture = model.experts(layer) if site == "ffn" else None
    rows = model.matrix(model.site_module(site, layer)).T if mixture is None else experts.w2(mixture)
    norm = model.family.ffn_norm if site == "ffn" else model.family.attn_norm
    return rows * gain(model, model.layer_modules[layer].get_submodule(norm)) if norm else rows


def w1(model: Model, site: str, layer: int) -> Tensor | None:
    """(N, D) in float32: what a neuron reads, the rows of W1 (of the gate in a gated FFN) or of q, k, v.

    None for a site that does not read the residual stream.
    """
    if site in ("attn", "cross", "router"):
        return None
    if site == "ffn" and model.family.experts:
        return experts.w1(model.experts(layer))
    if site == "ffn":
        modules = dict(model.layer_modules[layer].named_modules())
        first = model.matrix(next(modules[n] for n in model.family_at(layer).ffn_in.split() if n in modules))
        return first[: model.width("ffn")]  # the gate comes before the rest where they are one map
    rows = model.matrix(model.site_module(site, layer))
    columns = model.columns(site)
    return rows if columns is None else rows[columns.to(rows.device)]


def gain(model: Model, norm: nn.Module) -> Tensor:
    """(D,) the factor by which a norm scales each coordinate."""
    return model.family.norm_offset + norm.weight.detach().float()  # type: ignore[union-attr, operator]


def final_gain(model: Model, layer: int = -1) -> Tensor:
    """(D,) of the norm at the end of a layer's stack; ones where there is none."""
    norm = model.family_at(layer % model.layers).final_norm
    return (
        gain(model, model.net.get_submodule(norm))
        if norm
        else torch.ones(model.net.config.hidden_size).to(model.device)
    )


def unembedding(model: Model) -> Tensor:
    """(V, D); of an image classifier its labels' weights (labels, D), of a classifier of text its input embeddings, in
    which rows can be read too (Dar et al. 2023).

    A masked language model's transform before it is left out, because it is not linear.
    """
    output = model.net.get_output_embeddings()
    if output is None and model.task == "image":
        output = next(module for name, module in model.net.named_children() if name.endswith("classifier"))
    words: Any = model.embeddings[0] if output is None else output
    rows = words.weight.detach().float()
    return rows @ model.matrix(model.unembedding_in) if model.unembedding_in else rows
