"""`attribute`: relevance of tokens and neurons for what a model predicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, overload

from icebear.concepts.attribution.alone import alone
from icebear.concepts.attribution.paired import compared
from icebear.concepts.attribution.request import (
    AttributionRequest,
    Options,
    PromptRequest,
    joint_objective,
    row_of_answer,
    rows_of,
)
from icebear.concepts.attribution.result import Relevance
from icebear.concepts.attribution.two_models import as_answered, check_same_shape, difference
from icebear.concepts.methods.method import Method
from icebear.concepts.models.answer import Answer, Span
from icebear.concepts.models.model import Model
from icebear.concepts.models.objective import Phrase, Token, per_prompt
from icebear.concepts.models.prompts import PromptLike, Prompts
from icebear.errors import InputError

BATCH_SIZE = 16
"""Prompts that go through the model at once, however many there are."""


@overload
def attribute(
    model: Model, prompt: PromptLike, target: Token | None = None, contrast: Token | None = None, **options: Any
) -> Relevance: ...
@overload
def attribute(
    model: Model, prompt: Prompts, target: Any = None, contrast: Any = None, **options: Any
) -> list[Relevance]: ...


def attribute(
    model: Model,
    prompt: PromptLike | Prompts,
    target: Token | Sequence[Token] | None = None,
    contrast: Token | Sequence[Token] | None = None,
    *,
    target_text: Phrase | Sequence[Phrase] | None = None,
    counterfactual: PromptLike | Prompts | None = None,
    base_model: Model | None = None,
    method: Method | str | None = None,
    sites: Sequence[str] | None = None,
    span: Span | None = None,
    position: int | Sequence[int] | None = None,
    **options: Any,
) -> Relevance | list[Relevance]:
    """Relevance of tokens and neurons for what the model predicts after (or in, or of) `prompt`.

    Parameters
    ----------
    prompt: a text or token ids, with a mask token for a masked language model; for an image classifier the path of an
        image, an image, or pixels (C, H, W). A list of them gives a list back. Or an answer of `Model.answer`, whose
        own words are then explained, without target and target_text.
    target: what is explained, one token or a label (default: the most probable one).
    contrast: explains logit[target] - logit[contrast] instead of logit[target]. Of a target_text or an answer another
        phrase, of any length, behind the same prompt: explained is then the sum of centered logits less the other's, or
        of phrases of different lengths the means.
    target_text: explains a whole continuation instead, summed over its tokens.
    counterfactual: another prompt, or several, that this one is compared with: relevance is then (activation -
        activation there) x multiplier, the mean over several. Without a contrast, that is the other prompt's own
        answer. With a list of prompts one for each, or one for all.
    base_model: another model of the same shape (fine-tuned, edited, without its adapter) that this one is compared
        with on the same prompt: relevance is then relevance here less relevance there, of this model's answer.
    method: a value, or its name (`icebear.concepts.methods.registry.METHODS`); many score tokens only. With a
        counterfactual ``cp-lrp@midpoint`` or ``cp-lrp@prompt`` says where multipliers are taken. Default: AttnLRP; with
        counterfactual difference rules (`icebear.concepts.attribution.paired.BY_DEFAULT`).
    sites: neurons to record, of ``ffn``, ``attn``, ``q``, ``k``, ``v``, in some models ``cross`` and ``router``;
        default ``ffn`` and ``attn`` (none for a family that icebear does not know).
    span: of an answer the tokens (i, j), half open, or a phrase of it; default all of it.
    position: the token whose label is explained, for a token classifier (default: the one least likely to have the
        first label).
    options: `icebear.concepts.attribution.request.Options`: prefix, number, record, keep, k, checkpoint, strict.

    Returns
    -------
    A `Relevance`, or a list of them for a list of prompts.

    Raises
    ------
    InputError: for arguments that do not fit the model or each other. MissingRule: for an operation without a rule.
    NumericalError: where a number is NaN or infinite.

    Source: AttnLRP, Achtibat et al. 2024 (arXiv 2402.05602).
    """
    chosen = Options(**options)
    prefix = chosen.prefix
    if isinstance(prompt, Answer):
        if any(value is not None for value in (target, target_text, prefix, position)):
            raise InputError("An answer is explained as it is; give span and contrast only.")
        (against,), single = per_prompt(contrast, 1), True
        rows = [row_of_answer(model, prompt, span, against, counterfactual)]
    elif span is not None:
        raise InputError("A span is of an answer; let the model answer first (model.answer).")
    else:
        rows, single = rows_of(prompt, target, contrast, target_text, counterfactual, prefix, position)
    request = AttributionRequest.of(model, rows, method, sites, base_model, chosen)
    results = _between_models(request, request.base_model) if request.base_model else of_prompts(request)
    return results[0] if single else results


def _between_models(request: AttributionRequest, base: Model) -> list[Relevance]:
    """Relevance in the model less that in its base model, of the model's own answer where the target is open."""
    check_same_shape(request.model, base)
    whole = request.whole()
    here = of_prompts(whole)
    rows = tuple(as_answered(*pair) for pair in zip(request.prompts, here, strict=True))
    there = of_prompts(replace(whole, model=base, prompts=rows))
    pairs = zip(rows, here, there, strict=True)
    return [request.reduced(difference(request.model, base, *pair)) for pair in pairs]


def of_prompts(request: AttributionRequest) -> list[Relevance]:
    """Of each prompt, in the order of the request; its base model is not looked at."""
    results: list[Relevance] = []
    for key, group in groupby(request.prompts, lambda row: (row.batched, row.objective)):
        rows, size = list(group), BATCH_SIZE if key[0] else 1
        for start in range(0, len(rows), size):
            results += _of_batch(request, rows[start : start + size])
    return [_with_answer_start(*pair) for pair in zip(results, request.prompts, strict=True)]


def _of_batch(request: AttributionRequest, rows: Sequence[PromptRequest]) -> list[Relevance]:
    if rows[0].rather is not None:
        return [_against_a_phrase(request, rows[0])]
    if rows[0].counterfactuals:
        return [compared(request, rows[0])]
    return alone(request, joint_objective(request.model, rows))


def _with_answer_start(relevance: Relevance, row: PromptRequest) -> Relevance:
    start = row.answer_start
    if start is None and row.phrase is not None:
        start = relevance.predicted_at + 1
    return replace(relevance, prompt=replace(relevance.prompt, answer_start=start))


def _against_a_phrase(request: AttributionRequest, row: PromptRequest) -> Relevance:
    """A pass for each of both phrases."""
    phrases = [replace(row, phrase=phrase, rather=None) for phrase in (row.phrase, row.rather)]
    whole = request.whole()
    (here,), (there,) = (_of_batch(whole, [phrase]) for phrase in phrases)
    return request.reduced(here.less(there))
