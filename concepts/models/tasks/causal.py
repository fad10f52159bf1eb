"""The next token: Llama, GPT-2, ..."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from concepts.models.batch import Batch
from concepts.models.prompts import Prompt
from concepts.models.tasks.base import Answers, Positions, Task, followed, from_start

if TYPE_CHECKING:
    from concepts.models.model import Model


class Causal(Task):
    name = "causal"
    auto_class = "AutoModelForCausalLM"
    generates = True
    looks_back = True

    def before(self, prompt: Prompt, prefix: str | None) -> Prompt | None:
        return prompt

    def places(
        self, model: Model, prompts: Sequence[Prompt], answers: Answers, befores: Sequence[Prompt | None],
        at: Sequence[int | None],
    ) -> tuple[Batch, Positions]:  # fmt: skip
        rows = [model.ids(prompt) for prompt in prompts]
        read = model.read_ids([followed(ids, answer) for ids, answer in zip(rows, answers, strict=True)])
        return read, [from_start(len(ids) - 1, answer) for ids, answer in zip(rows, answers, strict=True)]

    def written(self, batch: Batch) -> int:
        return batch.ids.shape[1]
