"""Relevance with counterfactual prompts, or beside a base model: the mean of what the method says about each pair.

1. One objective for each counterfactual: its two rows are the prompt and the counterfactual (`_pairs`).
2. The method compares the two rows: activation difference x multiplier, for tokens and neurons (`Method.compare`). An
   open target or contrast is chosen in its pass (`Pair.answered`).
3. Relevance and counterfactual activations are averaged over the counterfactuals (`mean_of`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from statistics import fmean

import torch
from torch import Tensor

from icebear.concepts.attribution.request import AttributionRequest
from icebear.concepts.methods.difference_rules import DIFFERENCE
from icebear.concepts.methods.gradients import GradientTimesInput
from icebear.concepts.methods.method import Method
from icebear.concepts.methods.pair import Pair, PairResult
from icebear.concepts.passes.prompt import (
    Counterfactual,
    Prediction,
    PromptTokens,
    prompt_relevance,
    strings_of,
)
from icebear.concepts.passes.run import Conservation
from icebear.concepts.passes.storage import SiteValues
from icebear.concepts.results.diff import Diff
from icebear.concepts.results.ranking import NeuronScores
from icebear.concepts.results.result import Relevance, Run
from icebear.concepts.weights.changed_weights import ChangedWeights, ModelPair
from icebear.errors import InputError, MissingRule, NumericalError
from icebear.models.batch import Batch
from icebear.models.model import Model
from icebear.models.objective import Objective, joint_objective
from icebear.models.text.prompts import Prompt, PromptRequest

OVERLAP_NODES = 100
"""The number of largest nodes of each counterfactual whose overlap is reported."""


def paired_relevance(request: AttributionRequest, row: PromptRequest) -> Relevance:
    """Explain the difference of a prompt to its counterfactuals, or to the base model."""
    model, objectives = request.model, _pairs(request, row)
    method, note = _with_default(DIFFERENCE if request.base_model else request.method, objectives)
    keeps_largest = method.keeps_largest and len(objectives) == 1  # a mean needs all neurons first
    recorded = request if keeps_largest else request.recording_all()
    pairs = [
        Pair(
            model=model,
            objective=objective,
            is_open=row.is_open,
            sites=request.sites,
            record=recorded.record,
            k=recorded.k,
            models=request.models,
            strict=request.strict,
            checkpoint=request.checkpoint,
        )
        for objective in objectives
    ]
    try:
        mean = mean_of((method.compare(pair) for pair in pairs), len(pairs))
    except MissingRule as error:
        if request.method is not None or request.base_model is not None:
            raise
        raise MissingRule(
            f"{error} The method gxi works, but its relevance does not add up to the difference."
        ) from None
    own_answers = not row.is_phrase and row.contrast is None
    unnamed = "" if model.task.reads_text else "another image"
    about = " and ".join(filter(None, (prompt.about or unnamed for prompt in row.counterfactuals)))
    relevance = _relevance(model, method, mean, pairs[0].recorded, own_answers, note, about)
    if request.base_model is not None:
        assert relevance.counterfactual is not None
        counterfactual = replace(relevance.counterfactual, model=request.base_model.name)
        run = Run(model, mean.first_result.objective.rows([0]), request.models)
        relevance = Diff.from_relevance(replace(relevance, counterfactual=counterfactual, run=run), mean.changes)
    return relevance if keeps_largest else request.reduced(relevance)


def _with_default(method: Method | None, objectives: Sequence[Objective]) -> tuple[Method, str]:
    """Return the method, and why it is not the default."""
    equal = all(len(set(objective.batch.lengths)) == 1 for objective in objectives)
    if method is None and not equal:
        why = "the prompts differ in length, so that tokens have no partners for difference rules"
        return GradientTimesInput(at="midpoint"), why
    method = method or DIFFERENCE  # ranks best or as well as the best on nine tasks (docs/results.md)
    if method.needs_equal_length and not equal:
        lengths = " and ".join(
            str(length) for length in dict.fromkeys(n for objective in objectives for n in objective.batch.lengths)
        )
        raise InputError(
            f"Difference rules need prompts of equal length, but these have {lengths} tokens; give a counterfactual "
            "with as many tokens as the prompt, or choose another method, such as attnlrp."
        )
    return method, ""


def _pairs(request: AttributionRequest, row: PromptRequest) -> list[Objective]:
    """Return an objective of two rows, the prompt and the counterfactual, for each counterfactual."""
    model, base = request.model, request.base_model
    prompt, others = row.prompt, row.counterfactuals or (row.prompt,)
    has_open_position = model.task.labels_tokens and not model.task.is_causal and row.position is None
    if has_open_position:  # the same token in both prompts
        row = replace(row, position=joint_objective(model, [row]).positions[0][0])
    pairs = []
    for other in others:
        if has_open_position and len(model.ids(other)) != len(model.ids(prompt)):
            raise InputError(
                f"{model.name} has an output at each token, and the prompts differ in length; choose the token by a "
                "position that fits both (position=, --at), such as -1."
            )
        pair = joint_objective(model, [row, replace(row, prompt=other)])
        if base is None and _are_same(pair.batch):
            raise InputError("The counterfactual is the prompt itself, so there is nothing to compare; change it.")
        if request.models is not None:
            _check_tokens(request.models, row, other)
        pairs.append(pair)
    return pairs


def _are_same(batch: Batch) -> bool:
    """Return whether both rows have the same tokens, or the same pixels; with images in prompts, both."""
    if batch.pixels is not None:
        return torch.equal(*batch.pixels)
    images = batch.images or ()
    return batch.row_ids(0) == batch.row_ids(1) and (not images or torch.equal(*(image.values for image in images)))


def _check_tokens(models: ModelPair, row: PromptRequest, prompt: Prompt) -> None:
    """Raise `InputError` if the base model reads other tokens, or lacks one."""
    if not models.model.task.reads_text:
        return
    base, written = models.base, replace(prompt, ids=None)
    answers = (*(row.answer or ()), row.contrast, *(row.contrast_phrase or ()))
    models.check_tokens([*models.model.ids(row.prompt), *models.model.ids(prompt)])
    if not models.model.labels:
        models.check_tokens([token for token in answers if token is not None])
    if "centered" in row.kind and base.output_size != models.model.output_size:
        raise InputError(
            f"A phrase is explained by logits minus the mean of all, and {base.name} has another number of tokens than "
            f"{models.model.name}; name one token of it as the target."
        )
    if prompt.ids is not None and written != Prompt() and tuple(base.ids(written)) != prompt.ids:
        raise InputError(
            f"{base.name} and the model split the prompt into different tokens; give token ids instead of text, or "
            "choose another base model."
        )


@dataclass(frozen=True, eq=False)
class MeanResult:
    """The mean over the counterfactuals, and the results without their numbers of neurons."""

    results: list[PairResult]
    tokens: list[Tensor]
    relevance: SiteValues
    activation: SiteValues
    counterfactual: SiteValues
    changes: tuple[ChangedWeights, ...]
    largest: list[set[int]] = field(default_factory=list)
    """The largest nodes of each of several counterfactuals, as columns of all nodes side by side."""

    @property
    def first_result(self) -> PairResult:
        return self.results[0]


def mean_of(results: Iterable[PairResult], count: int) -> MeanResult:
    """Return the mean of as many results, one after the other: all neurons of one result take much memory.

    It divides and adds the tensors of the results in place."""
    mean: MeanResult | None = None
    for result in results:
        slim = replace(
            result, tokens=(), relevance=SiteValues(), activation=SiteValues(), counterfactual=SiteValues(), changes=()
        )
        largest = [_largest(result.relevance)] if count > 1 else []
        for values in (result.relevance, result.counterfactual) if count > 1 else ():
            for x in values.values():
                x.div_(count)
        tokens = [x / count for x in result.tokens]
        changes = tuple(replace(change, caused=change.caused / count) for change in result.changes)
        if mean is None:
            mean = MeanResult(
                [slim], tokens, result.relevance, result.activation, result.counterfactual, changes, largest
            )
            continue
        for sums, values in ((mean.relevance, result.relevance), (mean.counterfactual, result.counterfactual)):
            for site, x in values.items():
                sums[site].add_(x)
        mean = replace(
            mean,
            results=[*mean.results, slim],
            tokens=[a + x for a, x in zip(mean.tokens, tokens, strict=True)],
            changes=tuple(replace(a, caused=a.caused + b.caused) for a, b in zip(mean.changes, changes, strict=True)),
            largest=mean.largest + largest,
        )
    assert mean is not None
    return mean


def _largest(sites: SiteValues) -> set[int]:
    """Return the `OVERLAP_NODES` largest nodes, as columns of the nodes of all sites side by side."""
    values = torch.cat([x.flatten() for x in sites.values()]).abs_() if sites else torch.zeros(0)
    return set(values.topk(min(OVERLAP_NODES, len(values))).indices.tolist())


def _relevance(
    model: Model, method: Method, mean: MeanResult, recorded: tuple[int, ...], own_answers: bool, note: str, about: str
) -> Relevance:
    """own_answers: whether the contrasts are the answers to the counterfactuals. about: the images, in words."""
    results, objective = mean.results, mean.first_result.objective.rows([0])
    tokens, image = prompt_relevance(model, objective, 0, mean.tokens)
    if not torch.isfinite(tokens).all():
        raise NumericalError("The relevance of the tokens is NaN or infinite; try --dtype float32.")
    answers = [result.objective.contrasts[0] for result in results]
    contrasts = tuple(model.answer_text(answer) for answer in answers if answer is not None)
    predicted = replace(objective, contrasts=(objective.contrasts[0] if len(set(contrasts)) == 1 else None,))
    shared = [len(a & b) / max(len(a), 1) for a, b in combinations(mean.largest, 2)]
    batches, targets = [result.objective.batch for result in results], objective.targets[0]
    assert targets is not None
    return Relevance(
        tokens=tokens,
        prompt=PromptTokens.of(model, objective, 0, mean.first_result.sinks),
        prediction=Prediction.of(model, predicted, 0, targets, mean.first_result.logits),
        method=method,
        neurons=NeuronScores(
            mean.relevance, mean.activation, recorded, model.heads, mean.counterfactual, mean.first_result.largest
        ),
        sums=Conservation(fmean(x - c for x, c in (result.numbers for result in results)), tokens.sum().item()),
        made_with=model.made_with,
        image=image,
        run=Run(model, objective),
        counterfactual=Counterfactual(
            prompts=tuple(strings_of(model, batch, 1, batch.row_ids(1)) for batch in batches),
            pairs=tuple(result.objective for result in results),
            alignments=tuple(result.alignment for result in results),
            contrasts=contrasts,
            own_answers=own_answers,
            at=method.at or "both",
            numbers=tuple(result.numbers[1] for result in results),
            overlap=fmean(shared) if shared else None,
            note=note,
            predictions=mean.first_result.predictions,
            image=about,
        ),
    )
