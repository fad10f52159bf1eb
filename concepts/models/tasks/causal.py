"""The next token: Llama, GPT-2, ..."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from icebear.concepts.models.batch import Batch
from icebear.concepts.models.prompts import Prompt
from icebear.concepts.models.tasks.base import Asked, Positions, Task, followed, from_start

if TYPE_CHECKING:
    from icebear.concepts.models.model import Model


class Causal(Task):
    name = "causal"
    auto_class = "AutoModelForCausalLM"
    generates = True
    is_causal = True

    def before(self, prompt: Prompt, prefix: str | None) -> Prompt | None:
        return prompt

    def places(self, model: Model, asked: Sequence[Asked]) -> tuple[Batch, Positions]:
        rows = [(model.ids(row.prompt), row.answer) for row in asked]
        read = model.read_ids([followed(ids, answer) for ids, answer in rows])
        return read, [from_start(len(ids) - 1, answer) for ids, answer in rows]

    def written(self, batch: Batch) -> int:
        return batch.ids.shape[1]
