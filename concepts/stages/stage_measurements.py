"""The measurements of stages, by interventions on pairs of prompts.

1. Candidates are the heads and FFN neurons of the last token with positive relevance, the largest first.
2. A causal trace shows where the difference is, token by token and layer by layer.
3. Whole parts: the FFN at the tokens that differ is recomputed, and as few other whole parts as the difference needs.
4. Set: the first k heads and n neurons that give 80 % of the difference while everything else is held.
5. Controls: random sets of the same size, and the other heads that change most.
6. Swaps: each head with all the neurons, and when only this head has its counterfactual value.
7. Sources: each token as the only one that is read from the prompt.
8. Words: what the neurons do to the likely next words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from icebear.concepts.stages.stage_parts import (
    LAST,
    LAST_FFN,
    OTHERS,
    ExplainedTokenNodes,
    Recomputed,
    Shares,
    WholeKinds,
)
from icebear.concepts.stages.stage_records import (
    ENOUGH,
    OVERSHOOT,
    Answers,
    Control,
    RandomSwap,
    Source,
    StageKind,
    StageRecord,
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

PROGRESS_STEPS = 6
"""The number of steps that are reported as progress."""


@dataclass(frozen=True)
class SearchedSet:
    """The heads and neurons of the last token that steps 3 and 4 choose."""

    heads: tuple[Ranked, ...]
    neurons: tuple[Ranked, ...]
    reached: bool
    whole_kinds: WholeKinds
    """The whole parts of earlier tokens."""
    left_out: tuple[WholePartChange, ...]


@dataclass(frozen=True)
class SetMeasurements:
    """What steps 5 to 7 measure of a set, see `StageRecord`. The defaults are those of stages without heads."""

    alone: float | None = None
    without: float | None = None
    random: float | None = None
    random_sets: Control | None = None
    most_changed: float | None = None
    moved: float | None = None
    moved_random: Control | None = None
    written_random: Control | None = None
    everything: float | None = None
    swaps: tuple[Swap, ...] = ()
    random_swaps: tuple[RandomSwap, ...] = ()
    sources: tuple[Source, ...] = ()


class StageMeasurement:
    """The measurements of stages, on pairs of prompts with the same prompt."""

    def __init__(self, model: Model, pairs: Sequence[PatchedPair]) -> None:
        self.model, self.pairs, self.shares = model, pairs, Shares(pairs)
        self.nodes = ExplainedTokenNodes(model, pairs[0].passes.stack_of(pairs[0].position))
        self.is_aligned = all(pair.is_aligned for pair in pairs)
        alone: StageKind = "alone" if self.is_aligned else "cut"
        self.kind = alone if all(pair.ends_alike for pair in pairs) else "last token"
        self.differing = tuple(sorted(frozenset().union(*(pair.differing for pair in pairs))))
        self.between = tuple(sorted(frozenset().union(*(pair.between for pair in pairs)) - {*self.differing}))

    def stages(self, relevance: Relevance, on_progress: OnProgress) -> StageRecord:
        """Take all steps."""
        assert relevance.target is not None
        shown = [*self.differing, *_largest_between(relevance, self.between)]
        trace = self.measure_trace(sorted(shown)) if self.is_aligned else Trace((), (), ())
        on_progress(2, PROGRESS_STEPS)
        chosen = self.search(relevance, on_progress, sorted(shown))
        measured = self.measure_set(chosen, sorted(shown)) if chosen.heads else SetMeasurements()
        on_progress(5, PROGRESS_STEPS)
        record = StageRecord(
            **self.answers(),
            **vars(measured),
            kind=self.kind,
            heads=chosen.heads,
            neurons=chosen.neurons,
            whole=self.named(chosen.whole_kinds) if chosen.heads else (),
            target=relevance.target,
            contrast=relevance.contrast,
            position=self.pairs[0].position,
            differing=self.differing,
            trace=trace,
            reached=chosen.reached,
            left_out=chosen.left_out,
            words=self.measure_words([node.neuron for node in chosen.neurons]) if chosen.neurons else (),
            made_with=self.model.made_with,
        )
        on_progress(PROGRESS_STEPS, PROGRESS_STEPS)
        return record

    def search(
        self, relevance: Relevance, on_progress: OnProgress = unwatched, sources: Sequence[int] = ()
    ) -> SearchedSet:
        """Steps 1, 3 and 4: return the set, and the whole parts that it needs. sources: the tokens of step 7."""
        heads, neurons = _candidates(relevance, self.nodes)
        needed, left_out = self.choose_whole_kinds(sources) if self.kind == "alone" else (frozenset(), ())
        on_progress(3, PROGRESS_STEPS)
        whole_kinds = needed - LAST_FFN
        neurons = neurons if needed >= LAST_FFN else []
        chosen_heads, chosen_neurons, reached = self.smallest_set(self.beside_the_set(whole_kinds), heads, neurons)
        on_progress(4, PROGRESS_STEPS)
        return SearchedSet(chosen_heads, chosen_neurons, reached, whole_kinds, left_out)

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

    def measure_trace(self, tokens: list[int]) -> Trace:
        """Step 2. tokens: of those shown, not the last."""
        pair = self.pairs[0]
        positions = [*tokens, pair.position]
        count = len(self.model.stacks[0][1])
        layers = sorted({step * (count - 1) // (TRACED_LAYERS - 1) for step in range(TRACED_LAYERS)})
        each = [torch.tensor([each.shares(row) for row in each.trace(positions, layers)]) for each in self.pairs]
        return Trace(tuple(positions), tuple(layers), tuple(map(tuple, torch.stack(each).mean(0).tolist())))

    def choose_whole_kinds(self, sources: Sequence[int] = ()) -> tuple[WholeKinds, tuple[WholePartChange, ...]]:
        """Step 3: return the whole parts, and those left out that change the share much. sources: the tokens of step
        7, for which the tokens before the explained one are read in the same pass."""
        options: list[WholeKinds] = [LAST_FFN, frozenset({("attn", "differing")})]
        if self.between:
            options.append(frozenset({("attn", "between"), ("ffn", "between")}))
        subsets = [
            [option for bit, option in enumerate(options) if number >> bit & 1] for number in range(2 ** len(options))
        ]
        always = frozenset({("ffn", "differing")})
        choices = [always.union(*subset) for subset in subsets]
        recomputed = [Recomputed(choice | {("attn", "last")}) for choice in choices]
        states = [[each.state(pair) for each in recomputed] for pair in self.pairs]
        for pair, of_pair in zip(self.pairs, states, strict=True):
            pair.read_ahead([*of_pair, *_sources(pair, sources, {})])
        shares = self.shares.of_states(states)
        share_of = dict(zip(choices, shares, strict=True))
        enough = [number for number, share in enumerate(shares) if NEARLY_ALL <= share <= OVERSHOOT]
        if enough:
            number = min(enough, key=lambda number: (len(subsets[number]), abs(shares[number] - 1)))
        else:
            number = min(range(len(choices)), key=lambda number: abs(shares[number] - 1))
        chosen = choices[number]
        held = [option for option in options if not option <= chosen or option == LAST_FFN]
        changes = [
            WholePartChange(self.named(option)[0], share_of[chosen | option] - share_of[chosen - option])
            for option in held
        ]
        # The neurons of an FFN of the last token that helps are searched; one that works against the answer is held.
        large = [row for row in changes if abs(row.change) > LARGE_CHANGE]
        return chosen, tuple(row for row in large if row.change < 0 or row.part.where != "last")

    def named(self, kinds: WholeKinds) -> tuple[WholePart, ...]:
        """Return whole parts with their tokens."""
        at = {"differing": self.differing, "between": self.between, "last": (self.pairs[0].position,)}
        return tuple(WholePart(kind, where, at[where]) for kind, where in sorted(kinds))  # type: ignore[arg-type]

    def smallest_set(
        self, beside: WholeKinds, heads: Sequence[Ranked], neurons: Sequence[Ranked]
    ) -> tuple[tuple[Ranked, ...], tuple[Ranked, ...], bool]:
        """Step 4: return the heads, the neurons, and whether they reach the share that was asked for.

        beside: what is recomputed beside the set. neurons: none where the FFN of the last token is held.
        """
        if self.kind == "last token":
            return (), (), False
        cells = [(k, n) for k in HEAD_COUNTS for n in NEURON_COUNTS if k <= len(heads) and n <= len(neurons)]
        cells.sort(key=lambda cell: (NEURONS_PER_HEAD * cell[0] + cell[1], cell[0]))
        nearest: tuple[float, tuple[int, int]] | None = None
        for start in range(0, len(cells), STATES_PER_PASS):
            part = cells[start : start + STATES_PER_PASS]
            sets = [[node.neuron for node in (*heads[:k], *neurons[:n])] for k, n in part]
            shares = self.shares.of([Recomputed(beside, self.nodes.masks(nodes)) for nodes in sets])
            for (k, n), share in zip(part, shares, strict=True):
                if ENOUGH <= share <= OVERSHOOT:
                    return tuple(heads[:k]), tuple(neurons[:n]), True
                if nearest is None or abs(share - 1) < abs(nearest[0] - 1):
                    nearest = share, (k, n)
        k, n = nearest[1] if nearest else (0, 0)
        return tuple(heads[:k]), tuple(neurons[:n]), False

    def beside_the_set(self, whole_kinds: WholeKinds) -> WholeKinds:
        """Return what is recomputed beside the set: the whole parts of earlier tokens; for prompts of different
        lengths, all but the other heads of the last token."""
        return OTHERS | LAST_FFN if self.kind == "cut" else whole_kinds

    def measure_set(self, chosen: SearchedSet, tokens: Sequence[int]) -> SetMeasurements:
        """Steps 5 to 7, and the shares of the set, of its heads and of everything. tokens: the sources of step 7."""
        heads, neurons = ([node.neuron for node in nodes] for nodes in (chosen.heads, chosen.neurons))
        nodes, beside = [*heads, *neurons], self.beside_the_set(chosen.whole_kinds)
        draws = self.random_sets(nodes)
        changed = self.nodes.most_changed(self.pairs, heads, len(heads))
        sets = {
            "set": [nodes],
            "heads": [heads],
            "most changed": [[*changed, *neurons]],
            "each head": [[head, *neurons] for head in heads],
            "random": draws,
            "random heads": [draw[: len(heads)] for draw in draws] if neurons else [],
            "random neurons": [[*heads, *draw[len(heads) :]] for draw in draws] if neurons else [],
        }
        recomputed = {
            **{name: [Recomputed(beside, self.nodes.masks(each)) for each in group] for name, group in sets.items()},
            "everything": [Recomputed(beside | LAST)],
            "without the set": [self.nodes.without(nodes)],
        }
        values = iter(self.shares.of([each for group in recomputed.values() for each in group]))
        shares = {name: tuple(next(values) for _ in group) for name, group in recomputed.items()}
        controls = {
            name: Control(median(shares[name]), shares[name], tuple(map(tuple, sets[name]))) if sets[name] else None
            for name in ("random", "random heads", "random neurons")
        }
        return SetMeasurements(
            alone=shares["set"][0],
            without=1 - shares["without the set"][0],
            random=median(shares["random"]),
            random_sets=controls["random"],
            most_changed=shares["most changed"][0],
            moved=shares["heads"][0],
            moved_random=controls["random heads"] or controls["random"],
            written_random=controls["random neurons"],
            everything=shares["everything"][0],
            swaps=self.measure_swaps(heads, shares["each head"]),
            random_swaps=self.measure_random_swaps(heads),
            sources=self.measure_sources(nodes, tokens) if self.kind == "alone" else (),
        )

    def measure_swaps(self, heads: Sequence[Neuron], alone: Sequence[float]) -> tuple[Swap, ...]:
        """Step 6: give each head alone its counterfactual value."""
        before = self._probabilities([pair.prompt.logits for pair in self.pairs])
        each = zip(heads, alone, self.swapped([[head] for head in heads]), strict=True)
        return tuple(Swap(head, share, before, after) for head, share, after in each)

    def measure_random_swaps(self, heads: Sequence[Neuron], seed: int = 0) -> tuple[RandomSwap, ...]:
        """The control of step 6: the same with random other heads, of all layers."""
        others = [head for head in self.nodes.heads() if head not in set(heads)]
        drawn = Random(seed).sample(others, min(RANDOM_DRAWS, len(others)))
        after = self.swapped([[head] for head in drawn]) if drawn else []
        return tuple(map(RandomSwap, drawn, after))

    def swapped(self, sets: Sequence[Sequence[Neuron]]) -> list[tuple[float | None, float | None]]:
        """Return the probabilities of target and contrast without each set of nodes."""
        parts = [self.nodes.without(nodes) for nodes in sets]
        logits = [pair.logits([part.state(pair) for part in parts]) for pair in self.pairs]
        return [self._probabilities([x[row] for x in logits]) for row in range(len(sets))]

    def measure_sources(self, nodes: Sequence[Neuron], tokens: Sequence[int]) -> tuple[Source, ...]:
        """Step 7: read one token from the prompt, and all other earlier ones from the counterfactual."""
        masks = self.nodes.masks(nodes)
        states = [_sources(pair, tokens, masks) for pair in self.pairs]
        shares = self.shares.of_states(states) if tokens else []
        return tuple(Source(token, share) for token, share in zip(tokens, shares, strict=True))

    def measure_words(self, neurons: Sequence[Neuron]) -> tuple[WordEffect, ...]:
        """Step 8: logits of the prompt minus those when only the neurons have their counterfactual values."""
        pair, model = self.pairs[0], self.model
        part = self.nodes.without(neurons)
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

    def set_shares(self, nodes: Sequence[Neuron], whole_kinds: WholeKinds, seed: int = 0) -> tuple[float, float, float]:
        """Return what a set gives alone, what is lost without it, and the median of random sets."""
        beside, sets = self.beside_the_set(whole_kinds), self.random_sets(nodes, seed)
        recomputed = [Recomputed(beside, self.nodes.masks(chosen)) for chosen in (nodes, *sets)]
        alone, *random, remaining = self.shares.of([*recomputed, self.nodes.without(nodes)])
        return alone, 1 - remaining, median(random)

    def random_sets(self, nodes: Sequence[Neuron], seed: int = 0) -> list[list[Neuron]]:
        generator = torch.Generator().manual_seed(seed)
        return [self.nodes.random(nodes, generator) for _ in range(RANDOM_DRAWS)]


def _sources(pair: PatchedPair, tokens: Sequence[int], nodes: Mapping[str, Tensor]) -> list[State]:
    """Return the states in which one token is read from the prompt, and all other earlier ones from the
    counterfactual."""
    return [State(frozenset({token}), frozenset({token}), nodes, frozenset({token, pair.position})) for token in tokens]


def _candidates(relevance: Relevance, token_nodes: ExplainedTokenNodes) -> tuple[list[Ranked], list[Ranked]]:
    """Step 1: return heads and FFN neurons of the last token with positive relevance, the largest first."""
    position, heads = relevance.predicted_at, relevance.top(HEAD_COUNTS[-1], "head")
    if "cross" in token_nodes.head_sites:
        column = relevance.neurons.columns("cross", [position])[0]
        scores = relevance.of("cross")[:, column].unflatten(-1, (token_nodes.model.heads, -1)).sum(-1)  # (L, H)
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
