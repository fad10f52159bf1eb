"""Whether a graph is true: its nodes exchanged, its edges intervened on, and all of it run by its own edges.

Everything here is forward passes. In them every neuron that edges stop at is held: at its value in the prompt or in the
other one, or at a value that is given; a node is read before it is held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from statistics import fmean
from typing import TYPE_CHECKING

import pandas
import torch
from torch import Tensor

from icebear.concepts.attribution.controls import Ablation, ablated
from icebear.concepts.attribution.result import Relevance
from icebear.concepts.circuits.edges import Probe, inputs_of
from icebear.concepts.circuits.nodes import exchangeable, pair_of, places_of, probes
from icebear.concepts.circuits.records import AnswerNode, Edge, EdgeFaithfulness, Group, Node, Token, Without
from icebear.concepts.models.model import Model
from icebear.concepts.models.objective import Objective
from icebear.concepts.passes.inputs import changing
from icebear.concepts.passes.run import forward
from icebear.concepts.passes.sites import hooks
from icebear.concepts.passes.targets import Logits, first_layers
from icebear.errors import InputError
from icebear.values import seed_of, whole

if TYPE_CHECKING:
    from icebear.concepts.circuits.graph import Graph

TOKENS = 256
"""Rows times tokens of a forward pass."""
DRAWS = 5
"""Of edges at random."""


# --- forward passes in which neurons are held ----------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Row:
    """A forward pass in which all is held at its value in one prompt but for these."""

    base: int
    """0 the prompt, 1 the other one."""
    tokens: Sequence[int] = ()
    """That are the other prompt's (of the base)."""
    nodes: Mapping[int, Tensor] = field(default_factory=dict)
    """Numbers of nodes, and the values (n,) that they are held at."""


@dataclass(frozen=True, eq=False)
class HeldNeurons:
    """A graph's neurons in both prompts of a pair, and its nodes in them."""

    model: Model
    pair: Objective
    nodes: list[Probe]
    sites: tuple[str, ...]
    values: tuple[dict[str, Tensor], dict[str, Tensor]]
    """site -> (L, T, N) in the prompt and in the other one."""
    inputs: list[Tensor]
    """(2, T, D) of each stack."""

    @classmethod
    def of(cls, graph: Graph, relevance: Relevance) -> HeldNeurons:
        assert relevance.counterfactual is not None
        if relevance.image:
            raise InputError("Interventions exchange tokens, which an image has not; its edges are what they are.")
        sites, pair = tuple(relevance.sites), pair_of(relevance)
        values = {site: relevance.activation(site) for site in sites}, dict(relevance.neurons.counterfactual)
        nodes = probes(relevance, places_of(graph.nodes))
        return cls(graph.model, pair, nodes, sites, values, inputs_of(graph.model, pair))

    def value(self, number: int, base: int) -> Tensor:
        """(n,) a node's activations in one of the prompts."""
        probe = self.nodes[number]
        return self.values[base][probe.site][probe.layer, probe.position, probe.places]

    def run(self, rows: Sequence[Row], layers: int | None = None) -> tuple[dict[int, Tensor], Tensor]:
        """Each node's activations (R, n), before it is held, and the number explained (R,). layers: only the first so
        many, and the nodes in them; the number is then none."""
        size = max(1, TOKENS // self.pair.batch.spans[1].stop)
        few = layers is not None and self.model.task.stacks == 1
        with self.model.lock, first_layers(self.model, layers) if few and layers else nullcontext():
            parts = [self._run(rows[start : start + size]) for start in range(0, len(rows), size)]
        nodes = {number: torch.cat([seen[number] for seen, _ in parts]) for number in parts[0][0]}
        return nodes, torch.cat([answers for _, answers in parts])

    def numbers(self, rows: Sequence[Row]) -> Tensor:
        """(R, K + 1) the nodes' numbers, and the one explained."""
        nodes, answers = self.run(rows)
        each = [nodes[number] @ probe.direction for number, probe in enumerate(self.nodes)]
        return torch.stack([*each, answers], 1)

    def _run(self, rows: Sequence[Row]) -> tuple[dict[int, Tensor], Tensor]:
        seen: dict[int, Tensor] = {}
        plan = self.pair.rows([row.base for row in rows])

        def held(site: str, layer: int, x: Tensor) -> Tensor:
            span = plan.batch.span_of(self.model, layer)
            here = torch.stack([self.values[row.base][site][layer, span] for row in rows]).to(x)
            for number, probe in enumerate(self.nodes):
                if (probe.site, probe.layer) == (site, layer):
                    position = probe.position - span.start
                    seen[number] = x[:, position, probe.places].float().cpu()
                    for place, row in enumerate(rows):
                        if number in row.nodes:
                            here[place, position, probe.places] = row.nodes[number].to(x)
            return here

        def reading(stack: int, x: Tensor) -> Tensor:
            spans = plan.batch.spans
            found = torch.stack([self.inputs[stack][row.base] for row in rows])
            for place, row in enumerate(rows):
                for token in row.tokens:
                    if spans[stack].start <= token < spans[stack].stop:
                        at = token - spans[stack].start
                        found[place, at] = self.inputs[stack][1 - row.base, at]
            return found.to(x)

        places = [(site, layer) for site in self.sites for layer in self.model.layers_with(site)]
        with changing(self.model, reading), hooks(self.model, places, held):
            answers = forward(self.model, Logits(plan), [])
        return seen, answers.float().cpu()


# --- nodes ---------------------------------------------------------------------------------------------


def ablation(graph: Graph, seed: int = 0) -> Ablation:
    """What the nodes carry of the answer, beside as many matched and most different ones; of several pairs the mean."""
    generator = torch.Generator().manual_seed(seed)
    each = [
        ablated(exchangeable(graph.model, relevance, graph.heads), graph.mask(), generator)
        for relevance in graph.relevances
    ]
    means = [fmean(column) for column in zip(*(list(vars(one).values())[1:] for one in each), strict=True)]
    return Ablation(each[0].nodes, *means)


def without(graph: Graph, group: Group, seed: int = 0) -> Without:
    """The answer when a group takes the other prompt's activations; of several pairs of prompts that of the first."""
    nodes = exchangeable(graph.model, graph.relevances[0], graph.heads)
    mask = graph.mask(group.nodes)
    found = ablated(nodes, mask, torch.Generator().manual_seed(seed))
    return Without(found.left, tuple(nodes.predictions(~mask)), found.matched_left)


# --- edges ---------------------------------------------------------------------------------------------


def interventions(graph: Graph, half: bool = False) -> pandas.DataFrame:
    """Each possible edge from a token or node to a node or the answer, as predicted and as measured, a row each.

    effect, contribution: as the graph has them. one_sided: by how much more the target is than if the source alone
    takes its value of the other prompt, all other neurons held as here. two_sided: the mean of that and of the same in
    the other prompt, from there to here. half: go half of the way, and count it twice.

    Of a graph of several pairs those of the first.
    """
    relevance = graph.relevances[0]
    held, count = HeldNeurons.of(graph, relevance), len(graph.tokens)
    moved: list[Tensor] = []
    for base in (0, 1):
        rows = [Row(base), *([] if half else [Row(base, [token]) for token in range(count)])]
        for number in range(len(graph.nodes)):
            there, here = held.value(number, 1 - base), held.value(number, base)
            rows.append(Row(base, nodes={number: (there + here) / 2 if half else there}))
        start, *found = held.numbers(rows)
        change = (start - torch.stack(found)) * (1 - 2 * base) * (1 + half)
        moved.append(change)  # (sources, K + 1)
    told = []
    for row, source in enumerate(graph.shown[count * half :]):
        column = row + count * half
        for number, target in enumerate(graph.targets):
            if below(graph, source, target):
                told.append(
                    {
                        "source": source.id,
                        "target": target.id,
                        "effect": graph.effect[number, column].item(),
                        "contribution": graph.contribution[number, column].item(),
                        "one_sided": moved[0][row, number].item(),
                        "two_sided": (moved[0][row, number].item() + moved[1][row, number].item()) / 2,
                    }
                )
    return pandas.DataFrame(told)


READINGS = {"effect": ("effect", "one_sided"), "contribution": ("contribution", "two_sided")}
"""What is predicted, and by what it is judged."""


def between(edges: pandas.DataFrame) -> pandas.DataFrame:
    """Of `interventions` those of neurons, not of tokens."""
    return edges[~edges.source.str.startswith("token")]


def correlations(graph: Graph) -> dict[str, float]:
    """Pearson's, of effects and of contributions between neurons."""
    edges = between(interventions(graph))
    return {f"{name}s": float(edges[of].corr(edges[truth])) for name, (of, truth) in READINGS.items()}


def below(graph: Graph, source: Token | Node, target: Node | AnswerNode) -> bool:
    """Whether a source can give a target anything."""
    before = source.position <= target.position or not graph.model.task.is_causal
    return source.height < target.height and before


# --- the whole graph -----------------------------------------------------------------------------------


def faithfulness(graph: Graph, counts: Sequence[int | None] = (None,), seed: int = 0) -> list[EdgeFaithfulness]:
    """The graph's own faithfulness: node by node, upwards, each is read where its kept sources have the values computed
    so far, and all else is as in the other prompt; the answer last. counts: of the first so many edges from tokens and
    nodes, None for all that are kept. Of several pairs the mean."""
    generator = torch.Generator().manual_seed(seed_of(seed))
    counts = [count if count is None else whole(count, "The number of edges", 0) for count in counts]
    shown = graph.shown_edges
    every = [
        [number for number, source in enumerate(graph.shown) if below(graph, source, target)]
        for target in graph.targets
    ]
    ways = [every]
    for count in counts:
        own = _by_target(graph, shown[:count])
        ways += [own, *(_redrawn(graph, own, every, generator) for _ in range(DRAWS))]
    each = [_along(graph, HeldNeurons.of(graph, relevance), relevance, ways) for relevance in graph.relevances]
    nodes, *found = (fmean(column) for column in zip(*each, strict=True))
    return [
        EdgeFaithfulness(len(shown[:count]), found[start], fmean(found[start + 1 : start + 1 + DRAWS]), nodes)
        for start, count in zip(range(0, len(found), 1 + DRAWS), counts, strict=True)
    ]


def overlap(one: Graph, other: Graph) -> tuple[float, float]:
    """The share of nodes that two circuits have in common (of the smaller one), and what as many drawn from each layer
    and token would have. Raises `InputError` for circuits of two models, or of prompts of different lengths."""
    if one.model.fingerprint != other.model.fingerprint:
        raise InputError(f"One graph is of {one.model.name}, the other of {other.model.name}; compare those of one.")
    if one.mask().shape != other.mask().shape:
        counted = " and ".join(
            f"{len(graph.tokens)} tokens {'with' if graph.heads else 'without'} heads" for graph in (one, other)
        )
        raise InputError(
            f"The graphs are of {counted}; compare circuits of prompts of one length, with heads or without."
        )
    return shared(one.mask(), other.mask())


def shared(one: Tensor, other: Tensor) -> tuple[float, float]:
    """`overlap` of two choices (L, T, W)."""
    smaller = min(int(one.sum()), int(other.sum()))
    chance = (one.sum(-1) * other.sum(-1) / one.shape[-1]).sum().item()
    return int((one & other).sum()) / smaller, chance / smaller


Sources = list[list[int]]
"""Of each target the numbers of its sources, tokens first, then nodes."""


def _by_target(graph: Graph, edges: Sequence[Edge]) -> Sources:
    numbers = {source.id: number for number, source in enumerate(graph.shown)}
    found: dict[str, list[int]] = {target.id: [] for target in graph.targets}
    for edge in edges:
        found[edge.target.id].append(numbers[edge.source.id])
    return list(found.values())


def _redrawn(graph: Graph, own: Sources, every: Sources, generator: torch.Generator) -> Sources:
    """As many into each target from each layer (the tokens are one), of those that have an effect, and if there are
    enough not those kept."""
    known, found = graph.shown, []
    for row, (kept, possible) in enumerate(zip(own, every, strict=True)):
        chosen: list[int] = []
        able = [number for number in possible if graph.effect[row, number] != 0]
        for _, group in groupby(able, key=lambda number: known[number].height):
            some = list(group)
            order = [some[place] for place in torch.randperm(len(some), generator=generator).tolist()]
            order.sort(key=lambda number: number in kept)
            chosen += order[: len(set(some) & set(kept))]
        found.append(chosen)
    return found


def _along(graph: Graph, held: HeldNeurons, relevance: Relevance, ways: Sequence[Sources]) -> list[float]:
    """The share of the difference between both prompts that comes about along each of several choices of edges."""
    count = len(graph.tokens)
    values: list[dict[int, Tensor]] = [{} for _ in ways]

    def rows(target: int) -> list[Row]:
        return [
            Row(
                1,
                [number for number in sources[target] if number < count],
                {number - count: known[number - count] for number in sources[target] if number >= count},
            )
            for sources, known in zip(ways, values, strict=True)
        ]

    for _, group in groupby(range(len(graph.nodes)), key=lambda number: graph.nodes[number].height):
        some = list(group)
        nodes, _ = held.run([row for number in some for row in rows(number)], graph.nodes[some[0]].neuron.layer + 1)
        for place, number in enumerate(some):
            for way, known in enumerate(values):
                known[number] = nodes[number][place * len(ways) + way]
    _, answers = held.run(rows(len(graph.nodes)))
    (there,), difference = relevance.counterfactual.numbers, relevance.conservation().target  # type: ignore[union-attr]
    return [(answer - there) / difference for answer in answers.tolist()]
