"""Prompts side by side, as the model takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from icebear.concepts.models.model import Model


@dataclass(frozen=True)
class Batch:
    """Prompts as token ids, padded on the right (or left, for generation)."""

    ids: Tensor  # (B, T)
    mask: Tensor  # (B, T), 1 where there is a token
    lengths: tuple[int, ...]
    decoder: Batch | None = None
    """What the decoder of an encoder-decoder reads."""
    pixels: Tensor | None = None  # (B, C, H, W), of images; each token is a patch then

    @property
    def spans(self) -> tuple[slice, slice]:
        """The columns of the encoder (or only) stack and of the decoder, where all tokens are in one row."""
        end = self.ids.shape[1]
        return slice(0, end), slice(end, end + (self.decoder.ids.shape[1] if self.decoder else 0))

    def span_of(self, model: Model, layer: int) -> slice:
        """The columns that a layer reads."""
        return self.spans[model.stack_of(layer) if self.decoder else 0]

    def columns(self, row: int) -> list[int]:
        """Those that are tokens of this row, not padding."""
        written = self.decoder.lengths[row] if self.decoder else 0
        start = self.spans[1].start
        return [*range(self.lengths[row]), *range(start, start + written)]

    def row_ids(self, row: int) -> tuple[int, ...]:
        ids = self.ids if self.decoder is None else torch.cat((self.ids, self.decoder.ids), 1)
        return tuple(ids[row, self.columns(row)].tolist())

    def rows(self, order: Sequence[int]) -> Batch:
        """These rows, in this order."""
        chosen = list(order)
        decoder = self.decoder.rows(chosen) if self.decoder else None
        pixels = self.pixels[chosen] if self.pixels is not None else None
        return Batch(self.ids[chosen], self.mask[chosen], tuple(self.lengths[row] for row in chosen), decoder, pixels)

    def repeated(self, row: int, count: int) -> Batch:
        """One row, without padding, `count` times."""
        length = self.lengths[row]
        ids, mask = (x[row : row + 1, :length].expand(count, -1) for x in (self.ids, self.mask))
        decoder = self.decoder.repeated(row, count) if self.decoder else None
        pixels = self.pixels[row : row + 1].expand(count, -1, -1, -1) if self.pixels is not None else None
        return Batch(ids, mask, (length,) * count, decoder, pixels)
