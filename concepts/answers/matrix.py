"""The sentence attribution matrix: relevance of each sentence of prompt and answer for each sentence of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from icebear.concepts.answers.units import Unit, summed, units_of
from icebear.concepts.methods.lrp import ATTNLRP, AttnLRP
from icebear.concepts.passes.inputs import Inputs, Stream
from icebear.concepts.passes.run import Target, forward_backward
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.models.text.answer import Answer
from icebear.values import shown, typed

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, eq=False)
class Matrix:
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
        The unit of rows and columns: ``token``, ``word``, ``sentence``, ``turn`` or ``document``.
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
    inputs, stream = _InputsOfEachPass(), Stream(model, model.read_ids([ids]))
    forward_backward(model, _UnitLogits(ids, rows), [inputs, stream], method, checkpoint=checkpoint)
    return Matrix(tuple(rows), tuple(parts), summed(torch.stack(inputs.passes), parts), method)


class _UnitLogits(Target):
    """For each unit the sum of the logits of its tokens, each where it is predicted."""

    def __init__(self, ids: list[int], units: Sequence[Unit]) -> None:
        self.ids, self.units = ids, units

    def numbers(self, model: Model) -> list[Tensor]:
        start = self.units[0].start
        logits = model.logits(model.read_ids([self.ids]), list(range(start - 1, len(self.ids) - 1)))[0]  # (P, V)
        token_logits = logits[range(len(logits)), self.ids[start:]]
        return [token_logits[unit.start - start : unit.stop - start].sum()[None] for unit in self.units]


class _InputsOfEachPass(Inputs):
    """Keeps the relevance of the tokens (T,) of every backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[Tensor] = []

    def finish(self, gradients: Sequence[Tensor | None]) -> None:
        super().finish(gradients)
        self.passes.append(self.relevance()[0][0].sum(-1).cpu())
