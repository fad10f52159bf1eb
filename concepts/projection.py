"""The vocabulary projection of W_out rows: on the direct path, or through the averaged Jacobian of the layers above."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import torch

from icebear.concepts.lens import mean_lens, mean_rows
from icebear.concepts.models.model import Model
from icebear.concepts.vocabulary import direct_row, gives_answers, typical, unembed
from icebear.errors import InputError
from icebear.records import LENSES, WRITERS, Neuron, Projection, Promotion
from icebear.values import one_of, whole


def project(model: Model, neuron: Neuron | str, k: int = 20, lens: Literal["direct", "mean"] = "direct") -> Projection:
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
        (`icebear.concepts.calibration`). ``mean`` is the averaged Jacobian lens, through the layers above: from the
        file that `icebear index --lens` builds, or computed for this neuron.

    Returns
    -------
    Projection
        The k tokens that the neuron promotes and suppresses most. Logits are per unit of activation. They are None if
        the unembedding does not give the model's answers (text classifiers, encoders, masked models), for mixtures of
        experts, where a router weighs each neuron, and on the direct path without a final norm (OPT-350m).

    Raises
    ------
    InputError
        For a neuron that the model lacks or that does not write to the residual stream.

    References
    ----------
    Geva et al. 2022, "Transformer Feed-Forward Layers Build Predictions by Promoting Concepts in the Vocabulary Space".
    nostalgebraist 2020, "Interpreting GPT: the logit lens". Hernandez et al. 2024, "Linearity of Relation Decoding in
    Transformer Language Models" (averaged Jacobians).
    """
    neuron = model.check(neuron)
    if neuron.site not in WRITERS:
        raise InputError(f"{neuron} does not write to the residual stream; choose a neuron of site ffn or attn.")
    return projections(model, [neuron], k, lens)[neuron]


def both_projections(model: Model, neuron: Neuron, k: int) -> list[Projection]:
    """Project through both lenses. The first is the one that predicts effects in this layer better, if that is
    measured, else the direct one. An image classifier has the direct one only."""
    direct = project(model, neuron, k)
    if not model.task.reads_text:
        return [direct]
    mean, built = project(model, neuron, k, lens="mean"), mean_lens(model)
    if built is None:
        return [direct, mean]
    direct = replace(direct, reliability=built.direct[neuron.layer])
    return [mean, direct] if built.is_better(neuron.layer) else [direct, mean]


@torch.no_grad()
def projections(model: Model, neurons: Iterable[Neuron], k: int = 20, lens: str = "direct") -> dict[Neuron, Projection]:
    """Project each neuron that writes to the residual stream, once."""
    k = whole(k, "The number of tokens")
    one_of(lens, "lens", LENSES)
    writers = [neuron for neuron in dict.fromkeys(neurons) if neuron.site in WRITERS]
    if not writers:
        return {}
    built = mean_lens(model) if lens == "mean" else None
    if built:
        rows = built.rows(model, writers)  # (N, D)
    elif lens == "mean":
        rows = mean_rows(model, writers)
    else:
        rows = torch.stack([direct_row(model, neuron) for neuron in writers])
    names = model.labels if model.task.unembeds or not model.task.reads_text else {}
    logits = unembed(model, rows)  # (N, V)
    scale = logits.std(1, keepdim=True) if logits.shape[1] > 1 else torch.ones_like(logits)  # a single number
    z = (logits - logits.mean(1, keepdim=True)) / scale
    k = min(k, logits.shape[1])

    def promotions(row: int, sign: int, claims: bool) -> tuple[Promotion, ...]:
        ids = (sign * logits[row]).topk(k).indices.tolist()
        rows = zip(ids, logits[row, ids].tolist(), z[row, ids].tolist(), strict=True)
        return tuple(Promotion(id, names.get(id) or model.text(id), add if claims else None, z) for id, add, z in rows)

    made = {}
    for row, neuron in enumerate(writers):
        spread = typical(model, neuron.layer) if lens == "direct" else None
        claims = spread is not None if lens == "direct" else gives_answers(model, neuron.layer)
        up, down = (promotions(row, sign, claims) for sign in (+1, -1))
        reliability = built.reliability[neuron.layer] if built else None
        made[neuron] = Projection(neuron, up, down, spread, None, lens, reliability)
    return made
