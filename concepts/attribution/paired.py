"""Relevance compared with other prompts: (activation - activation there) x coefficient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor

from icebear.concepts.attribution.alignment import alignment
from icebear.concepts.attribution.recorded import Recorded, kept_at, said, token_relevance, unranked
from icebear.concepts.attribution.result import Conservation, Counterfactual, Largest, Relevance
from icebear.concepts.lrp.differences import partner
from icebear.concepts.methods.gradients import GradientTimesInput
from icebear.concepts.methods.lrp import DIFFERENCE, AttnLRP, Difference
from icebear.concepts.methods.method import Method, Multiplying
from icebear.concepts.models import images
from icebear.concepts.models.model import Model
from icebear.concepts.models.plan import Number, Plan, plan
from icebear.concepts.models.prompts import Prompt
from icebear.concepts.passes.inputs import Inputs
from icebear.concepts.passes.largest import LargestNeurons
from icebear.concepts.passes.neurons import AllNeurons, Values
from icebear.concepts.passes.run import Recorder, look, run
from icebear.concepts.passes.stream import Stream
from icebear.concepts.passes.targets import Logits
from icebear.errors import InputError, MissingRule, NumericalError

BY_DEFAULT: Method = DIFFERENCE
"""It adds up, ranks as well as the best on four tasks, and better on five others (docs/results.md#ablation)."""
WITHOUT_PARTNERS: Method = GradientTimesInput(at="midpoint")
"""For prompts of different lengths."""
NODES = 100
"""Of each other prompt, whose overlap is told."""


def compared(
    model: Model,
    prompt: Prompt,
    others: Sequence[Prompt],
    asked: dict[str, Any],
    number: Number,
    method: Method | None,
    sites: Sequence[str],
    record: Recorded,
    k: int | None,
    checkpoint: bool | None,
    strict: bool,
) -> Relevance:
    """`attribute` with `counterfactual`, of one prompt; asked: its target, contrast, target_text, prefix and label's
    place."""
    pairs, own = _pairs(model, prompt, others, asked, number)
    equal = all(len(set(pair.batch.lengths)) == 1 for pair in pairs)
    lengths = " and ".join(str(length) for length in dict.fromkeys(n for pair in pairs for n in pair.batch.lengths))
    way, note = _with_default(method, equal, lengths)
    try:
        return _found(model, pairs, own, sites, record, k, checkpoint, strict, way, note)
    except MissingRule as error:
        if method is not None:
            raise
        raise MissingRule(f"{error} Plain gradients need no rules and do not add up: method gxi.") from None


def _found(
    model: Model,
    pairs: Sequence[Plan],
    own: bool,
    sites: Sequence[str],
    record: Recorded,
    k: int | None,
    checkpoint: bool | None,
    strict: bool,
    method: Method,
    note: str,
) -> Relevance:
    late = k is not None and not (isinstance(method, Difference) and len(pairs) == 1)  # of a mean all are wanted first
    wanted, record = kept_at(pairs[0], 0, record), "all" if late else record
    if isinstance(method, Difference):
        sums = _by_difference_rules(model, pairs, method, sites, record, None if late else k, checkpoint, strict)
    else:
        assert isinstance(method, Multiplying)
        sums = _by_coefficients(model, pairs, method, sites, record, checkpoint, strict)
    found = sums.relevance(model, method, own, note)
    return found.only(k, wanted) if late and k else found


def _with_default(method: Method | None, equal: bool, lengths: str) -> tuple[Method, str]:
    """The method, and what is to be said of it."""
    if method is None and not equal:
        note = "the prompts differ in length, so that tokens have no partners for difference rules"
        return WITHOUT_PARTNERS, note
    method = method or BY_DEFAULT
    if isinstance(method, Difference) and not equal:
        raise InputError(
            f"Difference rules want prompts of equal length, but these have {lengths} tokens; give such ones, or "
            "another method, as attnlrp."
        )
    return method, ""


def _pairs(
    model: Model, prompt: Prompt, others: Sequence[Prompt], asked: dict[str, Any], number: Number
) -> tuple[list[Plan], bool]:
    """A plan of two rows, the prompt and an other one, for each; and whether the contrasts are their own answers."""
    if any((one.image is None) is not (prompt.image is None) for one in others) or not others:
        raise InputError("Compare a text with texts, and an image with images; give at least one.")
    if model.task.labels_tokens and asked["at"] is None:  # of both prompts the same token
        asked = {**asked, "at": plan(model, [prompt], **asked, number=number).positions[0][0]}
    found = []
    open_ = asked["target_text"] is None and (asked["target"] is None or asked["contrast"] is None)
    for other in others:
        pair = plan(model, [prompt, other], **{name: [value] * 2 for name, value in asked.items()}, number=number)
        if pair.batch.row_ids(0) == pair.batch.row_ids(1) and pair.batch.pixels is None:
            raise InputError("The other prompt is the prompt itself, so there is nothing to compare; give another one.")
        found.append(_with_answers(model, pair) if open_ else pair)
    return found, open_ and asked["contrast"] is None


def _with_answers(model: Model, pair: Plan) -> Plan:
    """With the prompt's own answer as the target and the other prompt's as the contrast, where they are open."""
    with model.lock, torch.no_grad():
        logits = model.logits(pair.batch, pair.needed)
    (here, there), _ = replace(pair, targets=(None, None), contrasts=(None, None)).explained(logits)
    target, contrast = pair.targets[0] or here, pair.contrasts[0]
    contrast = there[0] if contrast is None else contrast
    if contrast in target:
        raise InputError(
            f"Both prompts are answered by {model.answer_text(contrast)!r}, so there is nothing to compare; name a "
            "contrast or give another prompt."
        )
    return replace(pair, targets=(target, target), contrasts=(contrast, contrast))


# --- what was found -------------------------------------------------------------------------------------


class _Sums:
    """Means over the other prompts, in the order given."""

    def __init__(self, pairs: Sequence[Plan], record: Recorded) -> None:
        self.pairs = pairs
        self.columns = pairs[0].batch.columns(0)
        self.recorded = kept_at(pairs[0], 0, record)
        self.parts: list[Tensor] = []
        self.sites: dict[str, Tensor] = {}
        self.there: dict[str, Tensor] = {}
        self.tops: list[set[int]] = []
        self.numbers: list[tuple[float, float]] = []
        self.shares: list[Tensor] = []
        self.largest: Largest | None = None

    def begin(self, logits: Tensor, sinks: tuple[int, ...], own: dict[str, Tensor]) -> None:
        """Of the prompt itself: logits (1, P, V), sinks, and the sites' activations (L, P, N)."""
        self.logits, self.sinks, self.own = logits, sinks, own

    def add(
        self,
        parts: list[Tensor],
        sites: dict[str, Tensor],
        there: dict[str, Tensor],
        numbers: tuple[float, float],
        shares: Tensor,
    ) -> None:
        """Of one other prompt: relevance of what each stack reads and of the sites, what stands for their activations,
        the number explained here and there, and the alignment."""
        count = len(self.pairs)
        self.numbers.append(numbers)
        self.shares.append(shares)
        self.parts = (
            [x / count for x in parts]
            if not self.parts
            else [a + x / count for a, x in zip(self.parts, parts, strict=True)]
        )
        for name, kept in ((self.sites, sites), (self.there, there)):
            for site, x in kept.items():
                name[site] = name[site].add_(x, alpha=1 / count) if site in name else x / count
        if count > 1:
            self.tops.append(_largest(sites))

    def relevance(self, model: Model, method: Method, own: bool, note: str) -> Relevance:
        first = self.pairs[0].repeated(0, 1)
        tokens, image = token_relevance(model, first, 0, self.parts)
        if not torch.isfinite(tokens).all():
            raise NumericalError("The relevance of the tokens is NaN or infinite; try --dtype float32.")
        contrasts = tuple(model.answer_text(pair.contrasts[0]) for pair in self.pairs if pair.contrasts[0] is not None)
        difference = sum(here - there for here, there in self.numbers) / len(self.numbers)
        one = replace(first, contrasts=(first.contrasts[0] if len(set(contrasts)) == 1 else None,))
        targets = first.targets[0]
        assert targets is not None
        strings = images.names(model) if image else model.pieces(first.batch.row_ids(0))
        return Relevance(
            **said(model, one, 0, targets, self.logits, method, strings),
            tokens=tokens,
            sites={site: (self.sites[site], self.own[site]) for site in self.sites},
            recorded=self.recorded,
            sinks=self.sinks,
            largest=self.largest,
            conserved=Conservation(difference, tokens.sum().item(), 0.0, 0.0, 0.0),
            image=image,
            counterfactual=Counterfactual(
                prompts=tuple(model.pieces(pair.batch.row_ids(1)) for pair in self.pairs),
                pairs=tuple(self.pairs),
                shares=tuple(self.shares),
                contrasts=contrasts,
                own=own,
                activation=self.there,
                at=method.at or "both",
                numbers=tuple(there for _, there in self.numbers),
                overlap=_overlap(self.tops),
                note=note,
            ),
        )


def _largest(sites: dict[str, Tensor]) -> set[int]:
    """The `NODES` largest by size, as places among those of all sites."""
    values = torch.cat([x.flatten() for x in sites.values()]).abs_().neg_().numpy() if sites else numpy.zeros(0)
    return set(numpy.argpartition(values, min(NODES, len(values)) - 1)[:NODES].tolist()) if len(values) else set()


def _overlap(tops: Sequence[set[int]]) -> float | None:
    shared = [len(a & b) / max(len(a), 1) for i, a in enumerate(tops) for b in tops[:i]]
    return sum(shared) / len(shared) if shared else None


# --- difference rules -----------------------------------------------------------------------------------


def _by_difference_rules(
    model: Model,
    pairs: Sequence[Plan],
    method: Difference,
    sites: Sequence[str],
    record: Recorded,
    k: int | None,
    checkpoint: bool | None,
    strict: bool,
) -> _Sums:
    """Both prompts of a pair go through the model as partners: one pass of two rows."""
    sums = _Sums(pairs, record)
    for pair in pairs:
        columns = None if record == "all" else [[pair.batch.columns(row)[at] for at in sums.recorded] for row in (0, 1)]
        target, inputs, stream = Logits(pair), Inputs(), Stream(model, pair.batch)
        values = Values(model, pair.batch, sites, columns)
        neurons = AllNeurons(model, pair.batch, sites, columns, compared=lambda site, layer, x: x - partner(x))
        recorders: list[Recorder] = [inputs, stream, values, neurons]
        if k is not None:
            apart = partial(unranked, model, pair.batch, stream)
            largest = LargestNeurons(model, pair.batch, sites, k, apart, partner)
            recorders.append(largest)
        numbers, _ = run(model, target, recorders, method, strict=strict, checkpoint=checkpoint)
        sums.largest = None if k is None else largest.row(0)
        parts = [_product(x - partner(x), g)[0] for x, g in zip(inputs.values, inputs.gradients, strict=True)]
        relevance = {site: found for site, (found, _) in neurons.row(0).items()}
        there = {site: values.values(1, x) for site, x in values.activation.items()}
        if not sums.numbers:
            own = {site: values.values(0, x) for site, x in values.activation.items()}
            here = [pair.needed.index(place) for place in pair.positions[0]]
            sums.begin(target.logits[:1, here], stream.sinks(0), own)
        sums.add(parts, relevance, there, (numbers[0].item(), numbers[1].item()), torch.eye(len(sums.columns)))
    return sums


def _product(difference: Tensor, gradient: Tensor) -> Tensor:
    dtype = torch.promote_types(difference.dtype, torch.float32)
    return difference.to(dtype) * gradient.to(dtype)


# --- coefficients at a place between --------------------------------------------------------------------


@dataclass(frozen=True)
class _Seen:
    """Of one prompt: what each stack reads (T, D), its sites' activations (L, T, N), sinks and logits (1, P, V)."""

    inputs: list[Tensor]
    sites: dict[str, Tensor]
    sinks: tuple[int, ...]
    logits: Tensor


def _seen(model: Model, one: Plan, sites: Sequence[str]) -> _Seen:
    target, inputs, stream = Logits(one), Inputs(), Stream(model, one.batch)
    values = Values(model, one.batch, sites)
    look(model, target, [inputs, stream, values])
    kept = {site: values.values(0, x) for site, x in values.activation.items()}
    return _Seen([leaf.detach()[0] for leaf in inputs.leaves], kept, stream.sinks(0), target.logits)


def _by_coefficients(
    model: Model,
    pairs: Sequence[Plan],
    method: Multiplying,
    sites: Sequence[str],
    record: Recorded,
    checkpoint: bool | None,
    strict: bool,
) -> _Sums:
    """A look at each prompt, and a pass at one or several places between them."""
    sums, kept = _Sums(pairs, record), list(kept_at(pairs[0], 0, record))
    here = _seen(model, pairs[0].repeated(0, 1), sites)
    sums.begin(here.logits, here.sinks, {site: x[:, kept] for site, x in here.sites.items()})
    for pair in pairs:
        one, other = pair.repeated(0, 1), pair.repeated(1, 1)
        there = _seen(model, other, sites)
        shares = _aligned(one, other, here.sinks, there.sinks)
        reads = [
            y if one.batch.pixels is not None else share.to(y) @ y
            for y, share in zip(there.inputs, _by_stack(one, other, shares), strict=True)
        ]
        stands = {site: torch.einsum("st,ltn->lsn", shares.to(x), x)[:, kept] for site, x in there.sites.items()}
        difference = {site: here.sites[site][:, kept] - x for site, x in stands.items()}
        parts, relevance = _at_places(model, one, method, here.inputs, reads, difference, kept, checkpoint, strict)
        numbers = (one.explained(here.logits)[1].item(), other.explained(there.logits)[1].item())
        sums.add(parts, relevance, stands, numbers, shares)
    return sums


def _aligned(one: Plan, other: Plan, sinks: Sequence[int], other_sinks: Sequence[int]) -> Tensor:
    """(T, T') what stands for each token, the encoder's for the encoder's and the decoder's for the decoder's."""
    if one.batch.pixels is not None:
        return torch.eye(len(one.batch.columns(0)))
    blocks = []
    for (start, end), (there, until) in zip(_stacks(one), _stacks(other), strict=True):
        own = [place - start for place in sinks if start <= place < end]
        theirs = [place - there for place in other_sinks if there <= place < until]
        blocks.append(alignment(one.batch.row_ids(0)[start:end], other.batch.row_ids(0)[there:until], own, theirs))
    return torch.block_diag(*blocks)


def _stacks(one: Plan) -> list[tuple[int, int]]:
    """Where the tokens of each stack begin and end."""
    read, count = one.batch.lengths[0], len(one.batch.columns(0))
    return [(0, read), (read, count)] if one.batch.decoder else [(0, count)]


def _by_stack(one: Plan, other: Plan, shares: Tensor) -> list[Tensor]:
    return [
        shares[start:end, there:until]
        for (start, end), (there, until) in zip(_stacks(one), _stacks(other), strict=True)
    ]


def _at_places(
    model: Model,
    one: Plan,
    method: Multiplying,
    own: Sequence[Tensor],
    there: Sequence[Tensor],
    difference: dict[str, Tensor],
    kept: Sequence[int],
    checkpoint: bool | None,
    strict: bool,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Relevance of what each stack reads and of the sites (L, P, N), with the mean multiplier of its points."""
    places = method.shares()
    many = one.repeated(0, len(places))
    way = torch.tensor(places, dtype=own[0].dtype, device=own[0].device)
    moved = [y + way.view(-1, *[1] * x.dim()) * (x - y) for x, y in zip(own, there, strict=True)]
    inputs = Inputs(lambda stack, x: moved[stack])
    columns = [[many.batch.columns(0)[at] for at in kept]] * len(places)

    def compared(site: str, layer: int, x: Tensor) -> Tensor:
        return difference[site][layer].to(x).expand_as(x)

    neurons = AllNeurons(model, many.batch, difference, columns, compared=compared)
    rules = method if isinstance(method, AttnLRP) else None
    run(model, Logits(many), [inputs, neurons], rules, strict=strict, checkpoint=checkpoint)
    parts = [_product(x - y, g.mean(0)) for x, y, g in zip(own, there, inputs.gradients, strict=True)]
    return parts, {site: x.mean(0).cpu() for site, x in neurons.relevance.items()}
