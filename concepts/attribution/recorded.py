"""What is recorded of a pass, whatever the method: positions, and the relevance of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from icebear.concepts.models import images
from icebear.concepts.models.chat import outside
from icebear.concepts.models.model import Model
from icebear.concepts.models.objective import Objective
from icebear.concepts.models.prompts import Batch
from icebear.concepts.passes.stream import Stream
from icebear.values import several, whole

Recorded = Literal["all", "last"] | Sequence[int]


def token_relevance(
    model: Model, plan: Objective, row: int, parts: list[Tensor]
) -> tuple[Tensor, images.ImageMap | None]:
    """(T,) of the relevance of what each stack reads (T, D), or of an image's pixels (C, H, W)."""
    columns, image = plan.batch.columns(row), None
    if plan.batch.pixels is not None:
        image = images.image_map(model, plan.batch.pixels[row], parts[0])
        patches = image.patches.flatten()
        tokens = torch.cat((torch.zeros(len(columns) - len(patches), dtype=patches.dtype), patches))
    else:
        tokens = torch.cat([part.sum(-1) for part in parts])[columns].cpu()
    return tokens, image


def kept_at(plan: Objective, row: int, record: Recorded) -> tuple[int, ...]:
    """The positions whose neurons are kept."""
    return recorded_positions(record, plan.target_positions(row), len(plan.batch.columns(row)))


def recorded_positions(record: Recorded, target_positions: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The positions, of `count` tokens, whose neurons are kept. Raises `InputError`."""
    if isinstance(record, str) and record in ("all", "last"):
        return tuple(range(count)) if record == "all" else target_positions
    what = "A position to record, if it is not all or last,"
    return tuple(sorted({whole(position, what, -count, count - 1) % count for position in several(record)}))


def unranked(model: Model, batch: Batch, stream: Stream, row: int) -> tuple[int, ...]:
    """Positions that a ranking sets apart: sinks, and what a chat's template wrote."""
    ids = batch.row_ids(row)
    turns = model.turns(ids, model.pieces(ids)) if model.task.is_causal else ()
    return (*stream.sinks(row), *outside(turns, len(ids)))
