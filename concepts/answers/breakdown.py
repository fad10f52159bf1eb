"""The source breakdown: how much of an answer came from the context, the question and the answer's own start.

CP-LRP relevance of tokens (positive and negative) and biases adds up to the explained number. The share that passes
through FFN neurons is a second decomposition of the same number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from icebear.concepts.answers.units import Unit, units_of
from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.attribution.request import ObjectiveName, answer_request
from icebear.concepts.methods.attnlrp import CP_LRP
from icebear.concepts.nodes.controls import nodes_of
from icebear.concepts.passes.inputs import Inputs
from icebear.concepts.passes.neuron_recorders import BlockedNeurons
from icebear.concepts.passes.run import Logits, forward_backward
from icebear.concepts.results.result import Relevance
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.models.objective import Token, objective_of
from icebear.models.text.answer import Answer, Span
from icebear.models.text.prompts import Prompt, PromptLike, PromptRequest
from icebear.records import InNotebooks
from icebear.result_files import SavedResult
from icebear.values import typed


@dataclass(frozen=True)
class SourcePart:
    """A part of the prompt, the sums of the positive and negative relevance of its tokens, in logits, and its text."""

    name: str
    positive: float
    negative: float
    text: str

    @property
    def total(self) -> float:
        return self.positive + self.negative


@dataclass(frozen=True, repr=False)
class SourceBreakdown(SavedResult, InNotebooks):
    """How much each part of the prompt contributed to the explained number."""

    text: str
    target: float
    """The explained number, in logits: the sum of all parts, `biases` and `remainder`."""
    parts: tuple[SourcePart, ...]
    biases: float
    through_ffn: float
    """The share that passes through FFN neurons: relevance of the tokens minus that with all FFN neurons blocked."""
    drop: float | None
    """The share that is lost when all FFN neurons take their counterfactual values; None without a counterfactual."""
    relevance: Relevance = field(repr=False, compare=False)
    """The relevance of the tokens that the parts sum up."""

    @property
    def remainder(self) -> float:
        return self.target - self.biases - sum(part.total for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        values = {name: value for name, value in vars(self).items() if name != "relevance"}
        return {**values, "parts": [vars(part) for part in self.parts], "remainder": self.remainder}


@typed
def source_breakdown(
    model: Model,
    answer: Answer,
    span: Span | None = None,
    counterfactual: PromptLike | None = None,
    checkpoint: bool | None = None,
    contrast: Token | None = None,
    number: ObjectiveName = "logit",
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
    contrast : str or int, optional
        Explain the difference to this token or phrase, as `attribute` does: each part is what it contributes to the
        span minus what it contributes to the contrast.
    number : str
        ``logit`` or ``log-odds``, see `icebear.concepts.attribution.request.AttributeOptions`; without a contrast.

    Returns
    -------
    SourceBreakdown

    Raises
    ------
    InputError
        If the answer is of another model or has no such span, or there is a counterfactual and a contrast.

    References
    ----------
    CP-LRP: Ali et al. 2022, arXiv 2202.07304.
    """
    if counterfactual is not None and contrast is not None:
        raise InputError("Give a counterfactual or a contrast, not both.")
    answer.check(model)
    if answer.image is not None:
        raise InputError("A source breakdown is of texts; measure an answer about an image by `sources`.")
    start, stop = answer.token_range(span)
    options: dict[str, Any] = {"number": number if contrast is None else None, "checkpoint": checkpoint}
    relevance = attribute(model, answer, contrast=contrast, span=(start, stop), method=CP_LRP, sites=(), **options)
    drop = None
    if counterfactual is not None:
        explained, other = answer.ids[start:stop], Prompt(ids=(*model.ids(counterfactual), *answer.ids[:start]))
        paired = attribute(model, answer.before(start), target_text=[explained], counterfactual=other, sites=("ffn",))
        complete, without = nodes_of(model, paired).extremes
        drop = (complete - without) / complete
    target = relevance.sums.target
    past = _past_ffn(model, answer_request(model, answer, (start, stop), contrast, None), relevance, checkpoint)
    through = (relevance.sums.tokens - past) / target if target else 0.0
    text = "".join(answer.token_strings[start:stop])
    return SourceBreakdown(text, target, _parts(relevance), relevance.sums.biases, through, drop, relevance)


def _parts(relevance: Relevance) -> tuple[SourcePart, ...]:
    """Return the sums of the relevance of tokens over the parts of the prompt, and over the start of a contrast."""
    names, contrast = part_names(relevance), relevance.contrast_phrase
    tokens = list(zip(names, relevance.tokens.tolist(), relevance.prompt.strings, strict=True))
    if contrast:
        values = zip((-contrast.tokens).tolist(), contrast.strings, strict=True)
        tokens += [("the contrast's own start", value, text) for value, text in values]
    parts = []
    for name in dict.fromkeys(name for name, _, _ in tokens):
        part_tokens = [(value, text) for token_name, value, text in tokens if token_name == name]
        signs = ([value for value, _ in part_tokens if (value > 0) is sign] for sign in (True, False))
        positive, negative = (sum(values, 0.0) for values in signs)
        parts.append(SourcePart(name, positive, negative, "".join(text for _, text in part_tokens)))
    return tuple(parts)


def _past_ffn(model: Model, row: PromptRequest, relevance: Relevance, checkpoint: bool | None) -> float:
    """Return the sum of the CP-LRP relevance of tokens that passes through no FFN neuron."""
    kind, sums = relevance.run.objective.kind, []
    contrast = row.contrast_phrase or (None if row.contrast is None else (row.contrast,))
    for ids in filter(None, (row.answer, contrast)):
        target, inputs = objective_of(model, [row.prompt], target_text=[ids], kind=kind), Inputs()
        ffn = BlockedNeurons("ffn")
        forward_backward(model, Logits(target), [inputs, ffn], CP_LRP, checkpoint=checkpoint)
        sums.append(inputs.relevance()[0].sum().item())
    return sums[0] - sum(sums[1:])


def part_names(relevance: Relevance) -> list[str]:
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
    return ["sinks" if position in sinks and label != "template" else label for position, label in enumerate(named)]
