"""Two models that differ in their weights (fine-tuned, edited, with and without an adapter), on the same prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from concepts.models.answer import Answer
from concepts.models.model import Model
from concepts.models.plan import Plan, plan
from concepts.models.prompts import prompts_of
from concepts.relevance import Relevance, Versus
from concepts.vocabulary import w1, w2
from icebear.errors import InputError
from icebear.records import Neuron


def between_models(
    explain: Callable[..., Any],
    model: Model,
    other: Model,
    prompt: Any,
    target: Any,
    contrast: Any,
    k: int | None,
    options: dict[str, Any],
) -> Any:
    """What `explain` finds in the model less what it finds in the other, of the model's own answer where it is open.

    k: keep so many neurons of all positions. Raises `InputError` where shapes or tokens differ.
    """
    if options["versus"] is not None:
        raise InputError("Compare with another prompt or with another model; leave versus or versus_model out.")
    _same_shape(model, other)
    here = explain(model, prompt, target, contrast, **options)
    open_ = options.get("target_text") is None and not isinstance(prompt, Answer)
    if open_:
        rows = here if isinstance(here, list) else [here]
        target = [row.target.id for row in rows]
        contrast = [row.contrast.id if row.contrast else None for row in rows]
        if here is not rows:
            target, contrast = target[0], contrast[0]
    there = explain(other, prompt, target, contrast, **options)
    if not isinstance(here, list):
        one = prompts_of(prompt)[0][0] if open_ else None
        return _less(model, other, here, there, one, k, options)
    return [
        _less(model, other, *row, k, options) for row in zip(here, there, _each(prompt, len(here), open_), strict=True)
    ]


def _each(prompt: Any, count: int, open_: bool) -> list[Any]:
    return list(prompts_of(prompt)[0]) if open_ else [None] * count


def _same_shape(model: Model, other: Model) -> None:
    shapes = [
        (
            one.net.config.model_type,
            one.layers,
            one.answers,
            {site: one.width(site) for site in one.sites} if one.has_family else {},
        )
        for one in (model, other)
    ]
    if shapes[0] != shapes[1]:
        raise InputError(
            f"{other.name} has other layers, neurons or answers than {model.name}; compare a model with one that was "
            "made from it."
        )


def _less(
    model: Model, other: Model, here: Relevance, there: Relevance, prompt: Any, k: int | None, options: dict[str, Any]
) -> Relevance:
    if here.token_ids != there.token_ids:
        raise InputError(f"{other.name} splits the prompt into other tokens than {model.name}; give token ids.")
    if here.positions is not None:
        raise InputError("Relevance of positions is not compared; take attnlrp or cp-lrp.")
    pairs: tuple[Plan, ...] = ()
    if prompt is not None:
        asked: dict[str, Any] = {name: options.get(name) for name in ("prefix", "at")}
        target, contrast = here.target, here.contrast
        pairs = (plan(model, [prompt], target and target.id, contrast and contrast.id, **asked),)
    versus = Versus(
        prompts=(here.token_strings,),
        pairs=pairs,
        shares=(torch.eye(len(here.tokens)),),
        contrasts=(here.contrast_text,) if here.contrast_text else (),
        own=False,
        activation={site: activation for site, (_, activation) in there.sites.items()},
        at="model",
        numbers=(there.conserved.target,),
        overlap=None,
        model=other.name,
    )
    found = replace(
        here,
        tokens=here.tokens - there.tokens,
        sites={site: (here.of(site) - there.of(site), here.activation(site)) for site in here.sites},
        conserved=here.conserved.less(there.conserved),
        versus=versus,
    )
    return found if k is None else found.only(k, found.explained_at)


def likeness(model: Model, other: Model, neuron: Neuron) -> dict[str, float]:
    """Cosines of what a neuron ``reads`` and ``writes`` in two models, of those that it does."""
    _same_shape(model, other)
    found = {}
    for name, rows in (("reads", w1), ("writes", w2)):
        both = [rows(one, neuron.site, neuron.layer) for one in (model, other)]
        pair = [row[neuron.index].double().cpu() for row in both if row is not None]
        if pair:
            found[name] = torch.cosine_similarity(pair[0], pair[1], dim=0).item()
    return found
