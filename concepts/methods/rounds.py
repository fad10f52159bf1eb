"""Difference rules in rounds: a node is chosen, and what is left of the difference is attributed anew.

In a round, the nodes that are chosen are recomputed, and all others are constants: their values in the prompt, or in
the counterfactual. The difference of these two runs, m(x) - m(K), is what the chosen nodes do not recover, and its
attribution to the constants by difference rules is exact. So nodes that work only together are found one after the
other, and a second node that does the same as a chosen one gets nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from icebear.concepts.methods.lrp import DIFFERENCE
from icebear.concepts.passes.patching import Nodes
from icebear.concepts.passes.run import Logits, Recorder, forward_backward
from icebear.concepts.passes.sites import hooks, neuron_site
from icebear.models.model import Model

MOST = 40
"""The largest number of rounds."""
LEFT = 0.05
"""Rounds end when less than this share of the difference is left."""


class Constants(Recorder):
    """Make constants of all nodes outside of a mask (L, T, W), in a row with the values of the prompt and a row with
    those of the counterfactual, and attribute the difference of the rows to them."""

    def __init__(self, nodes: Nodes, recomputed: Tensor) -> None:
        parts = zip(nodes.sites, recomputed.split(nodes.widths, -1), strict=True)
        self.recomputed: dict[str, Tensor] = dict(parts)
        self.nodes = nodes
        self.constants: dict[tuple[str, int], Tensor] = {}
        self.gains = torch.zeros(nodes.shape)

    def reading(self, model: Model) -> AbstractContextManager[None]:
        return hooks(model, [(neuron_site(s), n) for s in self.nodes.sites for n in range(model.layers)], self._mix)

    def _mix(self, site: str, layer: int, x: Tensor) -> Tensor:
        name = site if site in self.recomputed else "head"
        values = torch.stack([part[name][layer] for part in (self.nodes.own, self.nodes.there)]).to(x)
        constant = self.constants.setdefault((name, layer), values.requires_grad_())
        part = self.recomputed[name][layer].to(x.device)
        mask = part.repeat_interleave(x.shape[-1] // part.shape[-1], -1)
        return torch.where(mask, x, constant)

    @property
    def leaves(self) -> Sequence[Tensor]:
        return list(self.constants.values())

    def finish(self, gradients: Sequence[Tensor | None]) -> None:
        columns = dict(zip(self.nodes.sites, self.gains.split(self.nodes.widths, -1), strict=True))
        for ((name, layer), x), g in zip(self.constants.items(), gradients, strict=True):
            if g is not None:
                gains = (g[0] * (x[0] - x[1])).detach().float().cpu()
                columns[name][layer] = gains.unflatten(-1, (columns[name].shape[-1], -1)).sum(-1)


def gains(nodes: Nodes, recomputed: Tensor) -> tuple[Tensor, float]:
    """Return (L, T, W) what each node adds to m(x) - m(K), and that difference itself, where K is a mask."""
    constants = Constants(nodes, recomputed)
    numbers, _ = forward_backward(nodes.model, Logits(nodes.one.rows([0, 0])), [constants], DIFFERENCE)
    return constants.gains, (numbers[0] - numbers[1]).item()


def in_rounds(nodes: Nodes) -> Tensor:
    """Return scores (L, T, W) that rank nodes in the order in which rounds choose them.

    The others follow by the most that they add in any round.
    """
    chosen, largest = torch.zeros(nodes.shape, dtype=torch.bool), torch.zeros(nodes.shape)
    order: list[int] = []
    whole, none = nodes.ends
    while len(order) < MOST:
        values, left = gains(nodes, chosen)
        largest = torch.maximum(largest, values.abs())
        if abs(left) <= LEFT * abs(whole - none):
            break
        order.append(int(values.abs().masked_fill(chosen, -1).argmax()))
        chosen.view(-1)[order[-1]] = True
    ranks = largest / largest.max().clamp(min=1e-30)
    ranks.view(-1)[order] = torch.arange(len(order), 0, -1).float() + 1
    return ranks
