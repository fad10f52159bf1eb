"""An explained prompt: its tokens, which of them are what, and what is predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from icebear.concepts.models import images
from icebear.concepts.models.chat import Turn, outside
from icebear.concepts.models.model import Model
from icebear.concepts.models.objective import Objective, ObjectiveKind
from icebear.concepts.models.prompts import Batch
from icebear.concepts.passes.stream import Stream
from icebear.records import TokenScore
from icebear.values import several, whole


@dataclass(frozen=True)
class PromptTokens:
    """The T tokens that the model read: of an encoder-decoder the encoder's, then the decoder's; of an image its
    patches."""

    ids: tuple[int, ...]
    strings: tuple[str, ...]
    target_positions: tuple[int, ...]
    """Where the prediction is made: the last token, the masks, [CLS]; for a continuation of several tokens one each."""
    sinks: tuple[int, ...]
    """Positions that collect attention and huge activations, excluded from rankings: the first token, special
    tokens, and those whose residual stream is more than 4 x the median position's in most layers."""
    encoder_length: int
    """How many of the tokens the encoder (or the only stack) read; the decoder has the others."""
    turns: tuple[Turn, ...] = ()
    """The messages of a chat."""
    answer_start: int | None = None
    """The position of an answer's first token; None where only what comes next is explained."""

    @classmethod
    def of(
        cls, model: Model, plan: Objective, row: int, strings: tuple[str, ...], sinks: tuple[int, ...]
    ) -> PromptTokens:
        ids = plan.batch.row_ids(row)
        turns = model.turns(ids, strings) if model.task.is_causal else ()
        return cls(ids, strings, plan.target_positions(row), sinks, plan.batch.lengths[row], turns)

    @property
    def text(self) -> str:
        return "".join(self.strings)

    @property
    def template(self) -> tuple[int, ...]:
        """Positions of a chat that its template wrote, not a message."""
        return outside(self.turns, len(self.ids))


@dataclass(frozen=True)
class Prediction:
    """What the model predicts, and what of it is explained."""

    target: TokenScore | None
    """The token explained; None when a continuation of several is."""
    target_text: str
    contrast: TokenScore | None
    top: tuple[TokenScore, ...]
    """The most probable next tokens."""
    objective: ObjectiveKind

    @classmethod
    def of(cls, model: Model, plan: Objective, row: int, targets: tuple[int, ...], logits: Tensor) -> Prediction:
        """targets: the tokens explained; logits (B, P, V) at the objective's positions."""
        here = logits[row, plan.all_positions.index(plan.positions[row][0])].float()  # (V,)
        contrast = plan.contrasts[row]
        return cls(
            model.token_scores(here, [targets[0]])[0] if len(targets) == 1 else None,
            "".join(model.answer_text(token) for token in targets),
            None if contrast is None else model.token_scores(here, [contrast])[0],
            tuple(model.top_tokens(here, 10)),
            plan.kind,
        )


Recorded = Literal["all", "last"] | Sequence[int]


def prompt_relevance(
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


def recorded_at(plan: Objective, row: int, record: Recorded) -> tuple[int, ...]:
    """The positions whose neurons are kept."""
    return recorded_positions(record, plan.target_positions(row), len(plan.batch.columns(row)))


def recorded_positions(record: Recorded, target_positions: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The positions, of `count` tokens, whose neurons are kept. Raises `InputError`."""
    if isinstance(record, str) and record in ("all", "last"):
        return tuple(range(count)) if record == "all" else target_positions
    what = "A position to record, if it is not all or last,"
    return tuple(sorted({whole(position, what, -count, count - 1) % count for position in several(record)}))


def excluded_positions(model: Model, batch: Batch, stream: Stream, row: int) -> tuple[int, ...]:
    """Positions that a ranking sets apart: sinks, and what a chat's template wrote."""
    ids = batch.row_ids(row)
    turns = model.turns(ids, model.pieces(ids)) if model.task.is_causal else ()
    return (*stream.sinks(row), *outside(turns, len(ids)))
