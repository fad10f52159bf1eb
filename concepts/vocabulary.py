"""What a neuron writes: its W2 row through the norms and the unembedding (logit lens), in logits at a typical token."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from icebear.concepts.calibration import calibrate
from icebear.concepts.models import experts
from icebear.concepts.models.linear import WHOLE, Chosen, Linear, through_norm
from icebear.concepts.models.model import Model
from icebear.errors import InputError
from icebear.records import WRITERS, Neuron, Projection, Promotion
from icebear.values import whole

BLOCK = 1024
"""Tokens whose rows of the unembedding are converted at a time."""


def project(model: Model, neuron: Neuron | str, k: int = 20) -> Projection:
    """The k tokens that `neuron` (site ``ffn``, ``attn`` or ``cross``) promotes and suppresses most.

    The logits are what one unit of activation adds on the direct path, past the layers in between, where the norms on
    the way divide as they do at a typical token (`icebear.concepts.calibration`); None where the unembedding does not
    give the model's answers (classifiers of text, encoders, masked models, whose heads have a layer of their own), in
    mixtures, where a router weighs each neuron, and where the norms are behind each layer and none is final (OPT-350m).
    Source: Geva et al. 2022 (value vectors in vocabulary space).
    """
    neuron = model.check(neuron)
    w2_row(model, neuron)  # refused if it does not write
    return projections(model, [neuron], k)[neuron]


@torch.no_grad()
def projections(model: Model, neurons: Iterable[Neuron], k: int = 20) -> dict[Neuron, Projection]:
    """Project each neuron that writes to the residual stream, once."""
    k = whole(k, "The number of tokens")
    writers = [neuron for neuron in dict.fromkeys(neurons) if neuron.site in WRITERS]
    if not writers:
        return {}
    rows = torch.stack([w2_row(model, neuron) for neuron in writers])  # (N, D)
    names = {} if model.task.reads_text else model.labels
    logits = unembed(model, rows)  # (N, V)
    z = (logits - logits.mean(1, keepdim=True)) / logits.std(1, keepdim=True)
    k = min(k, logits.shape[1])

    def promotions(row: int, sign: int, claims: bool) -> tuple[Promotion, ...]:
        ids = (sign * logits[row]).topk(k).indices.tolist()
        rows = zip(ids, logits[row, ids].tolist(), z[row, ids].tolist(), strict=True)
        return tuple(Promotion(id, names.get(id) or model.text(id), add if claims else None, z) for id, add, z in rows)

    found = {}
    for row, neuron in enumerate(writers):
        spread = typical(model, neuron.layer)
        up, down = (promotions(row, sign, spread is not None) for sign in (+1, -1))
        found[neuron] = Projection(neuron, up, down, spread)
    return found


def typical(model: Model, layer: int) -> tuple[float, float] | None:
    """By what a logit of `project` is to be multiplied at the 10th and the 90th percentile of the tokens, as their
    final divisors go; None where there is no such logit (see `project`)."""
    task = model.task  # an encoder writes to a decoder, a classifier of texts to a head of its own
    answers = not task.reads_text or (task.generates and model.stack_of(layer) == task.stacks - 1)
    path = model.family_at(layer).final_norm
    if not answers or not path or model.family.experts:
        return None
    low, median, high = calibrate(model).divisors[path]
    return median / high, median / low


def w2_row(model: Model, neuron: Neuron) -> Tensor:
    """(D,) what one unit of the neuron's activation adds to what the unembedding reads, see `written`."""
    model.check(neuron)
    rows = written(model, neuron.site, neuron.layer, slice(neuron.index, neuron.index + 1))
    if rows is None:
        raise InputError(f"{neuron} does not write to the residual stream; project neurons of ffn and attn.")
    return rows[0]


def written(model: Model, site: str, layer: int, chosen: slice = WHOLE) -> Tensor | None:
    """(N, D) in float32: what one unit of each neuron adds to what the unembedding reads at a typical token, past the
    layers in between: W2 rows through the norms on the way at their median divisors. None as of `w2`."""
    rows = w2(model, site, layer, chosen)
    if rows is None:
        return None
    rows = rows * model.residual_scale
    divisors = calibrate(model).divisors
    for path in model.norms_behind(layer, site):
        rows = through_norm(model.net.get_submodule(path), rows, model.family.norm_offset, divisors[path][1])
    return rows


def w2(model: Model, site: str, layer: int, chosen: slice = WHOLE) -> Tensor | None:
    """(N, D) in float32: the rows of W2 (or of the attention output projection).

    None for a site that does not write to the residual stream.
    """
    if site not in WRITERS:
        return None
    mixture = model.experts(layer) if site == "ffn" else None
    if mixture is not None:
        return experts.w2(mixture, chosen)
    return Linear(model.site_module(site, layer)).columns(chosen).T


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
        first = next(modules[n] for n in model.family_at(layer).ffn_in.split() if n in modules)
        return Linear(first).rows(slice(model.width("ffn")))  # the gate comes before the rest where they are one map
    if site == "shared":
        beside, _, _ = model.family.shared.rpartition(".")
        return Linear(model.layer_modules[layer].get_submodule(f"{beside}.gate_proj")).rows()
    columns = model.columns(site)
    return Linear(model.site_module(site, layer)).rows(WHOLE if columns is None else columns)


def unembed(model: Model, x: Tensor) -> Tensor:
    """(..., V) what the unembedding reads off x (..., D); in blocks of tokens, so that it is never converted whole."""
    starts = range(0, vocabulary(model).out_features, BLOCK)
    return torch.cat([x @ unembedding(model, slice(start, start + BLOCK)).T for start in starts], -1)


def unembedding(model: Model, chosen: Chosen = WHOLE) -> Tensor:
    """(N, D) in float32: the rows of `vocabulary` for chosen tokens, through the map before it where there is one."""
    rows = vocabulary(model).rows(chosen) * model.logit_scale
    if getattr(model.net.config, "scale_decoder_outputs", False):  # T5
        rows = rows * model.net.config.d_model**-0.5
    return rows @ Linear(model.unembedding_in).rows() if model.unembedding_in else rows


def vocabulary(model: Model) -> Linear:
    """The unembedding's own map; of an image classifier its labels' weights (labels, D), of a classifier of text its
    input embeddings, in which rows can be read too (Dar et al. 2023).

    A masked language model's transform before it is left out, because it is not linear.
    """
    output = model.net.get_output_embeddings()
    if output is None and not model.task.reads_text:
        output = next(module for name, module in model.net.named_children() if name.endswith("classifier"))
    return Linear(model.embeddings[0] if output is None else output)
