"""Relevance compared with counterfactual prompts: (activation - activation there) x multiplier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, takewhile
from statistics import fmean

import torch
from torch import Tensor

from icebear.concepts.attribution.prompt import (
    Prediction,
    PromptTokens,
    excluded_positions,
    prompt_relevance,
    recorded_at,
)
from icebear.concepts.attribution.ranking import NeuronScores
from icebear.concepts.attribution.request import AttributionRequest, PromptRequest, joint_objective
from icebear.concepts.attribution.result import Counterfactual, Relevance
from icebear.concepts.lrp.differences import partner
from icebear.concepts.methods.gradients import GradientTimesInput
from icebear.concepts.methods.lrp import DIFFERENCE, Difference
from icebear.concepts.methods.method import Method, Multiplying, OnePass
from icebear.concepts.models import images
from icebear.concepts.models.model import Model
from icebear.concepts.models.objective import Objective
from icebear.concepts.passes.inputs import Inputs
from icebear.concepts.passes.largest import Largest, LargestNeurons
from icebear.concepts.passes.neurons import AllNeurons, Values
from icebear.concepts.passes.run import Conservation, Recorder, forward, forward_backward
from icebear.concepts.passes.stream import Stream
from icebear.concepts.passes.targets import Logits
from icebear.errors import InputError, MissingRule, NumericalError

BY_DEFAULT: Method = DIFFERENCE
"""It adds up, ranks as well as the best on four tasks, and better on five others (docs/results.md#ablation)."""
WITHOUT_PARTNERS: Method = GradientTimesInput(at="midpoint")
"""For prompts of different lengths."""
NODES = 100
"""Of each counterfactual, whose overlap is reported."""


def paired_relevance(request: AttributionRequest, row: PromptRequest) -> Relevance:
    """A prompt compared with its counterfactuals."""
    pairs = _pairs(request.model, row)
    method, note = _with_default(request.method, pairs)
    exact_largest = isinstance(method, Difference) and len(pairs) == 1  # of a mean all are wanted first
    single = replace(request if exact_largest else request.whole(), method=method)
    compute = _by_difference_rules if isinstance(method, Difference) else _by_multipliers
    try:
        sums = compute(single, pairs)
    except MissingRule as error:
        if request.method is not None:
            raise
        raise MissingRule(f"{error} Plain gradients need no rules and do not add up: method gxi.") from None
    own = row.phrase is None and row.contrast is None
    relevance = sums.relevance(method, own, note)
    return relevance if exact_largest else request.reduced(relevance)


def _with_default(method: Method | None, pairs: Sequence[Objective]) -> tuple[Method, str]:
    """The method, and why it is not the default one."""
    equal = all(len(set(pair.batch.lengths)) == 1 for pair in pairs)
    if method is None and not equal:
        return WITHOUT_PARTNERS, "the prompts differ in length, so that tokens have no partners for difference rules"
    method = method or BY_DEFAULT
    if isinstance(method, Difference) and not equal:
        lengths = " and ".join(str(length) for length in dict.fromkeys(n for pair in pairs for n in pair.batch.lengths))
        raise InputError(
            f"Difference rules want prompts of equal length, but these have {lengths} tokens; give such ones, or "
            "another method, as attnlrp."
        )
    return method, ""


def _pairs(model: Model, row: PromptRequest) -> list[Objective]:
    """Two rows, the prompt and its counterfactual, for each of them."""
    prompt, others = row.prompt, row.counterfactuals
    if any((one.image is None) is not (prompt.image is None) for one in others):
        raise InputError("Compare a text with texts, and an image with images.")
    if model.task.labels_tokens and row.position is None:  # of both prompts the same token
        row = replace(row, position=joint_objective(model, [row]).positions[0][0])
    pairs = []
    for other in others:
        pair = joint_objective(model, [row, replace(row, prompt=other)])
        if pair.batch.row_ids(0) == pair.batch.row_ids(1) and pair.batch.pixels is None:
            raise InputError("The counterfactual is the prompt itself, so there is nothing to compare; give another.")
        is_open = row.phrase is None and (row.target is None or row.contrast is None)
        pairs.append(_with_answers(model, pair) if is_open else pair)
    return pairs


def _with_answers(model: Model, pair: Objective) -> Objective:
    """With the prompt's own answer as the target and the other prompt's as the contrast, where they are open."""
    with model.lock, torch.no_grad():
        logits = model.logits(pair.batch, pair.all_positions)
    (here, there), _ = replace(pair, targets=(None, None), contrasts=(None, None)).evaluate(logits)
    target, contrast = pair.targets[0] or here, pair.contrasts[0]
    contrast = there[0] if contrast is None else contrast
    if contrast in target:
        raise InputError(
            f"Both prompts are answered by {model.answer_text(contrast)!r}, so there is nothing to compare; name a "
            "contrast or give another prompt."
        )
    return replace(pair, targets=(target, target), contrasts=(contrast, contrast))


# --- means over the counterfactuals ---------------------------------------------------------------------


@dataclass(frozen=True)
class _Here:
    """A prompt: what each stack reads (T, D), its sites' activations (L, P, N), sinks and logits (1, P, V)."""

    inputs: list[Tensor]
    activation: dict[str, Tensor]
    sinks: tuple[int, ...]
    logits: Tensor


class _Sums:
    """Means over the counterfactuals, in the order given."""

    def __init__(self, model: Model, pairs: Sequence[Objective], recorded: tuple[int, ...]) -> None:
        self.model, self.pairs, self.recorded = model, pairs, recorded
        self.here: _Here
        self.parts: list[Tensor] = []
        self.sites: dict[str, Tensor] = {}
        self.there: dict[str, Tensor] = {}
        self.tops: list[set[int]] = []
        self.numbers: list[tuple[float, float]] = []
        self.alignments: list[Tensor] = []
        self.largest: Largest | None = None

    def add(
        self,
        parts: list[Tensor],
        sites: dict[str, Tensor],
        there: dict[str, Tensor],
        numbers: tuple[float, float],
        shares: Tensor,
    ) -> None:
        """Of one counterfactual: relevance of what each stack reads and of the sites, what stands for their
        activations, the number explained here and there, and the alignment."""
        count = len(self.pairs)
        self.numbers.append(numbers)
        self.alignments.append(shares)
        scaled = [x / count for x in parts]
        self.parts = [a + x for a, x in zip(self.parts, scaled, strict=True)] if self.parts else scaled
        for means, values in ((self.sites, sites), (self.there, there)):
            for site, x in values.items():
                means[site] = means[site].add_(x, alpha=1 / count) if site in means else x / count
        if count > 1:
            self.tops.append(_largest(sites))

    def relevance(self, method: Method, own_answers: bool, note: str) -> Relevance:
        """own_answers: whether the contrasts are the counterfactuals' own answers."""
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
            ),
        )


def _largest(sites: dict[str, Tensor]) -> set[int]:
    """The `NODES` largest by size, as places among those of all sites."""
    values = torch.cat([x.flatten() for x in sites.values()]).abs_() if sites else torch.zeros(0)
    return set(values.topk(min(NODES, len(values))).indices.tolist())


# --- difference rules -----------------------------------------------------------------------------------


def _by_difference_rules(request: AttributionRequest, pairs: Sequence[Objective]) -> _Sums:
    """Both prompts of a pair go through the model as partners: one pass of two rows."""
    model, sites, method = request.model, request.sites, request.method
    assert isinstance(method, Difference)
    sums = _Sums(model, pairs, recorded_at(pairs[0], 0, request.record))
    for pair in pairs:
        batch, columns = pair.batch, None
        if request.record != "all":
            columns = [[batch.columns(row)[place] for place in sums.recorded] for row in (0, 1)]
        target, inputs, stream = Logits(pair), Inputs(), Stream(model, batch)
        values = Values(model, batch, sites, columns)
        neurons = AllNeurons(model, batch, sites, columns, compared=lambda site, layer, x: x - partner(x))
        recorders: list[Recorder] = [inputs, stream, values, neurons]
        largest: LargestNeurons | None = None
        if request.k is not None:
            largest = LargestNeurons(
                model, batch, sites, request.k, partial(excluded_positions, model, batch, stream), partner
            )
            recorders.append(largest)
        numbers, _ = forward_backward(
            model, target, recorders, method, strict=request.strict, checkpoint=request.checkpoint
        )
        sums.largest = largest.row(0) if largest else None
        parts = [_product(x - partner(x), g)[0] for x, g in zip(inputs.values, inputs.gradients, strict=True)]
        here, there = ({site: values.values(row, x) for site, x in values.activation.items()} for row in (0, 1))
        if not sums.numbers:
            places = [pair.all_positions.index(place) for place in pair.positions[0]]
            sums.here = _Here([], here, stream.sinks(0), target.logits[:1, places])
        shares = torch.eye(len(batch.columns(0)))
        sums.add(parts, neurons.row(0)[0], there, (numbers[0].item(), numbers[1].item()), shares)
    return sums


def _product(difference: Tensor, gradient: Tensor) -> Tensor:
    dtype = torch.promote_types(difference.dtype, torch.float32)
    return difference.to(dtype) * gradient.to(dtype)


# --- multipliers at points between ----------------------------------------------------------------------


def _by_multipliers(request: AttributionRequest, pairs: Sequence[Objective]) -> _Sums:
    """A forward pass of each prompt, and a pass at one or several points between them."""
    model = request.model
    sums = _Sums(model, pairs, recorded_at(pairs[0], 0, request.record))
    recorded = list(sums.recorded)
    here = _read(request, pairs[0].rows([0]))
    sums.here = replace(here, activation={site: x[:, recorded] for site, x in here.activation.items()})
    for pair in pairs:
        one, other = pair.rows([0]), pair.rows([1])
        there = _read(request, other)
        blocks = _aligned(one, other, here.sinks, there.sinks)
        shares, reads = torch.block_diag(*blocks), there.inputs
        if one.batch.pixels is None:
            reads = [share.to(y) @ y for y, share in zip(reads, blocks, strict=True)]
        stands = {
            site: torch.einsum("st,ltn->lsn", shares.to(x), x)[:, recorded] for site, x in there.activation.items()
        }
        inputs = list(zip(here.inputs, reads, strict=True))
        difference = {site: sums.here.activation[site] - x for site, x in stands.items()}
        parts, relevance = _between(request, one, inputs, difference)
        numbers = (one.evaluate(here.logits)[1].item(), other.evaluate(there.logits)[1].item())
        sums.add(parts, relevance, stands, numbers, shares)
    return sums


def _read(request: AttributionRequest, one: Objective) -> _Here:
    model = request.model
    target, inputs, stream = Logits(one), Inputs(), Stream(model, one.batch)
    values = Values(model, one.batch, request.sites)
    forward(model, target, [inputs, stream, values])
    activation = {site: values.values(0, x) for site, x in values.activation.items()}
    return _Here([leaf.detach()[0] for leaf in inputs.leaves], activation, stream.sinks(0), target.logits)


def _aligned(one: Objective, other: Objective, sinks: Sequence[int], other_sinks: Sequence[int]) -> list[Tensor]:
    """(T, T') for each stack: the shares of the other prompt's tokens that stand for each token."""
    if one.batch.pixels is not None:
        return [torch.eye(len(one.batch.columns(0)))]
    blocks = []
    for (start, end), (there, until) in zip(_stacks(one), _stacks(other), strict=True):
        own = [place - start for place in sinks if start <= place < end]
        theirs = [place - there for place in other_sinks if there <= place < until]
        blocks.append(alignment(one.batch.row_ids(0)[start:end], other.batch.row_ids(0)[there:until], own, theirs))
    return blocks


def _stacks(one: Objective) -> list[tuple[int, int]]:
    """The positions where the tokens of each stack begin and end."""
    read, count = one.batch.lengths[0], len(one.batch.columns(0))
    return [(0, read), (read, count)] if one.batch.decoder else [(0, count)]


def _between(
    request: AttributionRequest, one: Objective, reads: Sequence[tuple[Tensor, Tensor]], difference: dict[str, Tensor]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Relevance of what each stack reads and of the sites (L, P, N), with the mean multiplier of the method's points.

    reads: of each stack what it reads here and there; difference: of the sites' activations, (L, P, N).
    """
    model, method = request.model, request.method
    assert isinstance(method, Multiplying)
    points = method.points()
    many = one.rows([0] * len(points))
    way = torch.tensor(points, dtype=reads[0][0].dtype, device=reads[0][0].device)
    moved = [y + way.view(-1, *[1] * x.dim()) * (x - y) for x, y in reads]
    inputs = Inputs(lambda stack, x: moved[stack])
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
    """(T, T') shares, 1 in each row: what of the other prompt stands for a token of this one.

    Prompts of equal length are partners token by token. Else the longest common beginning and end are; a token between
    them has the mean of what the other prompt has there, or where that is nothing, of the two partners next to it.
    Sinks only stand for sinks. Raises `InputError` where nothing can stand for a token.
    """
    if len(ids) == len(other):
        return torch.eye(len(ids))
    before = _common(ids, other)
    behind = min(_common(ids[::-1], other[::-1]), len(ids) - before, len(other) - before)
    shares = torch.zeros(len(ids), len(other))
    for place in range(before):
        shares[place, place] = 1
    for place in range(1, behind + 1):
        shares[-place, -place] = 1
    middle = range(before, len(other) - behind)
    next_to = [place for place in (before - 1, len(other) - behind) if 0 <= place < len(other)]
    for place in range(before, len(ids) - behind):
        if place in sinks:
            partners = [at for at in middle if at in other_sinks] or list(other_sinks)
        else:
            partners = [at for at in middle if at not in other_sinks] or [at for at in next_to if at not in other_sinks]
        if not partners:
            raise InputError(
                f"Prompts cannot be aligned at token {place}; lengths differ too much ({len(ids)} and {len(other)} "
                f"tokens). Give a counterfactual of about {len(ids)} tokens."
            )
        shares[place, partners] = 1 / len(partners)
    return shares


def _common(ids: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens are the same from the beginning on."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(ids, other, strict=False))))
