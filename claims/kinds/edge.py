"""An edge of a circuit."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from icebear.claims.kind import Explained, Measured, NodeId, check_node, others_of
from icebear.concepts.circuits.circuit import contribution_shares
from icebear.concepts.circuits.nodes import node_sites
from icebear.errors import InputError
from icebear.models.model import Model


@dataclass(frozen=True, kw_only=True)
class EdgeClaim(Explained):
    """The source contributes this share of the target's difference between both prompts, through no other neuron. The
    control is the mean absolute share of random other neurons of the source's layer and token."""

    source: NodeId
    into: NodeId | Literal["answer"] = "answer"
    """The target of the edge."""
    kind = "edge"
    value_is = "share of the difference of the edge's target"
    control_is = "the mean share of other neurons of the source's layer"

    def measure(self, model: Model, seed: int = 0) -> Measured:
        if self.counterfactual is None:
            raise InputError("A claim of an edge needs a counterfactual; give one.")
        ends = [self.source] + ([self.into] if isinstance(self.into, NodeId) else [])
        relevance = self.relevance(model, *node_sites(model, any(node.neuron.site == "head" for node in ends)))
        for node in ends:
            check_node(model, relevance, node)
        others = others_of(model, self.source.neuron, seed)
        places = [
            *((node.neuron, node.position) for node in ends),
            *((other, self.source.position) for other in others),
        ]
        row = contribution_shares(model, relevance, places)[1 if len(ends) == 2 else len(places)]
        shares = row[len(relevance.tokens) :].tolist()
        return Measured(shares[0], fmean(map(abs, shares[len(ends) : len(places)])))

    def __str__(self) -> str:
        return f"{self.source} to {self.into} after {self.prompt!r}"
