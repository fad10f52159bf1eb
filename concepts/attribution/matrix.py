"""Which sentences of prompt and answer each sentence of an answer rests on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from icebear.concepts.attribution.parts import several
from icebear.concepts.attribution.units import Unit, summed, units_of
from icebear.concepts.methods.lrp import ATTNLRP, AttnLRP
from icebear.concepts.models.answer import Answer
from icebear.concepts.models.model import Model
from icebear.errors import InputError
from icebear.values import shown

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, eq=False)
class Matrix:
    """Relevance of each unit of prompt and answer for each unit of the answer."""

    rows: tuple[Unit, ...]
    """Of the answer; explained is the sum of its tokens' logits."""
    columns: tuple[Unit, ...]
    values: Tensor
    """(rows, columns)"""
    method: AttnLRP

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        rows, columns = ([vars(unit) for unit in part] for part in (self.rows, self.columns))
        return {"rows": rows, "columns": columns, "values": self.values.tolist(), "method": repr(self.method)}

    def to_frame(self) -> pandas.DataFrame:
        import pandas

        names = [f"{column.turn}: {column.text.strip()}" for column in self.columns]
        return pandas.DataFrame(self.values.numpy(), [row.text.strip() for row in self.rows], names)


def matrix(
    model: Model, answer: Answer, by: str = "sentence", method: AttnLRP = ATTNLRP, checkpoint: bool | None = None
) -> Matrix:
    """By ``sentence`` or another unit (`icebear.concepts.attribution.units`): one forward pass, a backward pass for
    each row. A row adds up to what `attribute` gives for its tokens as a span. Raises `InputError` for an answer of no
    tokens."""
    if not isinstance(answer, Answer):
        raise InputError(f"{shown(answer)} is not an answer; let the model give one (Model.answer).")
    if not isinstance(method, AttnLRP):
        raise InputError(f"{shown(method)} has no backward pass to share; use AttnLRP(...) or CP_LRP.")
    if not answer.ids:
        raise InputError("The answer is empty, so there is nothing to explain.")
    ids, begins = answer.before(len(answer.ids)), len(answer.prompt_ids)
    pieces = model.pieces(ids)
    parts = units_of(pieces, model.turns(ids, pieces), begins, by)
    rows = [part for part in parts if part.start >= begins and not part.template]
    if not rows:
        raise InputError("The answer has no words of its own, only marks of the chat's template.")
    values = several(model, ids, [range(row.start, row.stop) for row in rows], method, checkpoint=checkpoint)
    return Matrix(tuple(rows), tuple(parts), summed(values, parts), method)
