"""Relevance with counterfactual prompts: (activation - counterfactual activation) x multiplier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, takewhile
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from icebear.concepts.attribution.request import AttributionRequest, PromptRequest, joint_objective
from icebear.concepts.methods.gradients import GradientTimesInput
from icebear.concepts.methods.lrp import DIFFERENCE, Difference
from icebear.concepts.methods.method import Method, Multiplying, OnePass
from icebear.concepts.passes.inputs import Inputs
from icebear.concepts.passes.largest import Largest, LargestNeurons
from icebear.concepts.passes.neurons import AllNeurons, PairedNeurons, Values
from icebear.concepts.passes.prompt import (
    Prediction,
    PromptTokens,
    excluded_positions,
    prompt_relevance,
    recorded_at,
)
from icebear.concepts.passes.run import Conservation, Logits, Recorder, forward, forward_backward
from icebear.concepts.passes.stream import Stream
from icebear.concepts.results.counterfactual import Counterfactual
from icebear.concepts.results.diff import Diff
from icebear.concepts.results.ranking import NeuronScores
from icebear.concepts.results.result import Relevance, Run
from icebear.concepts.weights.two_models import Causes, ChangedWeights
from icebear.errors import InputError, MissingRule, NumericalError, SameAnswer
from icebear.models.model import Model
from icebear.models.objective import Objective
from icebear.models.text import images
from icebear.models.text.prompts import Prompt
from icebear.records import TokenScore

NODES = 100
"""The number of largest nodes of each counterfactual whose overlap is reported."""
Sites = dict[str, Tensor]


def paired_relevance(request: AttributionRequest, row: PromptRequest) -> Relevance:
    """Explain the difference of a prompt to its counterfactuals, or to the base model."""
    pairs = _pairs(request, row)
    is_open = row.phrase is None and (row.target is None or row.contrast is None)
    method, note = _with_default(DIFFERENCE if request.base_model else request.method, pairs)
    exact_largest = isinstance(method, Difference) and len(pairs) == 1  # a mean needs all neurons first
    single = replace(request if exact_largest else request.whole(), method=method)
    compute = _by_difference_rules if isinstance(method, Difference) else _by_multipliers
    try:
        sums = compute(single, pairs, is_open)
    except MissingRule as error:
        if request.method is not None or request.base_model is not None:
            raise
        raise MissingRule(
            f"{error} The method gxi works, but its relevance does not add up to the difference."
        ) from None
    own = row.phrase is None and row.contrast is None
    relevance = sums.relevance(method, own, note)
    if request.base_model is not None:
        assert relevance.counterfactual is not None
        compared = replace(relevance.counterfactual, model=request.base_model.name)
        run = Run(request.model, sums.pairs[0].rows([0]), request.models)
        relevance = Diff.from_relevance(replace(relevance, counterfactual=compared, run=run), sums.changes)
    return relevance if exact_largest else request.reduced(relevance)


def _with_default(method: Method | None, pairs: Sequence[Objective]) -> tuple[Method, str]:
    """Return the method, and why it is not the default."""
    equal = all(len(set(pair.batch.lengths)) == 1 for pair in pairs)
    if method is None and not equal:
        return GradientTimesInput(
            at="midpoint"
        ), "the prompts differ in length, so that tokens have no partners for difference rules"
    method = method or DIFFERENCE  # ranks best or as well as the best on nine tasks (docs/results.md#ablation)
    if isinstance(method, Difference) and not equal:
        lengths = " and ".join(str(length) for length in dict.fromkeys(n for pair in pairs for n in pair.batch.lengths))
        raise InputError(
            f"Difference rules need prompts of equal length, but these have {lengths} tokens; give a counterfactual "
            "with as many tokens as the prompt, or choose another method, such as attnlrp."
        )
    return method, ""


def _pairs(request: AttributionRequest, row: PromptRequest) -> list[Objective]:
    """Return an objective of two rows, the prompt and the counterfactual, for each counterfactual."""
    model, base = request.model, request.base_model
    prompt, others = row.prompt, row.counterfactuals or (row.prompt,)
    if any((one.image is None) is not (prompt.image is None) for one in others):
        raise InputError("A text cannot be compared with an image; give a counterfactual of the prompt's own kind.")
    is_open = model.task.labels_tokens and not model.task.is_causal and row.position is None
    if is_open:  # the same token in both prompts
        row = replace(row, position=joint_objective(model, [row]).positions[0][0])
    pairs = []
    for other in others:
        if is_open and len(model.ids(other)) != len(model.ids(prompt)):
            raise InputError(
                f"{model.name} has an output at each token, and the prompts differ in length; choose the token by a "
                "position that fits both (position=, --at), such as -1."
            )
        pair = joint_objective(model, [row, replace(row, prompt=other)])
        same = pair.batch.row_ids(0) == pair.batch.row_ids(1) and pair.batch.pixels is None
        if same and base is None:
            raise InputError("The counterfactual is the prompt itself, so there is nothing to compare; change it.")
        if base is not None:
            _check_tokens(base, row, other, pair)
        pairs.append(pair)
    return pairs


def _check_tokens(base: Model, row: PromptRequest, other: Prompt, pair: Objective) -> None:
    """Raise `InputError` if the base model reads other tokens."""
    if joint_objective(base, [replace(row, prompt=other)]).batch.row_ids(0) != pair.batch.row_ids(1):
        raise InputError(
            f"{base.name} and the model split the prompt into different tokens; give token ids instead of text, or "
            "choose another base model."
        )


def _with_answers(
    model: Model, pair: Objective, logits_x: Tensor, logits_c: Tensor, two_models: bool = False
) -> Objective:
    """Fill in the answer to the prompt as the target and the answer to the counterfactual as the contrast, from the
    logits (P, V) of both at the explained positions. If two models give the same answer, there is no contrast."""
    target, contrast = pair.targets[0] or tuple(logits_x.argmax(-1).tolist()), pair.contrasts[0]
    if contrast is None and model.output_size > 1:  # a single number has no alternative
        contrast = int(logits_c[0].argmax())
        if two_models and contrast in target:
            contrast = None
        elif contrast in target:
            raise _same_answer(model, contrast, logits_x[0].float(), logits_c[0].float())
    return replace(pair, targets=(target, target), contrasts=(contrast, contrast))


def _same_answer(model: Model, answer: int, logits_x: Tensor, logits_c: Tensor) -> SameAnswer:
    """Return the error, with the first answers of both prompts and the one that the counterfactual favors most."""
    first = [model.top_tokens(logits, 5) for logits in (logits_x, logits_c)]
    others = {token.id: token.text for tokens in first for token in tokens if token.id != answer}
    named = {id: text for id, text in others.items() if text.isprintable() and model.reads_back(id)} or others
    gains = logits_c.softmax(-1) - logits_x.softmax(-1)
    lists = [", ".join(f"{token.text!r} {token.number}" for token in tokens) for tokens in first]
    contrast = named[max(named, key=lambda id: gains[id].item())]
    return SameAnswer(model.answer_text(answer), (lists[0], lists[1]), contrast)


# --- means over the counterfactuals ---------------------------------------------------------------------


@dataclass(frozen=True)
class _Here:
    """A forward pass of one prompt: embeddings of each stack (T, D), activations (L, P, N), sinks, logits (1, P, V)."""

    inputs: list[Tensor]
    activation: Sites
    sinks: tuple[int, ...]
    logits: Tensor


class _Sums:
    """Running means over the counterfactuals."""

    def __init__(self, model: Model, count: int, recorded: tuple[int, ...]) -> None:
        self.model, self.count, self.recorded = model, count, recorded
        self.pairs: list[Objective] = []
        self.here: _Here
        self.predictions: tuple[TokenScore, ...] = ()
        self.parts: list[Tensor] = []
        self.sites: Sites = {}
        self.there: Sites = {}
        self.tops: list[set[int]] = []
        self.numbers: list[tuple[float, float]] = []
        self.alignments: list[Tensor] = []
        self.largest: Largest | None = None
        self.changes: tuple[ChangedWeights, ...] = ()
        """With a base model."""

    def add_changes(self, changes: tuple[ChangedWeights, ...]) -> None:
        """Add what the weights caused for one counterfactual."""
        before = self.changes or tuple(replace(one, caused=torch.zeros_like(one.caused)) for one in changes)
        pairs = zip(before, changes, strict=True)
        self.changes = tuple(replace(one, caused=one.caused + more.caused / self.count) for one, more in pairs)

    def add(
        self,
        pair: Objective,
        parts: list[Tensor],
        sites: Sites,
        there: Sites,
        numbers: tuple[float, float],
        weights: Tensor,
    ) -> None:
        """Add a counterfactual: relevance of the embeddings of each stack and of the sites, aligned counterfactual
        activations, the explained number in both prompts, and the alignment."""
        count = self.count
        self.pairs.append(pair)
        self.numbers.append(numbers)
        self.alignments.append(weights)
        scaled = [x / count for x in parts]
        self.parts = [a + x for a, x in zip(self.parts, scaled, strict=True)] if self.parts else scaled
        for means, values in ((self.sites, sites), (self.there, there)):
            for site, x in values.items():
                means[site] = means[site].add_(x, alpha=1 / count) if site in means else x / count if count > 1 else x
        if count > 1:
            self.tops.append(_largest(sites))

    def relevance(self, method: Method, own_answers: bool, note: str) -> Relevance:
        """Return the mean. own_answers: whether the contrasts are the answers to the counterfactuals."""
        model, first = self.model, self.pairs[0].rows([0])
        tokens, image = prompt_relevance(model, first, 0, self.parts)
        if not torch.isfinite(tokens).all():
            raise NumericalError("The relevance of the tokens is NaN or infinite; try --dtype float32.")
        contrasts = tuple(model.answer_text(pair.contrasts[0]) for pair in self.pairs if pair.contrasts[0] is not None)
        difference = sum(here - there for here, there in self.numbers) / len(self.numbers)
        one = replace(first, contrasts=(first.contrasts[0] if len(set(contrasts)) == 1 else None,))
        shared = [len(a & b) / max(len(a), 1) for a, b in combinations(self.tops, 2)]
        targets = first.targets[0]
        assert targets is not None
        strings = images.names(model) if image else model.pieces(first.batch.row_ids(0))
        return Relevance(
            tokens=tokens,
            prompt=PromptTokens.of(model, first, 0, strings, self.here.sinks),
            prediction=Prediction.of(model, one, 0, targets, self.here.logits),
            method=method,
            neurons=NeuronScores(
                self.sites, self.here.activation, self.recorded, model.heads, self.there, self.largest
            ),
            sums=Conservation(difference, tokens.sum().item()),
            made_with=model.made_with,
            image=image,
            run=Run(model, first),
            counterfactual=Counterfactual(
                prompts=tuple(model.pieces(pair.batch.row_ids(1)) for pair in self.pairs),
                pairs=tuple(self.pairs),
                alignments=tuple(self.alignments),
                contrasts=contrasts,
                own_answers=own_answers,
                at=method.at or "both",
                numbers=tuple(there for _, there in self.numbers),
                overlap=fmean(shared) if shared else None,
                note=note,
                predictions=self.predictions,
            ),
        )


def _largest(sites: Sites) -> set[int]:
    """Return the `NODES` largest nodes, as places among the nodes of all sites."""
    values = torch.cat([x.flatten() for x in sites.values()]).abs_() if sites else torch.zeros(0)
    return set(values.topk(min(NODES, len(values))).indices.tolist())


# --- difference rules -----------------------------------------------------------------------------------


class PairLogits(Logits):
    """The number of a prompt and that of its counterfactual, which gets no gradient. Open answers are read from the
    same pass."""

    def __init__(self, objective: Objective, is_open: bool, two_models: bool) -> None:
        super().__init__(objective)
        self.is_open, self.two_models = is_open, two_models

    def numbers(self, model: Model) -> Tensor:
        pair = self.objective
        logits = model.logits(pair.batch, pair.all_positions)
        self.logits = logits.detach()
        if self.is_open:
            logits_x, logits_c = (
                self.logits[row, [pair.all_positions.index(place) for place in pair.positions[row]]] for row in (0, 1)
            )
            self.objective = _with_answers(model, pair, logits_x, logits_c, self.two_models)
        self.targets, numbers = self.objective.evaluate(logits)
        return torch.cat((numbers[:1], numbers[1:].detach()))


def _unanswered(objective: Objective) -> Objective:
    rows = (None,) * len(objective.positions)
    return replace(objective, targets=rows, contrasts=rows)


def _by_difference_rules(request: AttributionRequest, pairs: Sequence[Objective], is_open: bool) -> _Sums:
    """Run prompt and counterfactual as the two rows of one pass with difference rules."""
    model, sites, method = request.model, request.sites, request.method
    assert isinstance(method, Difference)
    sums = _Sums(model, len(pairs), recorded_at(pairs[0], 0, request.record))
    for pair in pairs:
        batch, columns = pair.batch, None
        if request.record != "all":
            columns = [[batch.columns(row)[place] for place in sums.recorded] for row in (0, 1)]
        causes = Causes(request.models, batch) if request.models else None
        target, stream = PairLogits(pair, is_open, bool(causes)), Stream(model, batch)
        inputs = Inputs(causes.read) if causes else Inputs()
        neurons = PairedNeurons(model, batch, sites, columns)
        excluded = partial(excluded_positions, model, pair, stream)
        largest = None if request.k is None else LargestNeurons(model, batch, sites, request.k, excluded, True)
        recorders: list[Recorder] = [inputs, stream, neurons, *([largest] if largest else [])]
        options: dict[str, Any] = {"strict": request.strict, "checkpoint": request.checkpoint}
        paired = causes.weights if causes else None
        numbers, _ = forward_backward(model, target, recorders, method, **options, paired=paired)
        sums.largest = largest.row(0) if largest else None
        if causes is None or batch.pixels is not None:
            parts = [_product(x[0] - x[1], g[0]) for x, g in zip(inputs.values, inputs.gradients, strict=True)]
        else:
            parts = [causes.passed_on(stack, g) for stack, g in enumerate(inputs.gradients)]
        if causes is not None:
            sums.add_changes(causes.result())
            if not causes.pair.only_weights_differ:
                _check_base(causes.pair.base, target.objective, numbers[1])
        relevance, here, there = neurons.result()
        if not sums.numbers:
            places = [pair.all_positions.index(place) for place in pair.positions[0]]
            sums.here = _Here([], here, stream.sinks(0), target.logits[:1, places])
            sums.predictions = _predictions(model, pair, target.logits)
        weights = torch.eye(len(batch.columns(0)))
        sums.add(target.objective, parts, relevance, there, (numbers[0].item(), numbers[1].item()), weights)
    return sums


def _check_base(base: Model, pair: Objective, number: Tensor) -> None:
    """Raise `InputError` if the base model differs in more than its weights: if its number is not that of the pass."""
    one = pair.rows([1])
    experts = Values(base, one.batch, ["router"] if base.has_family and base.family.experts else [])  # run by ours
    own = forward(base, Logits(one), [experts])[0].to(number)
    if (own - number).abs() > torch.finfo(base.dtype).eps ** 0.5 * own.abs().clamp(min=1):
        raise InputError(
            f"{base.name} and the model have different configurations, so their outputs would differ even with equal "
            "weights; compare models that have the same configuration."
        )


def _predictions(model: Model, objective: Objective, logits: Tensor) -> tuple[TokenScore, ...]:
    """Return the most probable next tokens of the last prompt, from logits (B, P, V)."""
    place = objective.all_positions.index(objective.positions[-1][0])
    return tuple(model.top_tokens(logits[-1, place].float(), 5))


def _product(difference: Tensor, gradient: Tensor) -> Tensor:
    dtype = torch.promote_types(difference.dtype, torch.float32)
    return difference.to(dtype) * gradient.to(dtype)


# --- multipliers at points between ----------------------------------------------------------------------


def _by_multipliers(request: AttributionRequest, pairs: Sequence[Objective], is_open: bool) -> _Sums:
    """Run a forward pass of each prompt, and one pass at one or several points between them."""
    model = request.model
    sums = _Sums(model, len(pairs), recorded_at(pairs[0], 0, request.record))
    recorded = list(sums.recorded)
    here = _read(request, pairs[0].rows([0]))
    sums.here = replace(here, activation={site: x[:, recorded] for site, x in here.activation.items()})
    for pair in pairs:
        there = _read(request, pair.rows([1]))
        pair = _with_answers(model, pair, here.logits[0], there.logits[0]) if is_open else pair
        one, other = pair.rows([0]), pair.rows([1])
        blocks = _aligned(one, other, here.sinks, there.sinks)
        weights, reads = torch.block_diag(*blocks), there.inputs
        if one.batch.pixels is None:
            reads = [block.to(y) @ y for y, block in zip(reads, blocks, strict=True)]
        aligned = {
            site: torch.einsum("st,ltn->lsn", weights.to(x), x)[:, recorded] for site, x in there.activation.items()
        }
        inputs = list(zip(here.inputs, reads, strict=True))
        difference = {site: sums.here.activation[site] - x for site, x in aligned.items()}
        sums.predictions = sums.predictions or _predictions(model, other, there.logits)
        parts, relevance = _between(request, one, inputs, difference)
        numbers = (one.evaluate(here.logits)[1].item(), other.evaluate(there.logits)[1].item())
        sums.add(pair, parts, relevance, aligned, numbers, weights)
    return sums


def _read(request: AttributionRequest, one: Objective) -> _Here:
    model = request.model
    target, inputs, stream = Logits(_unanswered(one)), Inputs(), Stream(model, one.batch)
    values = Values(model, one.batch, request.sites)
    forward(model, target, [inputs, stream, values])
    activation = {site: values.values(0, x) for site, x in values.activation.items()}
    read = [leaf.detach()[0] for leaf in inputs.leaves]
    return _Here(read, activation, stream.sinks(0), target.logits)


def _aligned(one: Objective, other: Objective, sinks: Sequence[int], other_sinks: Sequence[int]) -> list[Tensor]:
    """Return the alignment (T, T') of each stack."""
    if one.batch.pixels is not None:
        return [torch.eye(len(one.batch.columns(0)))]
    blocks = []
    for (start, end), (there, until) in zip(_stacks(one), _stacks(other), strict=True):
        own = [place - start for place in sinks if start <= place < end]
        theirs = [place - there for place in other_sinks if there <= place < until]
        blocks.append(alignment(one.batch.row_ids(0)[start:end], other.batch.row_ids(0)[there:until], own, theirs))
    return blocks


def _stacks(one: Objective) -> list[tuple[int, int]]:
    """Return the bounds of the tokens of each stack."""
    read, count = one.batch.lengths[0], len(one.batch.columns(0))
    return [(0, read), (read, count)] if one.batch.decoder else [(0, count)]


def _between(
    request: AttributionRequest, one: Objective, reads: Sequence[tuple[Tensor, Tensor]], difference: Sites
) -> tuple[list[Tensor], Sites]:
    """Compute relevance of embeddings and sites (L, P, N) with the mean multiplier at the points of the method.

    reads: the embeddings of each stack in the prompt and, aligned, in the counterfactual.
    difference: activation differences (L, P, N) by site.
    """
    model, method = request.model, request.method
    assert isinstance(method, Multiplying)
    points = method.points()
    many = one.rows([0] * len(points))
    steps = torch.tensor(points, dtype=reads[0][0].dtype, device=reads[0][0].device)
    between = [y + steps.view(-1, *[1] * x.dim()) * (x - y) for x, y in reads]
    inputs = Inputs(lambda stack, x: between[stack])
    columns = [[many.batch.columns(0)[place] for place in recorded_at(one, 0, request.record)]] * len(points)

    def compared(site: str, layer: int, x: Tensor) -> Tensor:
        return difference[site][layer].to(x).expand_as(x)

    neurons = AllNeurons(model, many.batch, difference, columns, compared=compared)
    rules = method.rules if isinstance(method, OnePass) else None
    forward_backward(
        model, Logits(many), [inputs, neurons], rules, strict=request.strict, checkpoint=request.checkpoint
    )
    parts = [_product(x - y, g.mean(0)) for (x, y), g in zip(reads, inputs.gradients, strict=True)]
    return parts, {site: x.mean(0).cpu() for site, x in neurons.relevance.items()}


def alignment(ids: Sequence[int], other: Sequence[int], sinks: Sequence[int], other_sinks: Sequence[int]) -> Tensor:
    """Align two prompts: (T, T') weights of the counterfactual's tokens for each token, with rows that sum to 1.

    Prompts of equal length are aligned token by token. Otherwise, the longest common beginning and end are aligned. A
    token between them gets the mean of the counterfactual's tokens between them, or of the two neighbors if there are
    none. Sinks are aligned with sinks. Raises `InputError` if a token has no partner.
    """
    if len(ids) == len(other):
        return torch.eye(len(ids))
    before = _common(ids, other)
    behind = min(_common(ids[::-1], other[::-1]), len(ids) - before, len(other) - before)
    weights = torch.zeros(len(ids), len(other))
    for place in range(before):
        weights[place, place] = 1
    for place in range(1, behind + 1):
        weights[-place, -place] = 1
    middle = range(before, len(other) - behind)
    next_to = [place for place in (before - 1, len(other) - behind) if 0 <= place < len(other)]
    for place in range(before, len(ids) - behind):
        if place in sinks:
            partners = [at for at in middle if at in other_sinks] or list(other_sinks)
        else:
            partners = [at for at in middle if at not in other_sinks] or [at for at in next_to if at not in other_sinks]
        if not partners:
            raise InputError(
                f"The prompts cannot be aligned at token {place}, because their lengths differ too much ({len(ids)} "
                f"and {len(other)} tokens); give a counterfactual of about {len(ids)} tokens."
            )
        weights[place, partners] = 1 / len(partners)
    return weights


def _common(ids: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common beginning."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(ids, other, strict=False))))
