"""Edges measured by interventions: each source alone takes its counterfactual value, and all targets are read.

A row of a forward pass is one source: all other heads and neurons keep their values in the prompt, attention and whole
parts are recomputed. Rows of random sources, of the layers and tokens of the nodes, are the control.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from icebear.concepts.circuits.circuit_records import EdgeTarget, HeadOrNeuron, Node, below
from icebear.concepts.circuits.fixed_neurons import FixedNeurons, FixedPass
from icebear.concepts.circuits.nodes import node_values
from icebear.concepts.passes.run import TokenNode
from icebear.concepts.results.result import Relevance
from icebear.concepts.stages.stage_records import WholePart
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.records import Neuron

RANDOM_SOURCES = 40
"""Random sources of a circuit."""
FEWEST_RANDOM = 10
"""With fewer random sources that affect a target, its edges have no control."""
NO_DIFFERENCE = 1e-6
"""A target whose difference is no larger than this share of its larger value has no shares."""
PERCENTILE = 0.95
"""An edge is larger than random ones if its absolute effect is above this quantile of theirs."""


class EdgeMeasurement:
    """The interventions on tokens, nodes and random sources."""

    def __init__(
        self, model: Model, relevance: Relevance, targets: Sequence[EdgeTarget], whole_parts: Sequence[WholePart]
    ) -> None:
        """targets: the nodes, and the answer."""
        nodes = [target for target in targets if isinstance(target, Node)]
        self.targets, self.is_causal, self.token_count = targets, model.task.is_causal, len(relevance.tokens)
        self.random = _random_sources(model, nodes)
        token_nodes = [(node.neuron, node.position) for node in nodes]
        drawn = [(source.neuron, source.position) for source in self.random]
        sources = [*token_nodes, *drawn]
        self.of_tokens = FixedNeurons(model, relevance, token_nodes, whole_parts)
        self.of_nodes = FixedNeurons(model, relevance, sources, whole_parts, in_prompt=True)
        self.tokens = self.of_tokens.differing
        self.token_rows = [FixedPass(0), *(FixedPass(0, [token]) for token in self.tokens)]
        self.node_rows = [FixedPass(0), *map(self.of_nodes.exchanged, range(len(sources)))]

    @property
    def row_count(self) -> int:
        return len(self.token_rows) + len(self.node_rows)

    def effects(self, on_rows: Callable[[int], None]) -> tuple[Tensor, Tensor]:
        """Return the effects (K + 1, T + K) of tokens and nodes on nodes and the answer, and of random sources on each
        target the `PERCENTILE` of absolute effects (K + 1), NaN where there are fewer than `FEWEST_RANDOM`.

        An effect is the target's value in the prompt minus its value with the source exchanged.
        """
        count = len(self.targets) - 1
        of_tokens = self.of_tokens.measured(self.token_rows, count, on_rows)
        values = self.of_nodes.measured(self.node_rows, count, on_rows)
        tokens = of_tokens[:, :1] - of_tokens[:, 1:]
        nodes, random = (values[:, :1] - values[:, 1:]).split([count, len(self.random)], 1)
        effects = values.new_zeros(count + 1, self.token_count + count)
        effects[:, self.tokens], effects[:, self.token_count :] = tokens, nodes
        return effects, self._largest_of_random(random.abs(), NO_DIFFERENCE * values[:, :1].abs())

    def _largest_of_random(self, sizes: Tensor, rounding: Tensor) -> Tensor:
        result = sizes.new_full((len(self.targets),), torch.nan)
        for row, target in enumerate(self.targets):
            lower = torch.tensor([below(source, target, self.is_causal) for source in self.random])
            # Where heads are held, most tokens have no way to others.
            chosen = sizes[row][lower & (sizes[row] > rounding[row])]
            if len(chosen) >= FEWEST_RANDOM:
                result[row] = chosen.quantile(PERCENTILE)
        return result


def effect_shares(
    model: Model,
    relevance: Relevance,
    sources: Sequence[TokenNode],
    target: TokenNode | None,
    whole_parts: Sequence[WholePart] = (),
) -> list[float]:
    """Return the measured effect of each source on a target (None: the answer), as a share of its difference.

    Raises `InputError` if the target hardly differs."""
    ends = [target] if target else []
    values = node_values(relevance, ends)[:, 0]
    difference = values[0] - values[1]
    if hardly_differs(values):
        raise InputError(
            "The edge's target has the same value in both prompts, so there is no share; change the claim."
        )
    fixed = FixedNeurons(model, relevance, [*ends, *sources], whole_parts, in_prompt=True)
    exchanged = map(fixed.exchanged, range(len(ends), len(fixed.nodes)))
    numbers = fixed.measured([FixedPass(0), *exchanged], len(ends))[0]  # of the target, or of the answer alone
    return ((numbers[0] - numbers[1:]) / difference).tolist()


def hardly_differs(values: Tensor) -> Tensor:
    """Return whether the difference of values (2, ...) in both prompts is too small to be divided by."""
    return (values[0] - values[1]).abs() <= NO_DIFFERENCE * values.abs().amax(0)


def _random_sources(model: Model, nodes: Sequence[Node]) -> list[HeadOrNeuron]:
    """Draw heads and neurons that are no nodes, each of the site, layer and token of a random node."""
    generator = torch.Generator().manual_seed(0)
    taken = {(node.neuron, node.position) for node in nodes}
    drawn = []
    for number in torch.randint(len(nodes), (RANDOM_SOURCES,), generator=generator).tolist():
        node, width = nodes[number], model.heads if nodes[number].neuron.site == "head" else model.ffn_width
        others = [Neuron(node.neuron.layer, node.neuron.site, index) for index in range(width)]
        free = [other for other in others if (other, node.position) not in taken]
        if free:
            chosen = free[int(torch.randint(len(free), (1,), generator=generator))]
            taken.add((chosen, node.position))
            drawn.append(HeadOrNeuron(chosen, node.position))
    return drawn
