"""`attribute`: relevance of tokens and neurons for what a model predicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Unpack, overload

import torch

from icebear.concepts.attribution.paired import paired_relevance
from icebear.concepts.attribution.request import (
    AttributeKeywords,
    AttributeOptions,
    AttributionRequest,
    about_images,
    answer_request,
    checked_options,
    compared_images,
    prompt_requests,
)
from icebear.concepts.attribution.single import single_relevances
from icebear.concepts.methods.method import Method
from icebear.concepts.results.result import Relevance
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.models.objective import Phrase, Token, joint_objective, per_prompt
from icebear.models.text.answer import Answer, Span
from icebear.models.text.prompts import Prompt, PromptLike, PromptRequest, Prompts
from icebear.values import typed

BATCH_SIZE = 16
"""Prompts that go through the model at once, however many there are."""


@overload
def attribute(  # type: ignore[overload-overlap]  # a list may be one prompt, of token ids or messages
    model: Model,
    prompt: PromptLike,
    target: Token | None = None,
    contrast: Token | None = None,
    **options: Unpack[AttributeKeywords],
) -> Relevance: ...
@overload
def attribute(
    model: Model, prompt: Prompts, target: Any = None, contrast: Any = None, **options: Unpack[AttributeKeywords]
) -> list[Relevance]: ...


@typed
@torch.inference_mode(False)
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
    **options: Unpack[AttributeOptions],
) -> Relevance | list[Relevance]:
    """Compute the relevance of tokens and neurons for a prediction.

    Parameters
    ----------
    model : Model
    prompt : str, sequence of int, Chat, Answer, image or list of these
        A text, token ids or a chat. Masked language models need a mask token in it. Image classifiers take a path, an
        image or pixels (C, H, W). An `Answer` of `Model.answer` explains the words of the answer itself.
    target : str or int, optional
        The token or label that is explained. Default: the most probable one. Of a text of several tokens it is the
        first one in which target and contrast differ; what they share is appended to the prompts, and a log says so.
    contrast : str or int, optional
        Explain logit[target] - logit[contrast]. With `target_text` or an answer, the contrast is a phrase of any
        length; the explained number is then the sum of the centered logits minus the sum for the contrast, or the
        difference of their means if the lengths differ.
    target_text : str or sequence of int, optional
        Explain a whole continuation, summed over its tokens, instead of `target`.
    counterfactual : prompt or list of prompts, optional
        Explain the difference to this prompt: relevance is (activation - counterfactual activation) x multiplier,
        averaged over several counterfactuals. The default contrast is the answer to the counterfactual.
    base_model : Model, optional
        Explain the difference to the model that this one was made from, as a `Diff`: which changed weights caused it.
        The default contrast is the base model's answer. With a counterfactual, the base model reads that one instead.
    method : Method or str, optional
        A method or its name (see `icebear.concepts.methods.registry.METHODS`). ``cp-lrp@midpoint`` and
        ``cp-lrp@prompt`` set where multipliers are taken. Default: AttnLRP; with a counterfactual, difference rules, or
        for another length ``gxi@midpoint``.
    sites : sequence of str, optional
        The sites whose neurons are recorded: ``ffn``, ``attn``, ``q``, ``k``, ``v``, and in some models ``cross``,
        ``mixer`` and ``router``; ``head`` records ``attn``, of whose neurons heads are sums. Default: ``ffn``, ``attn``
        and ``mixer``, or none if the family is unknown.
    span : (int, int) or str, optional
        The tokens [i, j) of an answer, or a phrase of it. Default: the whole answer.
    position : int, optional
        The token whose output is explained, of a causal model (default: the last one), a token classifier, or a model
        in TransformerLens' format. A negative one counts from the end.
    **options
        The fields of `icebear.concepts.attribution.request.AttributeOptions`.

    Returns
    -------
    Relevance or list of Relevance
        A `Diff` with a base model. A list if `prompt` is a list.

    Raises
    ------
    InputError
        If arguments do not fit the model or each other.
    MissingRule
        If the model has an operation without a relevance rule.
    NumericalError
        If a number is NaN or infinite.

    References
    ----------
    AttnLRP: Achtibat et al. 2024, arXiv 2402.05602, Eqs. 8, 9, 13-15 and 19.
    DeepLIFT: Shrikumar et al. 2017, arXiv 1704.02685.
    """
    chosen = checked_options(options)
    prefix = chosen.get("prefix")
    if isinstance(prompt, Answer):
        if any(value is not None for value in (target, target_text, prefix, position)):
            raise InputError(
                "The target of an answer is a span of its tokens; leave out target, target_text, prefix and position."
            )
        (token_contrast,), is_single = per_prompt(contrast, 1), True
        read = Prompt(ids=prompt.prompt_ids, image=prompt.image)
        counterfactual = compared_images(model, read, chosen.get("counterfactual_image"), counterfactual, True)
        rows = [answer_request(model, prompt, span, token_contrast, counterfactual)]
    elif span is not None:
        raise InputError("A span is a part of an answer; pass the result of model.answer as the prompt.")
    else:
        is_compared = method is not None or counterfactual is not None or base_model is not None
        kind = chosen.get("counterfactual_image")
        prompt, counterfactual = about_images(model, prompt, counterfactual, chosen.get("image"))
        counterfactual = compared_images(model, prompt, kind, counterfactual, is_compared)
        rows, is_single = prompt_requests(
            model, prompt, target, contrast, target_text, counterfactual, prefix, position
        )
    request = AttributionRequest.of(model, rows, method, sites, base_model, chosen)
    results = explain_requests(request)
    return results[0] if is_single else results


def explain_requests(request: AttributionRequest) -> list[Relevance]:
    """Explain each prompt of the request."""
    results: list[Relevance] = []
    for (is_compared, _), group in groupby(request.requests, lambda row: (_is_compared(request, row), row.kind)):
        rows, size = list(group), 1 if is_compared else BATCH_SIZE
        for start in range(0, len(rows), size):
            results += _of_batch(request, rows[start : start + size])
    for number, (relevance, row) in enumerate(zip(results, request.requests, strict=True)):
        answer_start = row.answer_start
        if answer_start is None and row.is_phrase:
            answer_start = relevance.predicted_at + 1
        run = replace(relevance.run, request=row)
        results[number] = replace(relevance, prompt=replace(relevance.prompt, answer_start=answer_start), run=run)
    return results


def _is_compared(request: AttributionRequest, row: PromptRequest) -> bool:
    """Return whether a prompt is compared with another prompt, phrase or model. It is then no part of a batch."""
    return bool(row.counterfactuals or row.contrast_phrase or request.base_model)


def _of_batch(request: AttributionRequest, rows: Sequence[PromptRequest]) -> list[Relevance]:
    if rows[0].contrast_phrase is not None:
        return [_against_a_phrase(request, rows[0])]
    if rows[0].counterfactuals or request.base_model:
        return [paired_relevance(request, rows[0])]
    objective = joint_objective(request.model, rows)
    parts = request.model.batches(objective.batch.lengths, BATCH_SIZE if objective.batch.joins else 1)
    return [relevance for part in parts for relevance in single_relevances(request, objective.rows(part))]


def _against_a_phrase(request: AttributionRequest, row: PromptRequest) -> Relevance:
    """Explain a phrase and its contrast phrase, and subtract."""
    phrases = [replace(row, answer=phrase, contrast_phrase=None) for phrase in (row.answer, row.contrast_phrase)]
    everything = request.recording_all()
    (explained,), (contrasted,) = (_of_batch(everything, [phrase]) for phrase in phrases)
    return request.reduced(explained.minus(contrasted))
