"""How much of a prediction passes through a concept: by relevance, and measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from icebear.concepts.methods.lrp import CP_LRP
from icebear.concepts.models.model import Model
from icebear.concepts.models.objective import objective_of
from icebear.concepts.models.prompts import Prompt, PromptLike
from icebear.concepts.passes.inputs import Inputs
from icebear.concepts.passes.neurons import BlockedNeurons
from icebear.concepts.passes.run import forward, forward_backward
from icebear.concepts.passes.targets import Logits
from icebear.edits import Edit
from icebear.steering.apply import steer

if TYPE_CHECKING:
    from icebear.steering.concept.concept import Concept


@dataclass(frozen=True)
class Through:
    """Of the logit of the most probable next token."""

    target: str
    logit: float
    relevance: float
    """The share of it that goes through the concept's neurons by CP-LRP: the tokens' relevance less that with those
    neurons blocked. Neurons in series do not count twice."""
    drop: float
    """The share of it that is lost when they take their means over the corpus, at all tokens but the first."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def through(model: Model, concept: Concept, prompt: PromptLike) -> Through:
    """Of what the model predicts behind a prompt."""
    asked = objective_of(model, [Prompt.of(prompt)])
    whole, past = Inputs(), Inputs()
    columns: dict[tuple[str, int], list[int]] = {}
    for part in concept.parts:
        columns.setdefault((part.neuron.site, part.neuron.layer), []).append(part.neuron.index)
    target = Logits(asked)
    logit = forward_backward(model, target, [whole], CP_LRP)[0][0].item()
    forward_backward(model, Logits(asked), [past, BlockedNeurons(columns)], CP_LRP)
    passing = whole.relevance()[0].sum().item() - past.relevance()[0].sum().item()
    (token,) = target.targets[0]
    length = len(model.ids(prompt))
    edits = [Edit(part.neuron, "set", part.mean, where=f"position:1-{length}") for part in concept.parts]
    with steer(model, edits):
        left = forward(model, Logits(objective_of(model, [Prompt.of(prompt)], [token])), [])[0].item()
    return Through(model.answer_text(token), logit, passing / logit, (logit - left) / logit)
