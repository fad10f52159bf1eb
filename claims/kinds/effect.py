"""The words that a node raises and lowers."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from icebear.claims.kind import Explained, Measured, NodeId, check_node, others_of
from icebear.concepts.results.effects import Patched
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.records import Ranked


@dataclass(frozen=True, kw_only=True)
class EffectClaim(Explained):
    """A node raises the logits of some tokens and lowers those of others: its mean effect on the raised ones (in
    logits, relative to the likely next tokens) minus that on the lowered ones. The control is the mean absolute effect
    of random other neurons of its layer and token."""

    node: NodeId
    raises: tuple[str, ...] = ()
    lowers: tuple[str, ...] = ()
    kind = "effect"
    value_is = "effect on the raised less the lowered tokens, in logits"
    control_is = "the mean effect of other neurons of its layer"

    def measure(self, model: Model, seed: int = 0) -> Measured:
        raised, lowered = ([model.answer_id(word, "word") for word in words] for words in (self.raises, self.lowers))
        if not raised + lowered:
            raise InputError("A claim of an effect needs tokens that are raised or lowered; give some.")
        relevance = self.relevance(model, self.node.neuron.site)
        check_node(model, relevance, self.node)
        patched = Patched(model, relevance)
        likely = patched.token_ids
        neurons = [self.node.neuron, *others_of(model, self.node.neuron, seed)]
        patched.token_ids = ids = list(dict.fromkeys([*likely, *raised, *lowered]))
        matrix, *_ = patched.effects([[Ranked(neuron, self.node.position, None, 0.0)] for neuron in neurons])
        matrix = matrix - matrix[:, : len(likely)].mean(1, keepdim=True)
        values = matrix.new_zeros(len(neurons))
        for words, sign in ((raised, 1), (lowered, -1)):
            if words:
                values += sign * matrix[:, [ids.index(word) for word in words]].mean(1)
        own, *random = values.tolist()
        return Measured(own, fmean(map(abs, random)))

    def __str__(self) -> str:
        raised, lowered = ", ".join(map(repr, self.raises)), ", ".join(map(repr, self.lowers))
        return f"{self.node} raises {raised or 'nothing'}, lowers {lowered or 'nothing'} after {self.prompt!r}"
