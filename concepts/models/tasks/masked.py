"""Words in place of masks: BERT."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from icebear.concepts.models.batch import Batch
from icebear.concepts.models.tasks.base import Asked, Positions, Task
from icebear.errors import InputError

if TYPE_CHECKING:
    from icebear.concepts.models.model import Model


class Masked(Task):
    name = "masked"
    auto_class = "AutoModelForMaskedLM"
    is_masked_lm = True

    def completed(self, model: Model, text: str) -> str:
        mask = model.text(model.mask_id)
        return text if mask in text else f"{text} {mask}"

    def places(self, model: Model, asked: Sequence[Asked]) -> tuple[Batch, Positions]:
        batch = self.encode(model, [row.prompt for row in asked])
        return batch, [_masks(model, batch.row_ids(number), row.answer) for number, row in enumerate(asked)]


def _masks(model: Model, ids: Sequence[int], answer: tuple[int, ...] | None) -> tuple[int, ...]:
    mask = model.mask_id
    places = tuple(place for place, token in enumerate(ids) if token == mask)
    if not places:
        raise InputError(f"The prompt has no {model.text(mask)}; put one where the word shall be predicted.")
    if answer is not None and len(answer) != len(places):
        raise InputError(f"The prompt has {len(places)} masks but the target {len(answer)} tokens; give one for each.")
    return places
