"""`Multiplying.compare`: a pass of each prompt, and passes at points between them, whose mean gradient multiplies the
difference of aligned activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from icebear.concepts.methods.pair import Pair, PairResult, predictions
from icebear.concepts.passes.inputs import Inputs, Stream, product
from icebear.concepts.passes.neuron_recorders import AllNeurons, Values
from icebear.concepts.passes.run import Logits, forward, forward_backward
from icebear.concepts.passes.storage import SiteValues
from icebear.errors import InputError
from icebear.lrp.linear_rules import Rules
from icebear.models.objective import Objective
from icebear.values import common_length


@dataclass(frozen=True)
class _Reading:
    """A forward pass of one prompt: embeddings of each stack (T, D), activations (L, T, N), sinks, logits (1, P, V)."""

    inputs: list[Tensor]
    activation: dict[str, Tensor]
    sinks: tuple[int, ...]
    logits: Tensor


def by_multipliers(points: Sequence[float], rules: Rules | None, pair: Pair) -> PairResult:
    """Return what `Method.compare` does.

    points: between 0 (the counterfactual) and 1 (the prompt). rules: None for the plain gradient.
    """
    model, recorded = pair.model, list(pair.recorded)
    x, c = (_read(pair, pair.objective.rows([row])) for row in (0, 1))
    objective = pair.answered(x.logits[0], c.logits[0])
    prompt, other = objective.rows([0]), objective.rows([1])
    blocks = _aligned(prompt, other, x.sinks, c.sinks)
    weights, reads = torch.block_diag(*blocks), c.inputs
    if prompt.batch.pixels is None:  # pixels of images in prompts come after the embeddings, and have their places
        reads = [*(block.to(y) @ y for y, block in zip(reads, blocks, strict=False)), *reads[len(blocks) :]]
    aligned = {site: torch.einsum("st,ltn->lsn", weights.to(y), y)[:, recorded] for site, y in c.activation.items()}
    activation = {site: y[:, recorded] for site, y in x.activation.items()}
    difference = {site: activation[site] - y for site, y in aligned.items()}
    tokens, relevance = _between(pair, prompt, points, rules, list(zip(x.inputs, reads, strict=True)), difference)
    return PairResult(
        objective=objective,
        numbers=(prompt.evaluate(x.logits)[1].item(), other.evaluate(c.logits)[1].item()),
        tokens=tuple(tokens),
        relevance=SiteValues(relevance),
        activation=SiteValues(activation),
        counterfactual=SiteValues(aligned),
        alignment=weights,
        sinks=x.sinks,
        logits=x.logits,
        predictions=predictions(model, other, c.logits),
    )


def _read(pair: Pair, objective: Objective) -> _Reading:
    model = pair.model
    target, inputs, stream = Logits(objective.with_answers(None, None)), Inputs(), Stream(model, objective.batch)
    values = Values(model, objective.batch, pair.sites)
    forward(model, target, [inputs, stream, values])
    activation = {site: x.cpu() for site, x in values.activations(0).items()}
    leaves = objective.batch.of_row(0, [leaf.detach() for leaf in inputs.leaves])
    return _Reading(leaves, activation, stream.sinks(0), target.logits)


def _between(
    pair: Pair,
    prompt: Objective,
    points: Sequence[float],
    rules: Rules | None,
    reads: Sequence[tuple[Tensor, Tensor]],
    difference: dict[str, Tensor],
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Compute relevance of embeddings and sites (L, P, N) with the mean multiplier at some points.

    reads: the embeddings of each stack in the prompt and, aligned, in the counterfactual.
    difference: activation differences (L, P, N) by site.
    """
    model, many = pair.model, prompt.rows([0] * len(points))
    steps = torch.tensor(points, dtype=reads[0][0].dtype, device=reads[0][0].device)
    between = [y + steps.view(-1, *[1] * x.dim()) * (x - y) for x, y in reads]
    inputs = Inputs(lambda stack, x: between[stack].reshape(x.shape))  # all pixels of images in prompts in a row
    columns = [[many.batch.columns(0)[position] for position in pair.recorded]] * len(points)

    def difference_of(site: str, layer: int, x: Tensor) -> Tensor:
        return difference[site][layer].to(x).expand_as(x)

    neurons = AllNeurons(model, many.batch, difference, columns, difference_of=difference_of)
    forward_backward(model, Logits(many), [inputs, neurons], rules, strict=pair.strict, checkpoint=pair.checkpoint)
    means = [g.reshape(len(points), *x.shape).mean(0) for (x, _), g in zip(reads, inputs.gradients, strict=True)]
    tokens = [product(x - y, mean) for (x, y), mean in zip(reads, means, strict=True)]
    return tokens, {site: x.mean(0).cpu() for site, x in neurons.relevance.items()}


def _aligned(prompt: Objective, other: Objective, sinks: Sequence[int], other_sinks: Sequence[int]) -> list[Tensor]:
    """Return the alignment (T, T') of each stack."""
    if prompt.batch.pixels is not None:
        return [torch.eye(len(prompt.batch.columns(0)))]
    blocks = []
    for (start, end), (begin, until) in zip(_stacks(prompt), _stacks(other), strict=True):
        ids, other_ids = prompt.batch.row_ids(0)[start:end], other.batch.row_ids(0)[begin:until]
        inside = [sink - start for sink in sinks if start <= sink < end]
        blocks.append(
            alignment(ids, other_ids, inside, [sink - begin for sink in other_sinks if begin <= sink < until])
        )
    return blocks


def _stacks(objective: Objective) -> list[tuple[int, int]]:
    """Return the bounds of the tokens of each stack."""
    read, count = objective.batch.lengths[0], len(objective.batch.columns(0))
    return [(0, read), (read, count)] if objective.batch.decoder else [(0, count)]


def alignment(ids: Sequence[int], other: Sequence[int], sinks: Sequence[int], other_sinks: Sequence[int]) -> Tensor:
    """Align two prompts: (T, T') weights of the counterfactual's tokens for each token, with rows that sum to 1.

    Prompts of equal length are aligned token by token. Otherwise, the longest common beginning and end are aligned. A
    token between them gets the mean of the counterfactual's tokens between them, or of the two neighbors if there are
    none. Sinks are aligned with sinks. Raises `InputError` if a token has no partner.
    """
    if len(ids) == len(other):
        return torch.eye(len(ids))
    before = common_length(ids, other)
    behind = min(common_length(ids[::-1], other[::-1]), len(ids) - before, len(other) - before)
    weights = torch.zeros(len(ids), len(other))
    for token in range(before):
        weights[token, token] = 1
    for token in range(1, behind + 1):
        weights[-token, -token] = 1
    middle = range(before, len(other) - behind)
    next_to = [at for at in (before - 1, len(other) - behind) if 0 <= at < len(other)]
    for token in range(before, len(ids) - behind):
        if token in sinks:
            partners = [at for at in middle if at in other_sinks] or list(other_sinks)
        else:
            partners = [at for at in middle if at not in other_sinks] or [at for at in next_to if at not in other_sinks]
        if not partners:
            raise InputError(
                f"The prompts cannot be aligned at token {token}, because their lengths differ too much ({len(ids)} "
                f"and {len(other)} tokens); give a counterfactual of about {len(ids)} tokens."
            )
        weights[token, partners] = 1 / len(partners)
    return weights
