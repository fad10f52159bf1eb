"""The share of a prediction that a token or a neuron has."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from icebear.claims.kind import Explained, Measured, NodeId, check_node, others_of, scores_of
from icebear.errors import InputError
from icebear.models.model import Model


@dataclass(frozen=True, kw_only=True)
class RelevanceClaim(Explained):
    """A token (by its position, with its text) or a node has this share of the explained number. The control of a token
    is an equal part of all tokens that have relevance; of a node, the mean absolute share of random other neurons of
    its layer and token."""

    token: int | None = None
    text: str | None = None
    node: NodeId | None = None
    kind = "relevance"
    value_is = "share of the explained number"
    control_is = "the mean share of other tokens or neurons"

    def __post_init__(self) -> None:
        if (self.token is None) is (self.node is None):
            raise InputError("A claim of relevance is about a token or a node; give one of them.")

    def measure(self, model: Model, seed: int = 0) -> Measured:
        relevance = self.relevance(model, *([self.node.neuron.site] if self.node else []))
        total = relevance.conservation().target
        if not total:
            raise InputError("The explained number is 0, so shares of it cannot be measured; claim another prediction.")
        if self.node is None:
            assert self.token is not None
            strings = relevance.prompt.strings
            if strings[self.token : self.token + 1] != (self.text,):
                raise InputError(
                    f"Token {self.token} of the prompt is not {self.text!r} in {model.name}; correct the claim."
                )
            shares = (relevance.tokens / total).tolist()
            able = [share for share in shares if abs(share) > 1e-6]
            return Measured(shares[self.token], 1 / max(1, len(able)))
        check_node(model, relevance, self.node)
        neuron = self.node.neuron
        row = scores_of(relevance, neuron.site)[neuron.layer, self.node.position] / total
        others = others_of(model, neuron, seed)
        return Measured(row[neuron.index].item(), fmean(abs(row[one.index].item()) for one in others))

    def __str__(self) -> str:
        what = repr(self.text) if self.node is None else str(self.node)
        return f"{what} for {self.target!r} after {self.prompt!r}"
