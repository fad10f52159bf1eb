"""What a relevance says of its prompt and of the model, whatever the method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from icebear.concepts.methods.method import Method
from icebear.concepts.models import images
from icebear.concepts.models.batch import Batch
from icebear.concepts.models.chat import outside
from icebear.concepts.models.model import Model
from icebear.concepts.models.plan import Plan
from icebear.concepts.models.provenance import provenance
from icebear.concepts.passes.stream import Stream
from icebear.values import several, whole

Recorded = Literal["all", "last"] | Sequence[int]


def said(
    model: Model,
    plan: Plan,
    row: int,
    targets: tuple[int, ...],
    logits: Tensor,
    method: Method,
    strings: tuple[str, ...],
) -> dict[str, Any]:
    """Of a prompt, its tokens' texts, and what is predicted; logits (B, P, V) at the plan's `needed` positions."""
    here = logits[row, plan.needed.index(plan.positions[row][0])].float()  # (V,)
    contrast = plan.contrasts[row]
    ids = plan.batch.row_ids(row)
    return {
        "token_ids": ids,
        "token_strings": strings,
        "turns": model.turns(ids, strings) if model.task.looks_back else (),
        "explained_at": plan.explained_at(row),
        "read": plan.batch.lengths[row],
        "target": model.token_score(here, targets[0]) if len(targets) == 1 else None,
        "target_text": "".join(model.answer_text(token) for token in targets),
        "contrast": None if contrast is None else model.token_score(here, contrast),
        "predictions": tuple(model.top_tokens(here, 10)),
        "method": method,
        "number": plan.number,
        "head_count": model.heads,
        "made_with": provenance(model),
    }


def token_relevance(model: Model, plan: Plan, row: int, parts: list[Tensor]) -> tuple[Tensor, images.ImageMap | None]:
    """(T,) of the relevance of what each stack reads (T, D), or of an image's pixels (C, H, W)."""
    columns, image = plan.batch.columns(row), None
    if plan.batch.pixels is not None:
        image = images.image_map(model, plan.batch.pixels[row], parts[0])
        patches = image.patches.flatten()
        found = torch.cat((torch.zeros(len(columns) - len(patches), dtype=patches.dtype), patches))
    else:
        found = torch.cat([part.sum(-1) for part in parts])[columns].cpu()
    return found, image


def kept_at(plan: Plan, row: int, record: Recorded) -> tuple[int, ...]:
    """The positions whose neurons are kept."""
    return kept_of(plan.explained_at(row), len(plan.batch.columns(row)), record)


def kept_of(explained_at: tuple[int, ...], count: int, record: Recorded) -> tuple[int, ...]:
    """The same of a prompt of `count` tokens. Raises `InputError`."""
    if isinstance(record, str) and record in ("all", "last"):
        return tuple(range(count)) if record == "all" else explained_at
    what = "A position to record, if it is not all or last,"
    return tuple(sorted({whole(position, what, -count, count - 1) % count for position in several(record)}))


def unranked(model: Model, batch: Batch, stream: Stream, row: int) -> tuple[int, ...]:
    """Positions that a ranking sets apart: sinks, and what a chat's template wrote."""
    ids = batch.row_ids(row)
    turns = model.turns(ids, model.pieces(ids)) if model.task.looks_back else ()
    return (*stream.sinks(row), *outside(turns, len(ids)))
