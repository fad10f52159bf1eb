"""What a neuron writes: its W2 row through the final norm's gain and the unembedding (logit lens)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from concepts import experts
from concepts.models import Model
from db.errors import InputError
from db.records import Neuron, Projection, Promotion


def project(model: Model, neuron: Neuron, k: int = 20) -> Projection:
    """The k tokens that `neuron` (site ``ffn`` or ``attn``) promotes and suppresses most.

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
    logits = rows @ unembedding(model).T.to(rows.dtype)  # (N, V)
    z = (logits - logits.mean(1, keepdim=True)) / logits.std(1, keepdim=True)
    k = min(k, logits.shape[1])

    def promotions(row: int, sign: int) -> tuple[Promotion, ...]:
        ids = (sign * logits[row]).topk(k).indices.tolist()
        return tuple(Promotion(id, model.text(id), logits[row, id].item(), z[row, id].item()) for id in ids)

    return [Projection(neuron, promotions(row, +1), promotions(row, -1)) for row, neuron in enumerate(neurons)]


def w2_row(model: Model, neuron: Neuron) -> Tensor:
    """(D,) what one unit of the neuron's activation adds to the residual stream, times the final norm's gain."""
    model.check(neuron)
    rows = w2(model, neuron.site, neuron.layer)
    if rows is None:
        raise InputError(f"{neuron} does not write to the residual stream; project neurons of ffn and attn.")
    return rows[neuron.index] * final_gain(model)


def w2(model: Model, site: str, layer: int) -> Tensor | None:
    """(N, D) in float32: the rows of W2 (or of the attention output projection), with a sandwich norm's gain.

    None for a site that does not write to the residual stream.
    """
    if site not in ("ffn", "attn"):
        return None
    mixture = model.experts(layer) if site == "ffn" else None
    rows = model.matrix(model.site_module(site, layer)).T if mixture is None else experts.w2(mixture)
    norm = model.family.ffn_norm if site == "ffn" else model.family.attn_norm
    return rows * gain(model, model.layer_modules[layer].get_submodule(norm)) if norm else rows


def w1(model: Model, site: str, layer: int) -> Tensor | None:
    """(N, D) in float32: what a neuron reads, the rows of W1 (of the gate in a gated FFN) or of q, k, v.

    None for a site that does not read the residual stream.
    """
    if site == "attn":
        return None
    if site == "ffn" and model.family.experts:
        return experts.w1(model.experts(layer))
    if site == "ffn":
        first = model.matrix(model.layer_modules[layer].get_submodule(model.family.ffn_in))
        return first[: model.width("ffn")]  # the gate comes before the rest where they are one map
    rows = model.matrix(model.site_module(site, layer))
    columns = model.columns(site)
    return rows if columns is None else rows[columns.to(rows.device)]


def gain(model: Model, norm: nn.Module) -> Tensor:
    """(D,) the factor by which a norm scales each coordinate."""
    return model.family.norm_offset + norm.weight.detach().float()  # type: ignore[union-attr, operator]


def final_gain(model: Model) -> Tensor:
    """(D,) of the norm before the unembedding."""
    return gain(model, model.net.get_submodule(model.family.final_norm))


def unembedding(model: Model) -> Tensor:
    """(V, D)"""
    return model.net.get_output_embeddings().weight.detach().float()
