"""The matrices on the way to the vocabulary: W_out and W_in rows, norms at a typical token, the unembedding."""

from __future__ import annotations

import torch
from torch import Tensor

from icebear.concepts.vocabulary.calibration import calibrate
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.models.parts import experts
from icebear.models.parts.architecture import first_of
from icebear.models.parts.linear import ALL_INDICES, Chosen, Linear, through_norm
from icebear.records import WRITERS, Neuron

BLOCK = 1024
"""Rows of the unembedding that are converted at a time."""


def typical(model: Model, layer: int) -> tuple[float, float] | None:
    """Return the multipliers of a projected logit at the 10th and 90th percentile of tokens by their final divisors;
    None if there is no such logit (see `project`)."""
    path = model.family_at(layer).final_norm
    if not gives_answers(model, layer) or not path:
        return None
    low, median, high = calibrate(model).divisors[path]
    return median / high, median / low


def gives_answers(model: Model, layer: int) -> bool:
    """Return whether projected rows of a layer are logits of the model's answers: an encoder writes to a decoder, a
    text classifier or BERT to a head of its own, and a router weighs the neurons of a mixture."""
    task = model.task
    last = not task.reads_text or task.unembeds or (task.generates and model.stack_of(layer) == task.stacks - 1)
    return last and not model.family.experts and not model.family.transforms


def direct_row(model: Model, neuron: Neuron) -> Tensor:
    """Return what one unit of activation adds to the input (D,) of the unembedding, see `direct_rows`."""
    model.check(neuron)
    rows = direct_rows(model, neuron.site, neuron.layer, slice(neuron.index, neuron.index + 1))
    if rows is None:
        raise InputError(f"{neuron} does not write to the residual stream; choose a neuron of site ffn or attn.")
    return rows[0]


def direct_rows(model: Model, site: str, layer: int, chosen: slice = ALL_INDICES) -> Tensor | None:
    """Return what one unit of each neuron adds to the input (N, D) of the unembedding on the direct path: W_out rows
    through the norms at their median divisors, in float32. None for the sites of `w_out_rows`."""
    rows = w_out_rows(model, site, layer, chosen)
    if rows is None:
        return None
    rows = rows * model.residual_scale(site)
    divisors = calibrate(model).divisors
    for path in model.norms_after(layer, site):
        rows = through_norm(model.net.get_submodule(path), rows, model.family.norm_offset, divisors[path][1])
    return rows


def w_out_rows(model: Model, site: str, layer: int, chosen: slice = ALL_INDICES) -> Tensor | None:
    """Return the rows (N, D) of W_out or of the attention output projection, in float32; None for a site that does not
    write to the residual stream."""
    if site not in WRITERS:
        return None
    mixture = model.experts(layer) if site == "ffn" else None
    if mixture is not None:
        return experts.w_out_rows(mixture, chosen)
    return Linear(model.site_module(site, layer)).columns(chosen).T


def w_in_rows(model: Model, site: str, layer: int) -> Tensor | None:
    """Return the rows (N, D) of W_in (of the gate in a gated FFN) or of q, k, v, in float32; None for a site that does
    not read the residual stream."""
    if site in ("attn", "cross", "mixer", "router"):
        return None
    if site == "ffn" and model.family.experts:
        return experts.w_in_rows(model.experts(layer))
    if site == "ffn":
        module = first_of(model.layer_modules[layer], model.family_at(layer).ffn_in)
        return Linear(module).rows(slice(model.width("ffn")))  # the gate comes first if gate and up are one map
    if site == "shared":
        expert, _, _ = model.family.shared.rpartition(".")
        names = " ".join(f"{expert}.{name}" for name in ("gate_proj", "gate_up_proj", "input_linear"))
        return Linear(first_of(model.layer_modules[layer], names)).rows(slice(model.width("shared")))
    columns = model.columns(site)
    return Linear(model.site_module(site, layer)).rows(ALL_INDICES if columns is None else columns)


def unembed(model: Model, x: Tensor) -> Tensor:
    """Return the logits (..., V) of x (..., D), in blocks, so that the unembedding is never converted whole."""
    starts = range(0, vocabulary(model).shape[0], BLOCK)
    return torch.cat([x @ unembedding(model, slice(start, start + BLOCK)).T for start in starts], -1)


def unembedding(model: Model, chosen: Chosen = ALL_INDICES) -> Tensor:
    """Return the rows (N, D) of `vocabulary` for chosen tokens in float32, through the map before it, if any.

    DINOv2's classifier reads [CLS] and the mean of the patches. Its rows are the sum of both parts, for a neuron that
    is equally active at every token.
    """
    rows = vocabulary(model).rows(chosen) * model.logit_scale
    if not model.task.reads_text:
        rows = rows.unflatten(1, (-1, model.config.hidden_size)).sum(1)
    if getattr(model.net.config, "scale_decoder_outputs", False):  # T5
        rows = rows * model.net.config.d_model**-0.5
    return rows @ Linear(model.unembedding_in).rows() if model.unembedding_in else rows


def vocabulary(model: Model) -> Linear:
    """Return the unembedding; for an image classifier the weights of its labels (labels, D), for a text classifier the
    input embeddings (Dar et al. 2023). The non-linear transform of a masked language model is omitted."""
    output = model.net.get_output_embeddings()
    if output is None and not model.task.reads_text:
        output = next(module for name, module in model.net.named_children() if name.endswith("classifier"))
    return Linear(model.embeddings[0] if output is None else output)
