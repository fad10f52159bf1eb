"""Labels of images: ViT, DeiT."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from icebear.concepts.models import images
from icebear.concepts.models.batch import Batch
from icebear.concepts.models.prompts import Prompt
from icebear.concepts.models.tasks.base import Asked, Positions
from icebear.concepts.models.tasks.labels import Labelled

if TYPE_CHECKING:
    from icebear.concepts.models.model import Model


class Image(Labelled):
    name = "image"
    auto_class = "AutoModelForImageClassification"
    reads_text = False

    def encode(self, model: Model, prompts: Sequence[Prompt], padding_side: str = "right") -> Batch:
        return images.encode(model, [prompt.image if prompt.text is None else prompt.text for prompt in prompts])

    def own_tokens(self, model: Model) -> tuple[int, ...]:
        return tuple(range(len(images.names(model)) - math.prod(images.grid(model))))

    def places(self, model: Model, asked: Sequence[Asked]) -> tuple[Batch, Positions]:
        return self.encode(model, [row.prompt for row in asked]), [(0,)] * len(asked)
