"""Sufficiency and necessity of a list of nodes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from icebear.claims.kind import Explained, Measured, NodeId, mask_of, site_of
from icebear.concepts.nodes.controls import Ablation, ablate, nodes_of
from icebear.models.model import Model


@dataclass(frozen=True, kw_only=True)
class NodesClaim(Explained):
    """A claim about a list of nodes."""

    nodes: tuple[NodeId, ...]

    def ablation(self, model: Model, seed: int) -> Ablation:
        site = site_of(self.nodes)
        relevance = self.relevance(model, site)
        nodes = nodes_of(model, relevance, site)
        return ablate(nodes, mask_of(model, relevance, self.nodes), torch.Generator().manual_seed(seed))

    def __str__(self) -> str:
        count = f"{len(self.nodes)} node{'s' * (len(self.nodes) != 1)}"
        return f"{count} for {self.target!r}, not {self.contrast!r}, after {self.prompt!r}"


@dataclass(frozen=True, kw_only=True)
class SufficiencyClaim(NodesClaim):
    """These nodes alone recover this share of the difference (docs/compare.md). The control is as many random nodes."""

    kind = "sufficiency"
    value_is = "sufficiency"
    control_is = "that of random nodes (docs/compare.md)"

    def measure(self, model: Model, seed: int = 0) -> Measured:
        measured = self.ablation(model, seed)
        return Measured(measured.sufficiency, measured.random_sufficiency)


@dataclass(frozen=True, kw_only=True)
class NecessityClaim(NodesClaim):
    """Without these nodes this share of the difference is lost. The control is that of `sufficiency`."""

    kind = "necessity"
    value_is = "necessity"
    control_is = "that of random nodes (docs/compare.md)"

    def measure(self, model: Model, seed: int = 0) -> Measured:
        measured = self.ablation(model, seed)
        return Measured(measured.necessity, measured.random_necessity)
