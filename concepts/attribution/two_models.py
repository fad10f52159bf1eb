"""Two models that differ in their weights (fine-tuned, edited, with and without an adapter), on the same prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from icebear.concepts.attribution.recorded import Recorded, kept_of
from icebear.concepts.attribution.result import Counterfactual, Relevance
from icebear.concepts.models.answer import Answer
from icebear.concepts.models.model import Model
from icebear.concepts.models.plan import Plan, per_prompt, plan
from icebear.concepts.models.prompts import prompts_of
from icebear.concepts.vocabulary import w1, w2
from icebear.errors import InputError
from icebear.records import Neuron


def between_models(
    explain: Callable[..., Any],
    model: Model,
    other: Model,
    prompt: Any,
    target: Any,
    contrast: Any,
    keeping: tuple[Recorded, int | None],
    options: dict[str, Any],
) -> Any:
    """What `explain` finds in the model less what it finds in the other, of the model's own answer where it is open.

    keeping: the positions kept whole, and how many neurons of the others, None for no choice. Raises `InputError` where
        shapes or tokens differ.
    """
    if options["counterfactual"] is not None:
        raise InputError("Compare with another prompt or with another model; leave counterfactual or base_model out.")
    _same_shape(model, other)
    record, k = keeping
    options = {**options, "record": record if k is None else "all"}
    here = explain(model, prompt, target, contrast, **options)
    single, open_ = not isinstance(here, list), options["target_text"] is None and not isinstance(prompt, Answer)
    rows = [here] if single else here
    if open_:
        target = [row.target.id for row in rows]
        contrast = [row.contrast.id if row.contrast else None for row in rows]
        if single:
            target, contrast = target[0], contrast[0]
    there = explain(other, prompt, target, contrast, **options)
    pairs = zip(rows, [there] if single else there, _plans(model, prompt, rows, options, open_), strict=True)
    found = [_less(model, other, *pair) for pair in pairs]
    if k is not None:
        found = [one.only(k, kept_of(one.explained_at, len(one.tokens), record)) for one in found]
    return found[0] if single else found


def _plans(
    model: Model, prompt: Any, rows: Sequence[Relevance], options: dict[str, Any], open_: bool
) -> list[tuple[Plan, ...]]:
    """What was asked of each prompt; of an answer or a text of several tokens nothing that can be asked again."""
    if not open_:
        return [()] * len(rows)
    each = [per_prompt(options[name], len(rows)) for name in ("prefix", "at")]
    asked = zip(prompts_of(prompt)[0], rows, *each, strict=True)
    return [
        (plan(model, [one], row.target and row.target.id, row.contrast and row.contrast.id, prefix=prefix, at=at),)
        for one, row, prefix, at in asked
    ]


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


def _less(model: Model, other: Model, here: Relevance, there: Relevance, pairs: tuple[Plan, ...]) -> Relevance:
    if here.token_ids != there.token_ids:
        raise InputError(f"{other.name} splits the prompt into other tokens than {model.name}; give token ids.")
    if here.positions is not None:
        raise InputError("Relevance of positions is not compared; take attnlrp or cp-lrp.")
    counterfactual = Counterfactual(
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
    return replace(
        here,
        tokens=here.tokens - there.tokens,
        sites={site: (here.of(site) - there.of(site), here.activation(site)) for site in here.sites},
        conserved=here.conserved.less(there.conserved),
        counterfactual=counterfactual,
    )


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
