"""The measurements of stages: causal trace, whole parts, smallest set, controls, swaps, sources and words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from icebear.concepts.nodes.random_controls import RANDOM_DRAWS
from icebear.concepts.results.effects import likely_ids
from icebear.concepts.results.result import Relevance
from icebear.concepts.stages.patched_pair import PART_SITES, STATES_PER_PASS, PatchedPair, State
from icebear.concepts.stages.stage_parts import LAST, OTHERS, Network, Parts, Shares, WholeParts
from icebear.concepts.stages.stage_records import (
    OVERSHOOT,
    Answers,
    Control,
    Kind,
    RandomSwap,
    Source,
    Swap,
    Trace,
    WholePart,
    WholePartChange,
    WordEffect,
)
from icebear.models.model import Model
from icebear.records import Neuron, Ranked
from icebear.steps import OnProgress, unwatched

HEAD_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 30)
NEURON_COUNTS = (0, 1, 2, 3, 5, 8, 12, 20, 30, 50, 100)
NEURONS_PER_HEAD = 10
"""A head counts as much as this many neurons in the size of a set."""
ENOUGH = 0.8
"""The share of the difference at which the search stops."""
NEARLY_ALL = 0.9
"""The share of the difference that whole parts must give."""
BETWEEN = 6
"""The largest number of tokens between the differing ones and the last that are shown."""
TRACED_LAYERS = 7
LARGE_CHANGE = 0.25
"""A left-out whole part that changes the share by more than this is reported."""
LARGE_EFFECT = 1 / 3
"""Words whose effect is above this share of the largest are shown."""
SHOWN_WORDS = 4
"""The largest number of words that are raised, and lowered, beside both answers."""

STEPS = 6
"""The steps that are reported as progress."""


@dataclass(frozen=True)
class SearchedSet:
    """The heads and neurons of the last token that steps 3 and 4 choose."""

    heads: tuple[Ranked, ...]
    neurons: tuple[Ranked, ...]
    reached: bool
    earlier: WholeParts
    """The whole parts of earlier tokens."""
    left_out: tuple[WholePartChange, ...]


class Measured:
    """The measurements of stages, on pairs of prompts with the same prompt."""

    def __init__(self, model: Model, pairs: Sequence[PatchedPair]) -> None:
        self.model, self.pairs, self.shares = model, pairs, Shares(pairs)
        self.network = Network(model, pairs[0].passes.stack_of(pairs[0].explained))
        self.is_aligned = all(pair.is_aligned for pair in pairs)
        alone: Kind = "alone" if self.is_aligned else "cut"
        self.kind = alone if all(pair.ends_alike for pair in pairs) else "last token"
        self.differing = tuple(sorted(frozenset().union(*(pair.differing for pair in pairs))))
        self.between = tuple(sorted(frozenset().union(*(pair.between for pair in pairs)) - {*self.differing}))

    def stages(self, relevance: Relevance, on_progress: OnProgress) -> dict[str, Any]:
        """Take the steps, and return the fields of `StageRecord`."""
        assert relevance.target is not None
        shown = [*self.differing, *_largest_between(relevance, self.between)]
        trace = self.trace(sorted(shown)) if self.is_aligned else Trace((), (), ())
        on_progress(2, STEPS)
        result = self.search(relevance, on_progress)
        heads, neurons, rest = result.heads, result.neurons, self.beside_the_set(result.earlier)
        parts = self.measured_parts(heads, neurons, rest, sorted(shown)) if heads else NOTHING
        on_progress(5, STEPS)
        fields: dict[str, Any] = dict(
            **self.answers(),
            kind=self.kind,
            heads=heads,
            neurons=neurons,
            whole=self.named(result.earlier) if heads else (),
            target=relevance.target,
            contrast=relevance.contrast,
            position=self.pairs[0].explained,
            differing=self.differing,
            trace=trace,
            reached=result.reached,
            left_out=result.left_out,
            words=self.words([node.neuron for node in neurons]) if neurons else (),
            made_with=self.model.made_with,
            pairs=tuple(pair.pair for pair in self.pairs),
            **parts,
        )
        on_progress(STEPS, STEPS)
        return fields

    def search(self, relevance: Relevance, on_progress: OnProgress = unwatched) -> SearchedSet:
        """Steps 1, 3 and 4: return the set, and the whole parts that it needs."""
        heads, neurons = _candidates(relevance, self.network)
        searched, left_out = self.whole_parts() if self.kind == "alone" else (frozenset(), ())
        on_progress(3, STEPS)
        earlier = searched - LAST_FFN
        smallest = self.smallest_set(self.beside_the_set(earlier), heads, neurons if searched >= LAST_FFN else [])
        on_progress(4, STEPS)
        return SearchedSet(*smallest, earlier, left_out)

    def answers(self) -> dict[str, Any]:
        """Return what the prompt and the (first) counterfactual answer."""
        model, pair = self.model, self.pairs[0]
        answers: dict[str, Any] = {}
        for name, ids in (("prompt", pair.ids), ("counterfactual", pair.ids_c)):
            logits = getattr(pair, name).logits
            number = fmean(each.number(getattr(each, name).logits).item() for each in self.pairs)
            likeliest = model.top_tokens(logits.float(), 1)[0]
            answers[name] = Answers(model.pieces(ids), number, *self._probabilities([logits]), likeliest)
        return answers

    def _probabilities(self, logits: Sequence[Tensor]) -> tuple[float | None, float | None]:
        """Return the mean probabilities of target and contrast; logits (V,) of each pair, or of the first."""
        each = []
        for pair, x in zip(self.pairs, logits, strict=False):
            logs = self.model.task.log_probabilities(self.model, x)
            if logs is None:
                return None, None
            each.append(logs[[token for token in (pair.target, pair.contrast) if token is not None]].exp().tolist())
        means = [fmean(column) for column in zip(*each, strict=True)]
        return means[0], means[1] if len(means) > 1 else None

    def trace(self, tokens: list[int]) -> Trace:
        """Step 2. tokens: of those shown, not the last."""
        pair = self.pairs[0]
        positions = [*tokens, pair.explained]
        count = len(self.model.stacks[0][1])
        layers = sorted({step * (count - 1) // (TRACED_LAYERS - 1) for step in range(TRACED_LAYERS)})
        each = [torch.tensor([each.shares(row) for row in each.trace(positions, layers)]) for each in self.pairs]
        return Trace(tuple(positions), tuple(layers), tuple(map(tuple, torch.stack(each).mean(0).tolist())))

    def whole_parts(self) -> tuple[WholeParts, tuple[WholePartChange, ...]]:
        """Step 3: return the whole parts, and those left out that change the share much."""
        options: list[WholeParts] = [LAST_FFN, frozenset({("attn", "differing")})]
        if self.between:
            options.append(frozenset({("attn", "between"), ("ffn", "between")}))
        subsets = [
            [option for bit, option in enumerate(options) if number >> bit & 1] for number in range(2 ** len(options))
        ]
        always = frozenset({("ffn", "differing")})
        wholes = [always.union(*subset) for subset in subsets]
        shares = self.shares.of([Parts(free | {("attn", "last")}) for free in wholes])
        share_of = dict(zip(wholes, shares, strict=True))
        enough = [row for row, share in enumerate(shares) if NEARLY_ALL <= share <= OVERSHOOT]
        chosen = wholes[
            min(enough or range(len(wholes)), key=lambda row: (bool(enough) * len(subsets[row]), abs(shares[row] - 1)))
        ]
        held = [option for option in options if not option <= chosen or option == LAST_FFN]
        changes = [
            WholePartChange(self.named(option)[0], share_of[chosen | option] - share_of[chosen - option])
            for option in held
        ]
        # The neurons of an FFN of the last token that helps are searched; one that works against the answer is held.
        large = [row for row in changes if abs(row.change) > LARGE_CHANGE]
        return chosen, tuple(row for row in large if row.change < 0 or row.part.where != "last")

    def named(self, free: WholeParts) -> tuple[WholePart, ...]:
        at = {"differing": self.differing, "between": self.between, "last": (self.pairs[0].explained,)}
        return tuple(WholePart(kind, where, at[where]) for kind, where in sorted(free))  # type: ignore[arg-type]

    def smallest_set(
        self, rest: WholeParts, heads: Sequence[Ranked], neurons: Sequence[Ranked]
    ) -> tuple[tuple[Ranked, ...], tuple[Ranked, ...], bool]:
        """Step 4: return the heads, the neurons, and whether they reach the share that was asked for.

        rest: what is recomputed beside the set. neurons: none where the FFN of the last token is held.
        """
        if self.kind == "last token":
            return (), (), False
        cells = [(k, n) for k in HEAD_COUNTS for n in NEURON_COUNTS if k <= len(heads) and n <= len(neurons)]
        cells.sort(key=lambda cell: (NEURONS_PER_HEAD * cell[0] + cell[1], cell[0]))
        nearest: tuple[float, tuple[int, int]] | None = None
        for start in range(0, len(cells), STATES_PER_PASS):
            part = cells[start : start + STATES_PER_PASS]
            sets = [[node.neuron for node in (*heads[:k], *neurons[:n])] for k, n in part]
            shares = self.shares.of([Parts(rest, self.network.masks(nodes)) for nodes in sets])
            for (k, n), share in zip(part, shares, strict=True):
                if ENOUGH <= share <= OVERSHOOT:
                    return tuple(heads[:k]), tuple(neurons[:n]), True
                if nearest is None or abs(share - 1) < abs(nearest[0] - 1):
                    nearest = share, (k, n)
        k, n = nearest[1] if nearest else (0, 0)
        return tuple(heads[:k]), tuple(neurons[:n]), False

    def beside_the_set(self, earlier: WholeParts) -> WholeParts:
        """Return what is recomputed beside the set: parts of earlier tokens; of a cut, all but the other heads."""
        return OTHERS | LAST_FFN if self.kind == "cut" else earlier

    def measured_parts(
        self, heads: Sequence[Ranked], neurons: Sequence[Ranked], rest: WholeParts, tokens: Sequence[int]
    ) -> dict[str, Any]:
        """Steps 5 to 7, and the shares of the parts in sequence."""
        moving, writing = ([node.neuron for node in nodes] for nodes in (heads, neurons))
        chosen = [*moving, *writing]
        draws = self.random_sets(chosen)
        random_heads = [draw[: len(moving)] for draw in draws]
        random_neurons = [[*moving, *draw[len(moving) :]] for draw in draws] if writing else []
        changed = self.network.most_changed(self.pairs, moving, len(moving))
        groups = [[chosen, moving, [*changed, *writing]], [[head, *writing] for head in moving]]
        groups += [draws, random_heads if writing else [], random_neurons]
        states = [Parts(rest, self.network.masks(nodes)) for group in groups for nodes in group]
        states += [Parts(rest | LAST), self.network.without(chosen)]
        shares = iter(self.shares.of(states))
        measured = [[next(shares) for _ in group] for group in groups]
        everything, remaining = shares
        (alone, moved, most_changed), each, random, moved_random, written_random = measured
        controls = [
            Control(median(values), tuple(values), tuple(map(tuple, sets))) if sets else None
            for values, sets in ((random, draws), (moved_random, groups[3]), (written_random, random_neurons))
        ]
        return {
            "alone": alone,
            "without": 1 - remaining,
            "random": median(random),
            "random_sets": controls[0],
            "most_changed": most_changed,
            "moved": moved,
            "moved_random": controls[1] or controls[0],
            "written_random": controls[2],
            "everything": everything,
            "swaps": self.swaps(moving, each),
            "random_swaps": self.random_swaps(moving),
            "sources": self.sources(chosen, tokens) if self.kind == "alone" else (),
        }

    def swaps(self, heads: Sequence[Neuron], alone: Sequence[float]) -> tuple[Swap, ...]:
        """Step 6: give each head alone its counterfactual value."""
        before = self._probabilities([pair.prompt.logits for pair in self.pairs])
        each = zip(heads, alone, self.swapped([[head] for head in heads]), strict=True)
        return tuple(Swap(head, share, before, after) for head, share, after in each)

    def random_swaps(self, heads: Sequence[Neuron], seed: int = 0) -> tuple[RandomSwap, ...]:
        """The control of step 6: the same with random other heads, of all layers."""
        others = [head for head in self.network.heads() if head not in set(heads)]
        drawn = Random(seed).sample(others, min(RANDOM_DRAWS, len(others)))
        after = self.swapped([[head] for head in drawn]) if drawn else []
        return tuple(map(RandomSwap, drawn, after))

    def swapped(self, sets: Sequence[Sequence[Neuron]]) -> list[tuple[float | None, float | None]]:
        """Return the probabilities of target and contrast without each set of nodes."""
        parts = [self.network.without(nodes) for nodes in sets]
        logits = [pair.logits([part.state(pair) for part in parts]) for pair in self.pairs]
        return [self._probabilities([x[row] for x in logits]) for row in range(len(sets))]

    def sources(self, nodes: Sequence[Neuron], tokens: Sequence[int]) -> tuple[Source, ...]:
        """Step 7: read one token from the prompt, and all other earlier ones from the counterfactual."""
        masks = self.network.masks(nodes)
        states = [
            [
                State(frozenset({token}), frozenset({token}), masks, frozenset({token, pair.explained}))
                for token in tokens
            ]
            for pair in self.pairs
        ]
        shares = self.shares.of_states(states) if tokens else []
        return tuple(Source(token, share) for token, share in zip(tokens, shares, strict=True))

    def words(self, neurons: Sequence[Neuron]) -> tuple[WordEffect, ...]:
        """Step 8: logits of the prompt minus those when only the neurons have their counterfactual values."""
        pair, model = self.pairs[0], self.model
        part = self.network.without(neurons)
        ids = likely_ids(
            torch.stack([pair.prompt.logits, *(each.counterfactual.logits for each in self.pairs)]).float()
        )
        answers = [token for token in (pair.target, pair.contrast) if token is not None]
        ids = list(dict.fromkeys([*ids, *answers]))
        each = [(pair.prompt.logits - pair.logits([part.state(pair)])[0])[ids] for pair in self.pairs]
        effects = torch.stack(each).mean(0)
        effects -= effects.mean() if len(ids) > 1 else 0
        rows = [
            WordEffect(token, model.answer_text(token), effect)
            for token, effect in zip(ids, effects.tolist(), strict=True)
        ]
        rows.sort(key=lambda row: -abs(row.effect))
        large = [row for row in rows if abs(row.effect) > LARGE_EFFECT * abs(rows[0].effect)]
        shown = [row for sign in (1, -1) for row in [row for row in large if row.effect * sign > 0][:SHOWN_WORDS]]
        return tuple(row for row in rows if row in shown or row.token_id in answers)

    def set_shares(self, nodes: Sequence[Neuron], earlier: WholeParts, seed: int = 0) -> tuple[float, float, float]:
        """Return what a set gives alone, what is lost without it, and the median of random sets."""
        rest, sets = self.beside_the_set(earlier), self.random_sets(nodes, seed)
        parts = [Parts(rest, self.network.masks(chosen)) for chosen in (nodes, *sets)]
        alone, *random, remaining = self.shares.of([*parts, self.network.without(nodes)])
        return alone, 1 - remaining, median(random)

    def random_sets(self, nodes: Sequence[Neuron], seed: int = 0) -> list[list[Neuron]]:
        generator = torch.Generator().manual_seed(seed)
        return [self.network.random(nodes, generator) for _ in range(RANDOM_DRAWS)]


LAST_FFN: WholeParts = frozenset({("ffn", "last")})
NOTHING: dict[str, Any] = {
    **dict.fromkeys(("alone", "without", "random", "random_sets", "most_changed", "moved", "moved_random")),
    **dict.fromkeys(("written_random", "everything")),
    "swaps": (),
    "random_swaps": (),
    "sources": (),
}
"""The numbers of stages without heads."""


def _candidates(relevance: Relevance, network: Network) -> tuple[list[Ranked], list[Ranked]]:
    """Step 1: return heads and FFN neurons of the last token with positive relevance, the largest first."""
    position, heads = relevance.predicted_at, relevance.top(HEAD_COUNTS[-1], "head")
    if "cross" in network.head_sites:
        column = relevance.neurons.columns("cross", [position])[0]
        scores = relevance.of("cross")[:, column].unflatten(-1, (network.model.heads, -1)).sum(-1)  # (L, H)
        for layer, index in (scores > 0).nonzero().tolist():
            heads.append(Ranked(Neuron(layer, "cross", index), position, None, scores[layer, index].item()))
    neurons = [
        row for site in PART_SITES["ffn"] if site in relevance.sites for row in relevance.top(NEURON_COUNTS[-1], site)
    ]
    heads, neurons = (
        sorted(rows, key=lambda row: (-row.relevance, row.neuron))[:count]
        for rows, count in ((heads, HEAD_COUNTS[-1]), (neurons, NEURON_COUNTS[-1]))
    )
    return heads, neurons


def _largest_between(relevance: Relevance, between: Sequence[int]) -> list[int]:
    """Return the tokens between with the largest sum over layers of |relevance|; ties go to the later one."""
    neurons = [relevance.of(site) for site in PART_SITES["ffn"] if site in relevance.sites]
    sizes = torch.stack([values.abs().sum((0, 2)) for values in (relevance.heads(), *neurons)]).sum(0).tolist()
    columns = {position: column for column, position in enumerate(relevance.neurons.recorded)}
    known = [position for position in between if position in columns]
    return sorted(known, key=lambda position: (-sizes[columns[position]], -position))[:BETWEEN]
