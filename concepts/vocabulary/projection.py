"""The vocabulary projection of W_out rows: on the direct path, or through the averaged Jacobian of the layers above."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from icebear.concepts.vocabulary.lens import mean_lens, mean_rows, reliability_of, w_out_row
from icebear.concepts.vocabulary.lens_files import LensFile
from icebear.concepts.vocabulary.weight_rows import direct_row, direct_rows, gives_answers, typical, unembed, w_out_rows
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.records import LENSES, WRITERS, Neuron, Projection, Promotion, Reliability
from icebear.values import check_int, one_of, typed

COVARIANCE_ROWS = 4096
"""At most this many rows of a layer give the covariance of random rows."""


@typed
def project(
    model: Model, neuron: Neuron | str, k: int = 20, lens: Literal["direct", "mean"] | Path = "direct"
) -> Projection:
    """Project the W_out row of a neuron onto the vocabulary.

    Parameters
    ----------
    model
        A model of a known family.
    neuron
        A neuron of site ``ffn``, ``attn`` or ``cross``, or its id.
    k
        The number of promoted and of suppressed tokens.
    lens
        ``direct`` is the logit lens: the direct path, with the norms' divisors at a typical token
        (`icebear.concepts.vocabulary.calibration`). ``mean`` is the averaged Jacobian lens, through the layers above:
        from the file that `icebear index --lens` builds, or computed for this neuron. A path is that of a lens which
        other software saved: the .pt file of a Jacobian lens (TransformerLens 4.3), or the folder of a tuned lens. It
        is for neurons of site ``ffn``, has z scores only (these lenses do not predict the size of an effect), and its
        agreement with measured effects is measured.

    Returns
    -------
    Projection
        The k tokens that the neuron promotes and suppresses most. Logits are per unit of activation. They are None if
        the unembedding does not give the model's answers (text classifiers, encoders, masked models), for mixtures of
        experts, where a router weighs each neuron, and on the direct path without a final norm (OPT-350m).

    Raises
    ------
    InputError
        For a neuron that the model lacks or that does not write to the residual stream; for a file that is no lens of
        this model.

    References
    ----------
    Geva et al. 2022, "Transformer Feed-Forward Layers Build Predictions by Promoting Concepts in the Vocabulary Space".
    nostalgebraist 2020, "Interpreting GPT: the logit lens". Hernandez et al. 2024, "Linearity of Relation Decoding in
    Transformer Language Models" (averaged Jacobians).
    """
    neuron = model.check(neuron)
    if neuron.site == "head":
        raise InputError(
            f"{neuron} writes through {model.head_dim} components; icebear neuron {neuron} measures its words."
        )
    if neuron.site not in WRITERS:
        raise InputError(f"{neuron} does not write to the residual stream; choose a neuron of site ffn or attn.")
    if not model.output_size:
        raise InputError(f"{model.name} has no labels that {neuron} could write to; ask it by examples.")
    if isinstance(lens, Path):
        return through_file(model, neuron, check_int(k, "The number of tokens"), LensFile.read(lens, model))
    return projections(model, [neuron], k, lens)[neuron]


@torch.no_grad()
def through_file(model: Model, neuron: Neuron, k: int, lens: LensFile) -> Projection:
    """Project a neuron through a lens from a file, and measure how well both it and the direct path predict effects in
    the neuron's layer."""
    jacobian = lens.jacobian(model, neuron.site, neuron.layer)
    row = jacobian @ w_out_row(model, neuron)
    (projection,) = _projected(model, [neuron], row[None], k, str(lens))
    if not gives_answers(model, neuron.layer):
        return projection
    of_lens, direct = (Reliability(*x) for x in reliability_of(model, neuron.layer, jacobian).tolist())
    return replace(projection, reliability=of_lens, direct_correlation=direct.correlation)


def both_projections(model: Model, neuron: Neuron, k: int) -> list[Projection]:
    """Project through both lenses. The first is the one that predicts effects in this layer better, if that is
    measured, else the direct one. An image classifier has the direct one only."""
    if not model.task.reads_text:  # a few labels have no words that stand out
        return [project(model, neuron, k)] if model.labels else []
    direct, mean = (_compared(model, neuron, k, lens) for lens in LENSES)
    built = mean_lens(model)
    if built is None:
        return [direct, mean]
    direct = replace(direct, reliability=built.direct[neuron.layer])
    return [mean, direct] if built.is_better(neuron.layer) else [direct, mean]


@torch.no_grad()
def _compared(model: Model, neuron: Neuron, k: int, lens: str) -> Projection:
    """Project a neuron, and compare its row with random rows of its layer."""
    from icebear.db.search import NULL_PERCENTILE, kurtosis, random_rows

    row, built = _rows(model, [neuron], lens), mean_lens(model) if lens == "mean" else None
    sample = slice(None, None, -(-model.width(neuron.site) // COVARIANCE_ROWS))
    layer = (w_out_rows if built else direct_rows)(model, neuron.site, neuron.layer, sample)
    assert layer is not None  # or its row would have raised
    layer = layer @ built.jacobian(neuron.site, neuron.layer).to(layer).T if built else layer
    drawn = torch.from_numpy(random_rows(layer.cpu().numpy())).to(row)
    row_kurtosis, *chance = kurtosis(unembed(model, torch.cat((row, drawn))).cpu().numpy()).tolist()
    (projection,) = _projected(model, [neuron], row, k, lens)
    return replace(projection, kurtosis=row_kurtosis, kurtosis_by_chance=float(np.percentile(chance, NULL_PERCENTILE)))


def _rows(model: Model, neurons: Sequence[Neuron], lens: str) -> Tensor:
    """Return what one unit of activation adds to the input (N, D) of the unembedding through a lens."""
    built = mean_lens(model) if lens == "mean" else None
    if built:
        return built.rows(model, neurons)
    if lens == "mean":
        return mean_rows(model, neurons)
    return torch.stack([direct_row(model, neuron) for neuron in neurons])


@torch.no_grad()
def projections(model: Model, neurons: Iterable[Neuron], k: int = 20, lens: str = "direct") -> dict[Neuron, Projection]:
    """Project each neuron that writes to the residual stream, once."""
    k = check_int(k, "The number of tokens")
    one_of(lens, "lens", LENSES)
    writers = [neuron for neuron in dict.fromkeys(neurons) if neuron.site in WRITERS]
    if not writers or not model.output_size:
        return {}
    return dict(zip(writers, _projected(model, writers, _rows(model, writers, lens), k, lens), strict=True))


def _projected(model: Model, neurons: Sequence[Neuron], rows: Tensor, k: int, lens: str) -> list[Projection]:
    """Return the projections of rows (N, D) of neurons."""
    built = mean_lens(model) if lens == "mean" else None
    names = model.labels if model.task.unembeds or not model.task.reads_text else {}
    logits = unembed(model, rows)  # (N, V)
    scale = logits.std(1, keepdim=True) if logits.shape[1] > 1 else torch.ones_like(logits)  # a single number
    z = (logits - logits.mean(1, keepdim=True)) / scale
    k = min(k, logits.shape[1])

    def promotions(row: int, sign: int, claims: bool) -> tuple[Promotion, ...]:
        ids = (sign * logits[row]).topk(k).indices.tolist()
        rows = zip(ids, logits[row, ids].tolist(), z[row, ids].tolist(), strict=True)
        return tuple(Promotion(id, names.get(id) or model.text(id), add if claims else None, z) for id, add, z in rows)

    result = []
    for row, neuron in enumerate(neurons):
        spread = typical(model, neuron.layer) if lens == "direct" else None
        claims = spread is not None if lens == "direct" else lens == "mean" and gives_answers(model, neuron.layer)
        up, down = (promotions(row, sign, claims) for sign in (+1, -1))
        reliability = built.reliability[neuron.layer] if built else None
        result.append(Projection(neuron, up, down, spread, None, lens, reliability))
    return result
