"""The source breakdown: how much of an answer came from the context, the question and the answer's own start.

CP-LRP relevance of tokens (positive and negative) and biases adds up to the explained logits. The share that passes
through FFN neurons is a second decomposition of the same number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.attribution.controls import Nodes
from icebear.concepts.attribution.result import Relevance
from icebear.concepts.attribution.units import Unit, units_of
from icebear.concepts.methods.lrp import CP_LRP
from icebear.concepts.models.answer import Answer, Span
from icebear.concepts.models.model import Model
from icebear.concepts.models.objective import objective_of
from icebear.concepts.models.prompts import Prompt, PromptLike
from icebear.concepts.passes.inputs import Inputs
from icebear.concepts.passes.neurons import BlockedNeurons
from icebear.concepts.passes.run import Logits, forward_backward


@dataclass(frozen=True)
class SourcePart:
    """A part of the prompt, and the sums of the positive and negative relevance of its tokens, in logits."""

    name: str
    positive: float
    negative: float


@dataclass(frozen=True)
class SourceBreakdown:
    """How much each part of the prompt contributed to the explained logits."""

    text: str
    target: float
    """The sum of the logits of the explained tokens: the sum of all parts, `biases` and `remainder`."""
    parts: tuple[SourcePart, ...]
    biases: float
    through_ffn: float
    """The share that passes through FFN neurons: relevance of the tokens minus that with all FFN neurons blocked."""
    drop: float | None
    """The share that is lost when all FFN neurons take their counterfactual values; None without a counterfactual."""

    @property
    def remainder(self) -> float:
        return self.target - self.biases - sum(part.positive + part.negative for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "remainder": self.remainder}


def source_breakdown(
    model: Model,
    answer: Answer,
    span: Span | None = None,
    counterfactual: PromptLike | None = None,
    checkpoint: bool | None = None,
) -> SourceBreakdown:
    """Measure how much of an answer came from the context, the question and the answer's own start.

    The question is the last sentence of the last user message (or of a plain prompt), and the context is what comes
    before it in this message. Earlier messages, sinks and the tokens of a chat's template are parts of their own.

    Parameters
    ----------
    model : Model
    answer : Answer
    span : (int, int) or str, optional
        The tokens [i, j) of the answer, or a phrase of it. Default: the whole answer.
    counterfactual : prompt, optional
        Also measure `SourceBreakdown.drop`.
    checkpoint : bool, optional
        Keep one residual stream per layer and recompute the rest. Default: from 2,048 tokens on.

    Returns
    -------
    SourceBreakdown

    Raises
    ------
    InputError
        If the answer has no such span.

    References
    ----------
    CP-LRP: Ali et al. 2022, arXiv 2202.07304.
    """
    start, stop = answer.token_range(span)
    explained = answer.ids[start:stop]
    relevance = attribute(
        model, answer, span=(start, stop), method=CP_LRP, sites=(), number="logit", checkpoint=checkpoint
    )
    target, names = relevance.sums.target, _named(relevance)
    parts = []
    for name in dict.fromkeys(names):
        values = relevance.tokens[[place for place, own in enumerate(names) if own == name]]
        parts.append(SourcePart(name, values.clamp(min=0).sum().item(), values.clamp(max=0).sum().item()))
    drop = None
    if counterfactual is not None:
        other = Prompt(ids=(*model.ids(counterfactual), *answer.ids[:start]))
        compared = attribute(model, answer.before(start), target_text=[explained], counterfactual=other, sites=("ffn",))
        whole, without = Nodes.of(model, compared).ends
        drop = (whole - without) / whole
    past = _past_ffn(model, answer.before(start), explained, checkpoint)
    through = (relevance.tokens.sum().item() - past) / target
    text = "".join(answer.token_strings[start:stop])
    return SourceBreakdown(text, target, tuple(parts), relevance.sums.biases, through, drop)


def _past_ffn(model: Model, read: Sequence[int], explained: tuple[int, ...], checkpoint: bool | None) -> float:
    """Return the sum of the CP-LRP relevance of tokens that passes through no FFN neuron."""
    target, inputs = objective_of(model, [Prompt(ids=tuple(read))], target_text=[explained]), Inputs()
    ffn = BlockedNeurons({("ffn", layer): slice(None) for layer in model.layers_with("ffn")})
    forward_backward(model, Logits(target), [inputs, ffn], CP_LRP, checkpoint=checkpoint)
    return inputs.relevance()[0].sum().item()


def _named(relevance: Relevance) -> list[str]:
    """Return the name of the part that each token belongs to."""
    parts = units_of(relevance.prompt.strings, relevance.prompt.turns, relevance.prompt.answer_start, "sentence")
    users = [part for part in parts if not part.template and part.turn.startswith(("user", "prompt"))]
    last = [part for part in users if part.turn == users[-1].turn] if users else []

    def name(part: Unit) -> str:
        if part.template:
            return "template"
        if part in last:
            return "question" if part == last[-1] else "context"
        return "the answer's own start" if part.turn == "answer" else part.turn

    named = [name(part) for part in parts for _ in range(part.start, part.stop)]
    sinks = relevance.prompt.sinks
    return ["sinks" if place in sinks and own != "template" else own for place, own in enumerate(named)]
