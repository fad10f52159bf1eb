"""Relevance in a model minus relevance in its base model, on the same prompt."""

from __future__ import annotations

from dataclasses import replace

import torch

from icebear.concepts.attribution.request import PromptRequest, joint_objective
from icebear.concepts.attribution.result import Counterfactual, Relevance
from icebear.concepts.models.model import Model
from icebear.concepts.vocabulary import w_in_rows, w_out_rows
from icebear.errors import InputError
from icebear.records import Neuron


def as_answered(row: PromptRequest, relevance: Relevance) -> PromptRequest:
    """Set the target and contrast that were explained."""
    target, contrast = relevance.target, relevance.contrast
    if row.phrase is not None:
        return row
    return replace(row, target=target.id if target else None, contrast=contrast.id if contrast else None)


def check_same_shape(model: Model, other: Model) -> None:
    """Raise `InputError` if layers, neurons or outputs differ."""
    shapes = [
        (
            one.net.config.model_type,
            one.layers,
            one.output_size,
            {site: one.width(site) for site in one.sites} if one.has_family else {},
        )
        for one in (model, other)
    ]
    if shapes[0] != shapes[1]:
        raise InputError(
            f"{other.name} differs from {model.name} in its layers, neurons or outputs; compare a model with one that "
            "was made from it."
        )


def model_difference(model: Model, base: Model, row: PromptRequest, here: Relevance, there: Relevance) -> Relevance:
    """Subtract the relevance in the base model. Raises `InputError` if the tokens of the prompt differ."""
    if here.prompt.ids != there.prompt.ids:
        raise InputError(f"{base.name} splits the prompt into other tokens than {model.name}; give token ids.")
    if here.positions is not None:
        raise InputError("Relevance with positions (pa-lrp) cannot be subtracted; use attnlrp or cp-lrp.")
    scores = replace(here.neurons.minus(there.neurons, len(here.tokens)), counterfactual=there.neurons.activation)
    return replace(
        here,
        tokens=here.tokens - there.tokens,
        neurons=scores,
        sums=here.sums.minus(there.sums),
        counterfactual=Counterfactual(
            prompts=(here.prompt.strings,),
            pairs=() if row.contrast_phrase is not None else (joint_objective(model, [row]),),
            alignments=(torch.eye(len(here.tokens)),),
            contrasts=(here.contrast_text,) if here.contrast_text else (),
            own_answers=False,
            at="model",
            numbers=(there.sums.target,),
            overlap=None,
            model=base.name,
        ),
    )


def neuron_similarity(model: Model, other: Model, neuron: Neuron) -> dict[str, float]:
    """Return the cosines of the w_in (``reads``) and w_out rows (``writes``) of a neuron in two models."""
    check_same_shape(model, other)
    cosines = {}
    for name, rows in (("reads", w_in_rows), ("writes", w_out_rows)):
        both = [rows(one, neuron.site, neuron.layer) for one in (model, other)]
        pair = [row[neuron.index].double().cpu() for row in both if row is not None]
        if pair:
            cosines[name] = torch.cosine_similarity(pair[0], pair[1], dim=0).item()
    return cosines
