"""Relevance of tokens summed over words, sentences, messages and documents; the same for each sentence of an answer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from icebear.concepts.methods.attnlrp import ATTNLRP, AttnLRP
from icebear.concepts.passes.inputs import Inputs, Stream
from icebear.concepts.passes.prompt import summed_over_width
from icebear.concepts.passes.run import Target, forward_backward
from icebear.concepts.results.result import Relevance
from icebear.errors import InputError
from icebear.models.batch import Batch
from icebear.models.model import Model
from icebear.models.prompt_image import PromptImage
from icebear.models.text.answer import Answer
from icebear.models.text.chat import Turn
from icebear.models.text.splitting import covering
from icebear.records import InNotebooks
from icebear.result_files import SavedResult
from icebear.values import one_of, shown, typed

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Unit:
    """A span of tokens [start, stop)."""

    text: str
    start: int
    stop: int
    turn: str
    """``prompt``, ``answer``, or a role of a chat, numbered if it has several turns."""
    template: bool = False
    """Whether the span belongs to the template of a chat."""


@typed
def units(relevance: Relevance, by: str = "sentence") -> list[tuple[Unit, float]]:
    """Sum the relevance of tokens over units. Tokens of a chat's template are separate units.

    Parameters
    ----------
    relevance : Relevance
    by : str
        ``token``, ``word``, ``sentence``, ``message`` or ``document`` (parts between empty lines).

    Returns
    -------
    list of (Unit, float)

    Raises
    ------
    InputError
        If `by` is not a unit.
    """
    rows = units_of(relevance.prompt.strings, relevance.prompt.turns, relevance.prompt.answer_start, by)
    return list(zip(rows, summed(relevance.tokens, rows).tolist(), strict=True))


def units_of(pieces: Sequence[str], turns: Sequence[Turn], answer_start: int | None, by: str) -> list[Unit]:
    """Split tokens, given as texts, into units. The units cover all tokens in order."""
    one_of(by, "unit", SPLIT)
    result = []
    for turn, start, stop, template in _regions(len(pieces), turns, answer_start):
        if by == "token":
            cuts = list(range(start, stop + 1))
        else:
            cuts = [start, stop] if template else [start, *_cuts(pieces[start:stop], SPLIT[by], start), stop]
        for begin, end in pairwise(cuts):
            if begin < end:
                result.append(Unit("".join(pieces[begin:end]), begin, end, turn, template))
    return result


def summed(values: Tensor, parts: Sequence[Unit]) -> Tensor:
    """Sum values (..., T) over units (..., U)."""
    return torch.stack([values[..., part.start : part.stop].sum(-1) for part in parts], -1)


def _regions(count: int, turns: Sequence[Turn], answer_start: int | None) -> Iterator[tuple[str, int, int, bool]]:
    """Yield (turn, start, stop, whether it is the template's) of each region."""
    begins = count if answer_start is None else answer_start
    if not turns:
        yield from (("prompt", 0, begins, False), ("answer", begins, count, False))
        return
    several = {role for role, number in Counter(turn.role for turn in turns).items() if number > 1}
    numbers: Counter[str] = Counter()
    for turn in turns:
        numbers[turn.role] += 1
        name = f"{turn.role} {numbers[turn.role]}" if turn.role in several else turn.role
        name = "answer" if turn.text_start >= begins else name
        yield name, turn.start, turn.text_start, True
        yield name, turn.text_start, min(turn.text_stop, max(begins, turn.text_start)), False
        yield "answer", max(turn.text_start, min(begins, turn.text_stop)), turn.text_stop, False
        yield name, turn.text_stop, turn.stop, True
    behind = turns[-1].stop
    yield from (("prompt", behind, max(behind, begins), False), ("answer", max(behind, begins), count, False))


def _cuts(pieces: Sequence[str], split: Callable[[str], list[str]], start: int) -> list[int]:
    """Return the tokens where parts of the text begin. A token belongs to the part of its first letter."""
    parts = split("".join(pieces))
    ends = list(accumulate(map(len, parts)))
    begins = list(accumulate(map(len, pieces), initial=0))
    where = []
    for index, piece in enumerate(pieces):
        letter = begins[index] + len(piece) - len(piece.lstrip()) if piece.strip() else begins[index]
        where.append(sum(end <= letter for end in ends))
    return [start + index for index in range(1, len(where)) if where[index] > where[index - 1]]


SPLIT: dict[str, Callable[[str], list[str]]] = {
    "token": list,
    "word": re.compile(r"\s*\S+|\s+").findall,
    "sentence": covering,
    "message": lambda text: [text],
    "document": re.compile(r"(?s).+?(?:\n\s*\n|$)").findall,
}


@dataclass(frozen=True, eq=False, repr=False)
class Matrix(SavedResult, InNotebooks):
    """Relevance of each unit of prompt and answer (columns) for each unit of the answer (rows), in logits."""

    rows: tuple[Unit, ...]
    """The units of the answer. The sum of the logits of a unit's tokens is explained."""
    columns: tuple[Unit, ...]
    values: Tensor
    """(rows, columns)"""
    method: AttnLRP

    def to_dict(self) -> dict[str, Any]:
        rows, columns = ([vars(unit) for unit in part] for part in (self.rows, self.columns))
        return {"rows": rows, "columns": columns, "values": self.values.tolist(), "method": repr(self.method)}

    def to_frame(self) -> pandas.DataFrame:
        import pandas

        names = [f"{column.turn}: {column.text.strip()}" for column in self.columns]
        return pandas.DataFrame(self.values.numpy(), [row.text.strip() for row in self.rows], names)


@typed
def matrix(
    model: Model, answer: Answer, by: str = "sentence", method: AttnLRP = ATTNLRP, checkpoint: bool | None = None
) -> Matrix:
    """Explain each sentence of an answer by the sentences before it.

    One forward pass and one backward pass for each row. A row adds up to the relevance that `attribute` gives for its
    tokens as a span.

    Parameters
    ----------
    model : Model
    answer : Answer
        An answer of `Model.answer`.
    by : str
        The unit of rows and columns: ``token``, ``word``, ``sentence``, ``message`` or ``document``.
    method : AttnLRP
        The relevance rules.
    checkpoint : bool, optional
        Keep one residual stream per layer and recompute the rest. By default from 2,048 tokens on.

    Returns
    -------
    Matrix

    Raises
    ------
    InputError
        If the answer is empty or of another model, or the method is not a set of relevance rules.
    """
    if not isinstance(answer, Answer):
        raise InputError(f"{shown(answer)} is not an answer object; get one from Model.answer.")
    if not isinstance(method, AttnLRP):
        raise InputError(f"{shown(method)} cannot compute an attribution matrix; use AttnLRP(...) or CP_LRP.")
    answer.check(model)
    if not answer.ids:
        raise InputError("The answer is empty, so there is nothing to explain; give another prompt.")
    ids, begins = answer.before(len(answer.ids)), len(answer.prompt_ids)
    pieces = model.pieces(ids)
    parts = units_of(pieces, model.turns(ids, pieces), begins, by)
    rows = [part for part in parts if part.start >= begins and not part.template]
    if not rows:
        raise InputError(
            "The answer has only tokens of the chat template; give a prompt that the model answers with text."
        )
    batch = answer_batch(model, ids, answer.image)
    values = span_relevance(model, batch, [(row.start, row.stop) for row in rows], method, checkpoint)
    return Matrix(tuple(rows), tuple(parts), summed(values, parts), method)


def answer_batch(model: Model, ids: list[int], image: PromptImage | None) -> Batch:
    """Return the tokens of a prompt and its answer, with the image that the prompt is about."""
    return replace(model.read_ids([ids]), images=(image,) if image else None)


def span_relevance(
    model: Model, batch: Batch, spans: Sequence[tuple[int, int]], method: AttnLRP, checkpoint: bool | None = None
) -> Tensor:
    """Return the relevance (spans, T) of all tokens for the sum of the logits of each span of tokens, by one forward
    pass and a backward pass each. batch: of `answer_batch`."""
    inputs, stream = _InputsOfEachPass(model, batch), Stream(model, batch)
    forward_backward(model, _SpanLogits(batch, spans), [inputs, stream], method, checkpoint=checkpoint)
    return torch.stack(inputs.passes)


class _SpanLogits(Target):
    """For each span the sum of the logits of its tokens, each where it is predicted."""

    def __init__(self, batch: Batch, spans: Sequence[tuple[int, int]]) -> None:
        self.batch: Batch = batch
        self.spans = spans

    def numbers(self, model: Model) -> list[Tensor]:
        ids, start = self.batch.row_ids(0), min(start for start, _ in self.spans)
        logits = model.logits(self.batch, list(range(start - 1, len(ids) - 1)))[0]  # (P, V)
        token_logits = logits[range(len(logits)), ids[start:]]
        return [token_logits[begin - start : end - start].sum()[None] for begin, end in self.spans]


class _InputsOfEachPass(Inputs):
    """Keeps the relevance of the tokens (T,) of every backward pass."""

    def __init__(self, model: Model, batch: Batch) -> None:
        super().__init__()
        self.model, self.batch = model, batch
        self.passes: list[Tensor] = []

    def finish(self, gradients: Sequence[Tensor | None]) -> None:
        super().finish(gradients)
        parts = self.batch.of_row(0, self.relevance())
        self.passes.append(summed_over_width(self.model, self.batch, 0, parts))
