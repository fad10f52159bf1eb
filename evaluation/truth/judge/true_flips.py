"""Whether `flip` finds flips, and how small they are, on models whose mechanism is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, islice
from random import Random
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from icebear.concepts.vocabulary.calibration import calibrate
from icebear.errors import InputError
from icebear.evaluation.protocol import Lines
from icebear.evaluation.truth.judge.judged_pairs import pairs_of
from icebear.evaluation.truth.judge.truth_tables import means
from icebear.evaluation.truth.programs.compiler import Compiled
from icebear.evaluation.truth.programs.program import PROGRAM, Program
from icebear.evaluation.uses.flips import NEURONS, SEARCHES
from icebear.steering.flipping.flip import CANDIDATES, LEVELS, MARGIN, FlipRequest, flip_by
from icebear.steering.flipping.last_token import Edits, LastToken, values_by_step
from icebear.steering.provenance import FlipRecord

PAIRS = 10
"""Pairs of each model."""
BEST = 30
"""Neurons that are tried in pairs."""
MAX_NEURONS = 10
FACTS = ("edits", "smallest", "passes", "on program", "random on program")
"""Of a flip: its edits, those of the smallest flip known, the edited passes of the search, and the share of edits that
are of the program's neurons, and of random edits."""
CHANCES = ("chance 0", "chance 1", "chance 2")
METRICS = {
    "flipped": "share of the pairs that flip, higher is better",
    "fewest": "share that flip with as few edits as the smallest flip that is known, higher is better",
}


def can_flip(program: Program) -> bool:
    """Return whether there is an answer at the last token, where `flip` edits; a causal prompt can end anywhere."""
    return program.causal or program.answers(program.sample(Random(0)))[-1] is not None


@dataclass(frozen=True, eq=False)
class Ask:
    """A prompt, a source prompt of equal length, and the wanted answer: the one of the source prompt."""

    compiled: Compiled
    prompt: tuple[int, ...]
    source: tuple[int, ...]
    wanted: int

    @cached_property
    def last(self) -> LastToken:
        return LastToken(self.compiled.model, self.prompt)

    @cached_property
    def now(self) -> Tensor:
        """(L, F)"""
        return self.last.activations()[..., 0]

    @cached_property
    def values(self) -> Tensor:
        """(6, L, F) values that a neuron may be set to: the one in the source prompt, zero, both ends of its activation
        range, and half way to them."""
        seen = calibrate(self.compiled.model)
        ends = torch.minimum(seen.low, self.now), torch.maximum(seen.high, self.now)
        source = LastToken(self.compiled.model, self.source).activations()[..., 0]
        return torch.stack([source, torch.zeros_like(source), *ends, *((self.now + end) / 2 for end in ends)])

    @cached_property
    def singles(self) -> list[Edits]:
        """All edits of a neuron that change it."""
        moves = ((self.values - self.now).abs() > 1e-6).nonzero().tolist()
        return [{(layer, index, 0): self.values[way, layer, index].item()} for way, layer, index in moves]

    def margins(self, proposals: Sequence[Edits]) -> Tensor:
        """(N,) the logit of the wanted answer minus the largest other one, under each of the proposed edits."""
        logits = self.last.logits(proposals)[:, 0]
        wanted = logits[:, self.wanted].clone()
        logits[:, self.wanted] = -torch.inf
        return wanted - logits.amax(-1)


def asks_of(program: Program, compiled: Compiled, seed: int) -> Iterator[Ask]:
    """Yield pairs of a program without end on which the model is right; prompts of causal models end at the answer."""
    for pair in pairs_of(program, seed):
        end = pair.position + 1
        if not (program.causal or end == program.length):
            continue
        ask = Ask(compiled, pair.prompt[:end], pair.counterfactual[:end], pair.contrast or 0)
        if ask.margins([{}])[0] < 0:
            yield ask


def measured(program: Program, compiled: Compiled, seed: int) -> dict[str, Any]:
    """Return the means of `COLUMNS` over pairs by method, and a row for each pair; JSON-ready."""
    rows = [judged(ask, Random(seed)) for ask in islice(asks_of(program, compiled, seed), PAIRS)]
    return {"methods": means(rows), "pairs": rows}


def judged(ask: Ask, random: Random) -> dict[str, Any]:
    """Return the number of edits of `flip` and of the smallest flip that is known, and `COLUMNS` by method.

    Random edits are as many passes as `flip` made, with as many edits each.
    """
    edits, passes = flipped(ask, NEURONS)
    by_source, _ = flipped(ask, NEURONS, ask.source)
    others = [flipped(ask, chance)[0] for chance in CHANCES]
    count = len(edits) or 1
    drawn = (ask.margins([drawn_edits(ask, count, random) for _ in range(passes)]) >= MARGIN).float()
    sizes = [len(flip) for flip in (edits, by_source, *others) if flip] + [count] * bool(drawn.any())
    smallest = min([size for size in (exhaustive(ask), *sizes) if size], default=0)

    def numbers(edits: Edits) -> dict[str, float]:
        return {"flipped": float(bool(edits)), "fewest": float(bool(edits) and len(edits) == smallest)}

    def at_random(share: float) -> dict[str, float]:
        return {"flipped": share, "fewest": share * (count == smallest)}

    by_chance = [numbers(edits) for edits in others]
    methods = {
        "flip": numbers(edits),
        "flip with a source prompt": numbers(by_source),
        "the same search, random candidates": {name: fmean(row[name] for row in by_chance) for name in METRICS},
        "random edits, as many passes": at_random(float(drawn.any())),
        "random edits, one pass": at_random(drawn.mean().item()),
    }
    on_program, drawn_from = of_program(ask, [edits]), of_program(ask, ask.singles)
    facts = {
        "edits": len(edits),
        "smallest": smallest,
        "passes": passes,
        "on program": on_program,
        "random on program": drawn_from,
    }
    return {**facts, "methods": methods}


def of_program(ask: Ask, each: Sequence[Edits]) -> float | None:
    """Return the share of edits of neurons that are no decoys, other than redundant ones; None if it is not known."""
    kinds = [ask.compiled.units.get((layer, index), "") for edits in each for layer, index, _ in edits]
    return fmean(kind in (PROGRAM, "redundant") for kind in kinds) if kinds and ask.compiled.units else None


def flipped(ask: Ask, choose: str, source: Sequence[int] | None = None) -> tuple[Edits, int]:
    """Return the edits of a flip, none if there is no flip, and the edited passes of its search."""
    try:
        how = {**SEARCHES[choose], "heads": False}
        request = FlipRequest(ask.compiled.model, ask.prompt, ask.wanted, source, MAX_NEURONS, **how)
        recipe = flip_by(request)
    except InputError:
        return {}, MAX_NEURONS * CANDIDATES * len(LEVELS)
    record = FlipRecord.of(recipe)
    return values_by_step(ask.compiled.model, recipe), record.rounds[-1][0] if record else 0


def exhaustive(ask: Ask) -> int:
    """Return 1 if any edit of a neuron flips the answer, 2 if one of the pairs of the best neurons does, else 0."""
    margins = ask.margins(ask.singles)
    if margins.max() >= MARGIN:
        return 1
    best: dict[tuple[int, int, int], Edits] = {}
    for row in margins.argsort(descending=True, stable=True).tolist():
        best.setdefault(next(iter(ask.singles[row])), ask.singles[row])
    pairs = [{**a, **b} for a, b in combinations(list(best.values())[:BEST], 2)]
    return 2 if pairs and ask.margins(pairs).max() >= MARGIN else 0


def drawn_edits(ask: Ask, count: int, random: Random) -> Edits:
    """Return random edits of different neurons, among those of the exhaustive search."""
    edits: dict[tuple[int, int, int], float] = {}
    while len(edits) < count:
        edits |= random.choice(ask.singles)
    return edits


def by_model(lines: Lines) -> list[dict[str, Any]]:
    """Return a row for each model: pairs, flips, and the means of `FACTS` over flips."""
    rows = []
    for line in lines:
        flips = [row for row in line["pairs"] if row["edits"]]
        numbers = {name: [row[name] for row in flips if row[name] is not None] for name in FACTS}
        means = {name: fmean(values) if values else None for name, values in numbers.items()}
        counts = {"pairs": len(line["pairs"]), "flips": len(flips)}
        rows.append({"program": line["program"], "variant": line["variant"], **counts, **means})
    return rows
