"""`attribute`: one forward and one backward pass under the relevance rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, get_args, overload

import torch

from icebear.concepts.attribution.paired import compared
from icebear.concepts.attribution.recorded import Recorded, kept_at, kept_of, said, token_relevance, unranked
from icebear.concepts.attribution.result import Conservation, Relevance
from icebear.concepts.attribution.two_models import between_models
from icebear.concepts.lrp.positions import Sinks
from icebear.concepts.methods.lrp import ATTNLRP, AttnLRP
from icebear.concepts.methods.method import Method
from icebear.concepts.methods.registry import method_of
from icebear.concepts.models import images
from icebear.concepts.models.answer import Answer, Span
from icebear.concepts.models.model import Model
from icebear.concepts.models.plan import Number, Plan, Token, per_prompt, phrase_ids, plan
from icebear.concepts.models.prompts import Prompt, PromptLike, Prompts, prompts_of
from icebear.concepts.passes.inputs import Inputs
from icebear.concepts.passes.largest import LargestNeurons
from icebear.concepts.passes.neurons import AllNeurons
from icebear.concepts.passes.run import Recorder, new_ledger, run
from icebear.concepts.passes.stream import Stream
from icebear.concepts.passes.targets import Logits
from icebear.errors import InputError, NumericalError
from icebear.values import one_of, several, shown, whole

Kept = Literal["all", "top"]
Explained = Literal["log-odds", "logit"]
ROWS = 16
"""Prompts that go through the model at once, however many are given."""


class Options(TypedDict, total=False):
    """Of `attribute`, which says what they mean."""

    target_text: str | Sequence[str] | None
    counterfactual: Any
    base_model: Model | None
    method: Method | str | None
    sites: Sequence[str] | None
    prefix: str | Sequence[str] | None
    at: int | Sequence[int] | None
    span: Span | None
    number: Explained | None
    record: Recorded
    keep: Kept
    k: int
    checkpoint: bool | None
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
    counterfactual: PromptLike | Prompts | Sequence[PromptLike | Prompts] | None = None,
    base_model: Model | None = None,
    method: Method | str | None = None,
    sites: Sequence[str] | None = None,
    prefix: str | Sequence[str] | None = None,
    at: int | Sequence[int] | None = None,
    span: Span | None = None,
    number: Explained | None = None,
    record: Recorded = "all",
    keep: Kept = "all",
    k: int = 100,
    checkpoint: bool | None = None,
    strict: bool = True,
) -> Relevance | list[Relevance]:
    """Relevance of tokens and neurons for what the model predicts after (or in, or of) `prompt`.

    prompt: a text or token ids, with a mask token for a masked language model; for an image classifier the path of an
        image, an image, or pixels (C, H, W). A list of them gives a list back. Or an answer of `Model.answer`, whose
        own words are then explained, without target and target_text.
    target: what is explained, one token or a label (default: the most probable one).
    contrast: explains logit[target] - logit[contrast] instead of logit[target]. Of a target_text or an answer another
        phrase, of any length, behind the same prompt: explained is then the sum of centred logits less the other's, or
        of phrases of different lengths the means (DESIGN section 16, phrases).
    target_text: explains a whole continuation instead, summed over its tokens.
    counterfactual: another prompt, or several, that this one is compared with: relevance is then (activation -
        activation there) x coefficient, the mean over several. Without a contrast, that is the other prompt's own
        answer. With a list of prompts one for each, or one for all.
    base_model: another model of the same shape (fine-tuned, edited, without its adapter) that this one is compared
        with on the same prompt: relevance is then relevance here less relevance there, of this model's answer.
    method: a value, or its name (`icebear.concepts.methods.registry.METHODS`); many score tokens only. With a
        counterfactual ``cp-lrp@midpoint`` or ``cp-lrp@prompt`` says where multipliers are taken. Default: AttnLRP; with
        counterfactual difference rules (`icebear.concepts.attribution.paired.BY_DEFAULT`).
    sites: neurons to record, of ``ffn``, ``attn``, ``q``, ``k``, ``v``, in some models ``cross`` and ``router``;
        default ``ffn`` and ``attn`` (none for a family that icebear does not know).
    prefix: what the decoder of an encoder-decoder has written before the target.
    at: the token whose label is explained, for a token classifier (default: the most conspicuous one).
    span: of an answer the tokens (i, j), half open, or a phrase of it; default all of it.
    number: what is explained of the answer: ``log-odds``, its logit less the mean of all others, weighted by their
        probability; ``logit`` alone, as the paper has it. Default: log-odds, with a contrast or counterfactual logit
        (docs/explain.md#which-number).
    record: the positions whose neurons are kept: ``all`` of them, ``last`` (where the prediction is made), or a list. A
        whole prompt of 2,000 tokens takes gigabytes in a large model.
    keep: ``top`` keeps, of all positions, the sums by layer, head and token and only the `k` neurons of each site that
        speak most for the target, and the k most against it (sinks and a chat's template apart); beside them all
        neurons where the prediction is made, or at the positions of `record`. Of several other prompts, of prompts
        that differ in length and of a phrase against another all are looked at first.
    checkpoint: keep one residual stream a layer and recompute the rest; by default for 2,048 tokens and more.
    strict: raise `MissingRule` for an operation without a rule (False: warn, and list it in the result).

    Source: AttnLRP, Achtibat et al. 2024 (arXiv 2402.05602). Raises `InputError`, `MissingRule`, `NumericalError`.
    """
    if base_model is not None:
        if not isinstance(base_model, Model):
            raise InputError(f"base_model is a loaded model, not {shown(base_model)}; give one of load_model.")
        same: dict[str, Any] = {
            "counterfactual": counterfactual,
            "target_text": target_text,
            "method": method,
            "sites": sites,
        }
        same |= {"prefix": prefix, "at": at, "span": span, "number": number or "logit"}
        same |= {"checkpoint": checkpoint, "strict": strict}
        keeping = _keeping(record, keep, k)
        return between_models(attribute, model, base_model, prompt, target, contrast, keeping, same)  # type: ignore[no-any-return]
    prompts, single = prompts_of(list(prompt.prompt_ids) if isinstance(prompt, Answer) else prompt)
    method = _method(method, counterfactual is not None)
    each = (per_prompt(value, len(prompts)) for value in (target, contrast, target_text, prefix, at))
    names = ("target", "contrast", "target_text", "prefix", "at")
    asked = [dict(zip(names, values, strict=True)) for values in zip(*each, strict=True)]
    others = None if counterfactual is None else _others(counterfactual, prompts, single)
    first = None
    if isinstance(prompt, Answer):
        prompts, asked, others, first = _of_answer(model, prompt, span, asked[0], others)
    elif span is not None:
        raise InputError("A span is of an answer; let the model answer first (model.answer).")
    recorded = _sites(model, sites, method)
    how = How(method, recorded, *_keeping(record, keep, k), checkpoint, strict)
    numbers = _numbers(number, asked, others is not None)
    if any(one["target_text"] is not None and one["contrast"] is not None for one in asked):
        phrases = [_phrases(model, *pair) for pair in zip(prompts, asked, strict=True)]
        numbers = [number for number, *_ in phrases]
        apart: Sequence[list[Prompt] | None] = others or [None] * len(prompts)
        results = [_against(model, how, *row) for row in zip(prompts, phrases, apart, strict=True)]
    else:
        results = _explained(model, prompts, asked, others, numbers=numbers, how=how)
    if first is not None or target_text is not None:
        results = [replace(one, answer_from=one.predicted_at + 1 if first is None else first) for one in results]
    return results[0] if single else results


def _method(method: Method | str | None, compares: bool) -> Method | None:
    """The method. Raises `InputError` for one that does not fit a prompt alone, or a counterfactual."""
    if method is None:
        return None if compares else ATTNLRP
    method = method if isinstance(method, Method) else method_of(method)
    if compares:
        return method.compared()
    if method.needs_counterfactual:
        raise InputError(f"{method!r} compares a prompt with another one; give counterfactual, or another method.")
    return method


def _sites(model: Model, sites: Sequence[str] | None, method: Method | None) -> tuple[str, ...]:
    """Those to record. Raises `InputError` for a method that scores tokens only."""
    if sites is None:
        return ("ffn", "attn") if model.has_family and (method is None or method.scores_neurons) else ()
    sites = tuple(several(sites))
    if sites and method is not None and not method.scores_neurons:
        raise InputError(f"{method!r} knows no neurons; pass sites=(), or another method.")
    for site in sites:
        model.layers_with(site)
    return sites


def _keeping(record: Recorded, keep: str, k: int) -> tuple[Recorded, int | None]:
    """The positions kept whole, and how many neurons of the others, None for no choice."""
    if keep not in get_args(Kept):
        raise InputError(f"keep must be 'all' or 'top' (k >= 1); got {shown(keep)}.")
    if keep == "all":
        return record, None
    return "last" if isinstance(record, str) and record == "all" else record, whole(k, "The number of neurons to keep")


class How(NamedTuple):
    """Of `attribute`, which says what they mean; k: None keeps all."""

    method: Any
    sites: tuple[str, ...]
    record: Recorded
    k: int | None
    checkpoint: bool | None
    strict: bool


def _explained(
    model: Model,
    prompts: Sequence[Prompt],
    asked: Sequence[dict[str, Any]],
    others: Sequence[Sequence[Prompt]] | None,
    *,
    numbers: Sequence[Number],
    how: How,
) -> list[Relevance]:
    """Of prompts with what is asked of each, compared with others or alone."""
    if others is not None:
        each = zip(prompts, others, asked, numbers, strict=True)
        return [compared(model, one, other, wanted, number, *how) for one, other, wanted, number in each]
    found: list[Relevance] = []
    for number, rows in groupby(range(len(prompts)), key=numbers.__getitem__):
        every = list(rows)
        for start in range(0, len(every), ROWS):
            some = every[start : start + ROWS]
            columns = {name: [asked[row][name] for row in some] for name in asked[0]}
            planned = plan(model, [prompts[row] for row in some], **columns, number=number)
            found += relevance_of(model, planned, *how)
    return found


def _numbers(number: Explained | None, asked: Sequence[dict[str, Any]], compares: bool) -> list[Number]:
    """Of each prompt. Raises `InputError` for log-odds against something else."""
    if number is not None:
        one_of(number, "number to explain", get_args(Explained))
    against = [compares or one["contrast"] is not None for one in asked]
    if number == "log-odds" and any(against):
        raise InputError("Log-odds are against all other answers; leave out number, or contrast and counterfactual.")
    kinds: dict[Explained, Number] = {"log-odds": "log-odds", "logit": "logits"}
    return [kinds[number or ("logit" if other else "log-odds")] for other in against]


def _of_answer(
    model: Model, answer: Answer, span: Span | None, asked: dict[str, Any], others: list[list[Prompt]] | None
) -> tuple[list[Prompt], list[dict[str, Any]], list[list[Prompt]] | None, int]:
    """Prompts, what is asked of them, and others, of tokens of an answer behind all that was read before them; and
    where it begins."""
    if asked["target"] is not None or asked["target_text"] is not None:
        raise InputError("An answer is explained as it is; give span and contrast only.")
    start, stop = answer.places(span)
    read, explained, contrast = Prompt(ids=tuple(answer.before(start))), answer.ids[start:stop], asked["contrast"]
    if isinstance(contrast, str) and answer.token_strings[start].startswith(" ") and not contrast.startswith(" "):
        contrast = f" {contrast}"  # a span is found without its space too
    rather = (contrast,) if isinstance(contrast, int) else contrast and phrase_ids(model, contrast, read)
    if len(explained) == 1 and (rather is None or len(rather) == 1):
        asked = {**asked, "target": explained[0], "contrast": rather and rather[0]}
    else:
        asked = {**asked, "target_text": explained, "contrast": rather}
    if others is not None:
        others = [[Prompt(ids=(*model.ids(other), *answer.ids[:start])) for other in row] for row in others]
    return [read], [asked], others, len(answer.prompt_ids)


def _phrases(model: Model, prompt: Prompt, asked: dict[str, Any]) -> tuple[Number, dict[str, Any], dict[str, Any]]:
    """What is asked of a phrase and of the one that it is explained against, after the number that compares them."""
    if asked["target_text"] is None or asked["contrast"] is None:
        raise InputError("Give each prompt a target text and a contrast, or none a contrast.")
    phrase, other = (phrase_ids(model, asked[name], prompt) for name in ("target_text", "contrast"))
    if not other or phrase == other:
        raise InputError("The contrast is empty, or the explained phrase itself; name another one.")
    here, there = ({**asked, "contrast": None, "target_text": ids} for ids in (phrase, other))
    return "centred" if len(phrase) == len(other) else "mean", here, there


def _against(model: Model, how: How, prompt: Prompt, phrases: Any, others: Any) -> Relevance:
    """Of one phrase rather than another one: a pass of each."""
    number, *both = phrases
    whole = how if how.k is None else how._replace(record="all", k=None)
    explain = partial(_explained, model, [prompt], others=others and [others], numbers=[number], how=whole)
    found, rather = (explain([ask])[0] for ask in both)
    less = found.less(rather)
    if how.k is None:
        return less
    return less.only(how.k, kept_of(less.explained_at, len(less.tokens), how.record))


def _others(counterfactual: Any, prompts: Sequence[Prompt], single: bool) -> list[list[Prompt]]:
    """What each prompt is compared with."""
    others, alone = prompts_of(
        list(counterfactual.prompt_ids) if isinstance(counterfactual, Answer) else counterfactual
    )
    if single or alone:
        return [others] * len(prompts)
    if len(others) != len(prompts):
        raise InputError(f"There are {len(prompts)} prompts but {len(others)} to compare with; give one for each.")
    return [[other] for other in others]


def relevance_of(
    model: Model,
    plan: Plan,
    method: Method,
    sites: Sequence[str] = (),
    record: Recorded = "all",
    k: int | None = None,
    checkpoint: bool | None = None,
    strict: bool = True,
) -> list[Relevance]:
    """`attribute` of what a plan says; k: beside the positions recorded keep so many of all."""
    if not method.scores_neurons:
        return _of_tokens_only(model, plan.resolved(model), method)
    rules = method if isinstance(method, AttnLRP) else None
    positioned = rules is not None and rules.positions
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
    recorders: list[Recorder] = [inputs, stream, neurons, *([sinks] if positioned else [])]
    largest: LargestNeurons | None = None
    if k is not None:
        largest = LargestNeurons(model, batch, sites, k, lambda row: unranked(model, batch, stream, row))
        recorders.append(largest)
    numbers, missing = run(model, target, recorders, rules, ledger=ledger, strict=strict, checkpoint=checkpoint)
    values = inputs.relevance()
    if not all(torch.isfinite(value).all() for value in values):
        run(model, Logits(plan), [Inputs(), Stream(model, batch, gradients=True)], rules, strict=strict)  # says where
        raise NumericalError("The relevance of the tokens is NaN or infinite; try --dtype float32.")
    found = []
    for row in range(len(batch.ids)):
        kept = {name: entry[row].item() for name, entry in ledger.items()}
        parts = [value[row] for value in values]
        tokens, image = token_relevance(model, plan, row, parts)
        strings = images.names(model) if image else model.pieces(batch.row_ids(row))
        positions = sinks.relevance[row][:, batch.columns(row)].cpu() if positioned else None  # (K, T)
        if positions is not None:
            kept["positions"] += positions.sum().item()
        found.append(
            Relevance(
                **said(model, plan, row, target.targets[row], target.logits, method, strings),
                tokens=tokens,
                positions=positions,
                sites=neurons.row(row),
                largest=largest.row(row) if largest else None,
                recorded=recorded[row],
                sinks=stream.sinks(row),
                conserved=Conservation(target=numbers[row].item(), tokens=tokens.sum().item(), **kept),
                image=image,
                missing_rules=missing,
            )
        )
    return found


def _of_tokens_only(model: Model, plan: Plan, method: Method) -> list[Relevance]:
    """The same for a method that only scores tokens; what its scores lack to the number explained is `rest`."""
    scores = method.scores(model, plan)
    with model.lock, torch.no_grad():
        logits = model.logits(plan.batch, plan.needed)  # (B, P, V)
    targets, numbers = plan.explained(logits)
    return [
        Relevance(
            **said(model, plan, row, targets[row], logits, method, model.pieces(plan.batch.row_ids(row))),
            tokens=tokens.float().cpu(),
            sites={},
            recorded=(),
            sinks=(0,),
            conserved=Conservation(numbers[row].item(), tokens.sum().item(), 0.0, 0.0, 0.0),
        )
        for row, tokens in enumerate(scores)
    ]
