"""`attribute`: one forward and one backward pass under the relevance rules."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypedDict, Unpack, overload

import torch

from concepts.baselines.methods import EVERY, Baseline, named
from concepts.baselines.scores import token_scores
from concepts.lrp.method import ATTNLRP, AttnLRP, Difference
from concepts.lrp.positions import Sinks
from concepts.models import images
from concepts.models.model import Model
from concepts.models.plan import Plan, Token, per_prompt, plan
from concepts.models.prompts import Prompt, PromptLike, Prompts, prompts_of
from concepts.passes.inputs import Inputs
from concepts.passes.neurons import AllNeurons
from concepts.passes.run import Recorder, new_ledger, run
from concepts.passes.stream import Stream
from concepts.passes.targets import Logits
from concepts.relevance import Conservation, Relevance
from concepts.telling import Recorded, kept_at, said, token_relevance
from concepts.versus.compare import compared
from concepts.versus.proposals import proposed
from icebear.errors import InputError, NumericalError

ROWS = 16
"""Prompts that go through the model at once, however many are given."""


class Options(TypedDict, total=False):
    """Of `attribute`, which says what they mean."""

    target_text: str | Sequence[str] | None
    versus: Any
    method: AttnLRP | Difference | Baseline | str | None
    sites: Sequence[str] | None
    prefix: str | Sequence[str] | None
    at: int | Sequence[int] | str | None
    record: Recorded
    checkpoint: bool
    strict: bool


@overload
def attribute(
    model: Model,
    prompt: PromptLike,
    target: Token | None = None,
    contrast: Token | None = None,
    **options: Unpack[Options],
) -> Relevance: ...
@overload
def attribute(
    model: Model,
    prompt: Prompts,
    target: Token | Sequence[Token] | None = None,
    contrast: Token | Sequence[Token] | None = None,
    **options: Unpack[Options],
) -> list[Relevance]: ...


def attribute(
    model: Model,
    prompt: PromptLike | Prompts,
    target: Token | Sequence[Token] | None = None,
    contrast: Token | Sequence[Token] | None = None,
    *,
    target_text: str | Sequence[str] | None = None,
    versus: PromptLike | Prompts | Sequence[PromptLike | Prompts] | None = None,
    method: AttnLRP | Difference | Baseline | str | None = None,
    sites: Sequence[str] | None = None,
    prefix: str | Sequence[str] | None = None,
    at: int | Sequence[int] | str | None = None,
    record: Recorded = "all",
    checkpoint: bool = False,
    strict: bool = True,
) -> Relevance | list[Relevance]:
    """Relevance of tokens and neurons for what the model predicts after (or in, or of) `prompt`.

    prompt: a text or token ids, with a mask token for a masked language model; for an image classifier the path of an
        image, an image, or pixels (C, H, W). A list of them gives a list back.
    target: what is explained, one token or a label (default: the most probable one).
    contrast: explains logit[target] - logit[contrast] instead of logit[target].
    target_text: explains a whole continuation instead, summed over its tokens.
    versus: another prompt, or several, that this one is compared with: relevance is then (activation - activation
        there) x coefficient, the mean over several. ``auto`` takes one that the model itself finds likely
        (`concepts.versus.proposals`), ``auto:2`` the next one. Without a contrast, that is the other prompt's
        own answer. With a list of prompts one for each, or one for all.
    method: a value, or the name of one in `concepts.lrp.method`, or in `concepts.baselines.methods`, which know tokens
        only. Default: AttnLRP; with versus difference rules (`concepts.versus.compare.BY_DEFAULT`).
    sites: neurons to record, of ``ffn``, ``attn``, ``q``, ``k``, ``v``, in some models ``cross`` and ``router``;
        default ``ffn`` and ``attn`` (none for a family that icebear does not know).
    prefix: what the decoder of an encoder-decoder has written before the target.
    at: the token whose label is explained, for a token classifier (default: the most conspicuous one). With versus, in
        words: where coefficients are taken, ``prompt`` or ``midpoint``.
    record: the positions whose neurons are kept: ``all`` of them, ``last`` (where the prediction is made), or a list. A
        whole prompt of 2,000 tokens takes gigabytes in a large model.
    checkpoint: keep one residual stream a layer and recompute the rest, for long prompts.
    strict: raise `MissingRule` for an operation without a rule (False: warn, and list it in the result).

    Source: AttnLRP, Achtibat et al. 2024 (arXiv 2402.05602). Raises `InputError`, `MissingRule`, `NumericalError`.
    """
    prompts, single = prompts_of(prompt)
    method = named(method, EVERY) if isinstance(method, str) else method
    place, label_at = (at, None) if isinstance(at, str) else (None, at)
    if versus is None:
        method = ATTNLRP if method is None else method
        if isinstance(method, Difference) or place:
            raise InputError("Difference rules, and a place between prompts, want another prompt; give versus.")
    if sites is None:
        sites = ("ffn", "attn") if model.has_family and (versus is not None or isinstance(method, AttnLRP)) else ()
    if versus is None and sites and not isinstance(method, AttnLRP):
        raise InputError(f"{method!r} knows no neurons; pass sites=(), or another method.")
    each = zip(
        *(per_prompt(value, len(prompts)) for value in (target, contrast, target_text, prefix, label_at)), strict=True
    )
    rows = list(zip(prompts, each, strict=True))
    if versus is not None:
        names = ("target", "contrast", "target_text", "prefix", "at")
        how = (method, place, tuple(sites), record, checkpoint, strict)
        compare = [
            compared(model, one, other, dict(zip(names, asked, strict=True)), *how)
            for (one, asked), other in zip(rows, _others(model, versus, prompts, single), strict=True)
        ]
        return compare[0] if single else compare
    assert not isinstance(method, Difference | None)
    plans = []
    for start in range(0, len(rows), ROWS):
        read, options = zip(*rows[start : start + ROWS], strict=True)
        plans.append(plan(model, read, *zip(*options, strict=True)))
    parts = [relevance_of(model, asked, method, tuple(sites), record, checkpoint, strict) for asked in plans]
    results = [found for part in parts for found in part]
    return results[0] if single else results


def _others(model: Model, versus: Any, prompts: Sequence[Prompt], single: bool) -> list[list[Prompt]]:
    """What each prompt is compared with."""
    if isinstance(versus, str) and (asked := re.fullmatch(r"auto(?::([1-9]\d*))?", versus)):
        return [[Prompt(ids=proposed(model, prompt, int(asked[1] or 1)).ids)] for prompt in prompts]
    others, alone = prompts_of(versus)
    if single or alone:
        return [others] * len(prompts)
    if len(others) != len(prompts):
        raise InputError(f"There are {len(prompts)} prompts but {len(others)} to compare with; give one for each.")
    return [[other] for other in others]


def relevance_of(
    model: Model,
    plan: Plan,
    method: AttnLRP | Baseline,
    sites: Sequence[str] = (),
    record: Recorded = "all",
    checkpoint: bool = False,
    strict: bool = True,
) -> list[Relevance]:
    """`attribute` of what a plan says."""
    if not isinstance(method, AttnLRP):
        return _of_tokens_only(model, plan.resolved(model), method)
    batch = plan.batch
    recorded = [kept_at(plan, row, record) for row in range(len(batch.ids))]
    columns = (
        None
        if record == "all"
        else [[batch.columns(row)[position] for position in positions] for row, positions in enumerate(recorded)]
    )
    target, inputs, stream, sinks = Logits(plan), Inputs(), Stream(model, batch), Sinks(model, batch)
    neurons = AllNeurons(model, batch, sites, columns)
    ledger = new_ledger(model, len(batch.ids))
    recorders: list[Recorder] = [inputs, stream, neurons, *([sinks] if method.positions else [])]
    numbers, missing = run(model, target, recorders, method, ledger=ledger, strict=strict, checkpoint=checkpoint)
    values = inputs.relevance()
    if not all(torch.isfinite(value).all() for value in values):
        run(model, Logits(plan), [Inputs(), Stream(model, batch, gradients=True)], method, strict=strict)  # says where
        raise NumericalError("The relevance of the tokens is NaN or infinite; try --dtype float32.")
    found = []
    for row in range(len(batch.ids)):
        kept = {name: entry[row].item() for name, entry in ledger.items()}
        parts = [value[row] for value in values]
        tokens, image = token_relevance(model, plan, row, parts)
        signed, positive = sinks.relevance[row][..., batch.columns(row)].cpu() if method.positions else (None, None)
        if signed is not None:
            kept["positions"] += signed.sum().item()
        found.append(
            Relevance(
                **said(model, plan, row, target.targets[row], target.logits, method),
                tokens=tokens,
                token_strings=images.names(model) if image else model.pieces(batch.row_ids(row)),
                positions=signed,
                positive_positions=positive,
                sites=neurons.row(row),
                recorded=recorded[row],
                sinks=stream.sinks(row),
                conserved=Conservation(target=numbers[row].item(), tokens=tokens.sum().item(), **kept),
                image=image,
                missing_rules=missing,
            )
        )
    return found


def _of_tokens_only(model: Model, plan: Plan, method: Baseline) -> list[Relevance]:
    """The same for a method that only scores tokens; what its scores lack to the number explained is `rest`."""
    scores = token_scores(model, plan, method)
    with model.lock, torch.no_grad():
        logits = model.logits(plan.batch, plan.needed)  # (B, P, V)
    targets, numbers = plan.explained(logits)
    return [
        Relevance(
            **said(model, plan, row, targets[row], logits, method),
            tokens=tokens.float().cpu(),
            token_strings=model.pieces(plan.batch.row_ids(row)),
            sites={},
            recorded=(),
            sinks=(0,),
            conserved=Conservation(numbers[row].item(), tokens.sum().item(), 0.0, 0.0, 0.0),
        )
        for row, tokens in enumerate(scores)
    ]
