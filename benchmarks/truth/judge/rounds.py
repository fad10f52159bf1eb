"""`Rounds`: a node is chosen in each round, and what is left of the difference is attributed anew.

1. The chosen nodes are recomputed. All others are constants: their values in the prompt, or in the counterfactual.
2. The difference of these two runs, m(x) - m(K), is what the chosen nodes do not recover; difference rules attribute it
   to the constants, exactly.
3. The node with the largest part is chosen. The rounds end when little is left.

So nodes that work only together are found one after the other, and a second node that does the same as a chosen one
gets nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from icebear.concepts.methods.difference_rules import DIFFERENCE
from icebear.concepts.methods.method import Method
from icebear.concepts.methods.pair import Pair, PairResult
from icebear.concepts.passes.patching import PatchableNodes
from icebear.concepts.passes.run import Logits, Recorder, forward_backward
from icebear.concepts.passes.sites import hooks, neuron_site
from icebear.concepts.passes.storage import SiteValues
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.values import check_int

LEFT = 0.05
"""Rounds end when less than this share of the difference is left."""


class Constants(Recorder):
    """Make constants of all nodes outside of a mask (L, T, W), in a row with the values of the prompt and a row with
    those of the counterfactual, and attribute the difference of the rows to them."""

    def __init__(self, nodes: PatchableNodes, recomputed: Tensor) -> None:
        parts = zip(nodes.sites, recomputed.split(nodes.widths, -1), strict=True)
        self.recomputed: dict[str, Tensor] = dict(parts)
        self.nodes = nodes
        self.constants: dict[tuple[str, int], Tensor] = {}
        self.gains = {site: torch.zeros_like(x, dtype=torch.float32) for site, x in nodes.activation.items()}

    def reading(self, model: Model) -> AbstractContextManager[None]:
        names = map(neuron_site, self.nodes.sites)
        return hooks(model, [(name, layer) for name in names for layer in model.layers_with(name)], self._mix)

    def _mix(self, site: str, layer: int, x: Tensor) -> Tensor:
        name = site if site in self.recomputed else "head"
        values = torch.stack([part[name][layer] for part in (self.nodes.activation, self.nodes.counterfactual)]).to(x)
        constant = self.constants.setdefault((name, layer), values.requires_grad_())
        part = self.recomputed[name][layer].to(x.device)
        mask = part.repeat_interleave(x.shape[-1] // part.shape[-1], -1)
        return torch.where(mask, x, constant)

    @property
    def leaves(self) -> Sequence[Tensor]:
        return list(self.constants.values())

    def finish(self, gradients: Sequence[Tensor | None]) -> None:
        for ((name, layer), x), g in zip(self.constants.items(), gradients, strict=True):
            if g is not None:
                self.gains[name][layer] = (g[0] * (x[0] - x[1])).detach().float().cpu()


def gains(nodes: PatchableNodes, recomputed: Tensor) -> tuple[dict[str, Tensor], float]:
    """Return what each node adds to m(x) - m(K), by site (L, T, N), and that difference, where K is a mask (L, T, W).

    The gain of a head is the sum of its columns.
    """
    constants = Constants(nodes, recomputed)
    numbers, _ = forward_backward(nodes.model, Logits(nodes.objective.rows([0, 0])), [constants], DIFFERENCE)
    return constants.gains, (numbers[0] - numbers[1]).item()


def in_rounds(nodes: PatchableNodes, most: int) -> dict[str, Tensor]:
    """Return by site (L, T, N) what a chosen node added in its round, and what any other node would add after all."""
    chosen = torch.zeros(nodes.shape, dtype=torch.bool)
    result: dict[str, Tensor] = {}
    complete, compared = nodes.ends
    for count in range(most + 1):
        values, left = gains(nodes, chosen)
        masks = zip(nodes.sites, chosen.split(nodes.widths, -1), strict=True)
        before = {site: mask.repeat_interleave(values[site].shape[-1] // mask.shape[-1], -1) for site, mask in masks}
        result = {site: torch.where(before[site], result[site], x) if result else x for site, x in values.items()}
        if count == most or abs(left) <= LEFT * abs(complete - compared):
            break
        by_node = nodes.side_by_side(values, lambda x: x.sum(-1))
        chosen.view(-1)[by_node.abs().masked_fill(chosen, -1).argmax()] = True
    return result


@dataclass(frozen=True, repr=False)
class Rounds(Method):
    """Difference rules in rounds: a node is chosen, then what is left of the difference is attributed anew.

    The relevance of a chosen node is what it adds in its round; heads are chosen whole. It finds nodes that work only
    together, and one of two that do the same. The relevance of tokens is that of difference rules.

    Parameters
    ----------
    rounds
        The number of nodes that are chosen at most; each takes a pass.
    """

    rounds: int = 40
    scores_neurons = True
    needs_counterfactual = needs_equal_length = True

    def __post_init__(self) -> None:
        check_int(self.rounds, "The number of rounds")

    def compare(self, pair: Pair) -> PairResult:
        """Raises `InputError` for two stacks of layers."""
        if pair.model.task.stacks == 2:
            raise InputError("Rounds need one stack of layers, and an encoder-decoder has two; leave out --method.")
        result = DIFFERENCE.compare(replace(pair, record="all", k=None))
        named = {"head" if site == "attn" else site: site for site in pair.sites}
        activation, other = (
            {name: x[site] for name, site in named.items()} for x in (result.activation, result.counterfactual)
        )
        relevance = {}
        if named:
            nodes = PatchableNodes(
                pair.model, result.objective.rows([0]), tuple(named), activation, other, result.numbers[1]
            )
            relevance = {named[name]: x for name, x in in_rounds(nodes, self.rounds).items()}
        parts = (relevance, result.activation, result.counterfactual)
        recorded = [SiteValues({site: x[:, list(pair.recorded)] for site, x in values.items()}) for values in parts]
        return replace(result, relevance=recorded[0], activation=recorded[1], counterfactual=recorded[2])
