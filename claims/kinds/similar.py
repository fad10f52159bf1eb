"""How much the nodes of two models overlap."""

from __future__ import annotations

from dataclasses import dataclass

from icebear.claims.kind import Measured, mask_of, most_relevant, site_of
from icebear.claims.kinds.nodes import NodesClaim
from icebear.models.model import Model


@dataclass(frozen=True, kw_only=True)
class SimilarClaim(NodesClaim):
    """This share of a model's nodes is among as many most relevant nodes in the model that is checked. The control is
    the share of random nodes of the same layers and tokens."""

    kind = "similar"
    value_is = "share of the nodes that both models have"
    control_is = "that of random nodes of the same layers and tokens"

    def measure(self, model: Model, seed: int = 0) -> Measured:
        site = site_of(self.nodes)
        relevance = self.relevance(model, site)
        listed = mask_of(model, relevance, self.nodes)
        best = mask_of(model, relevance, most_relevant(relevance, site, len(self.nodes)))
        by_chance = (listed.sum(-1) * best.sum(-1) / listed.shape[-1]).sum().item()
        return Measured(int((listed & best).sum()) / len(self.nodes), by_chance / len(self.nodes))
