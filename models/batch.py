"""Batches of prompts as token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from icebear.converters import checked
from icebear.result_files import Given, saved_as


@dataclass(frozen=True)
class Batch:
    """Prompts as token ids, padded on the right (or left, for generation)."""

    ids: Tensor  # (B, T)
    mask: Tensor  # (B, T), 1 where there is a token
    lengths: tuple[int, ...]
    decoder: Batch | None = None
    """The input of an encoder-decoder's decoder."""
    pixels: Tensor | None = None  # (B, C, H, W), of images; each token is a patch then
    before: int = 0
    """The number of tokens that were read before these, and are not in `ids`."""
    after: Callable[[Tensor], dict[str, Any]] | None = None
    """Returns the model's inputs for ids after these tokens (`Prefix.after`)."""

    @property
    def spans(self) -> tuple[slice, slice]:
        """The columns of the encoder (or only) stack and of the decoder, if all tokens are in one row."""
        end = self.ids.shape[1]
        return slice(0, end), slice(end, end + (self.decoder.ids.shape[1] if self.decoder else 0))

    def span_of(self, stack: int) -> slice:
        """Return the columns that the layers of a stack read."""
        return self.spans[stack if self.decoder else 0]

    def columns(self, row: int) -> list[int]:
        """Return the columns of this row's tokens, without padding."""
        written = self.decoder.lengths[row] if self.decoder else 0
        start = self.spans[1].start
        return [*range(self.lengths[row]), *range(start, start + written)]

    def row_ids(self, row: int) -> tuple[int, ...]:
        decoder = self.decoder.row_ids(row) if self.decoder else ()
        return (*self.ids[row, : self.lengths[row]].tolist(), *decoder)

    def rows(self, order: Sequence[int]) -> Batch:
        """Return these rows, in this order, padded to the longest of them."""
        lengths = tuple(self.lengths[row] for row in order)
        ids, mask = (x[list(order), : max(lengths)] for x in (self.ids, self.mask))
        pixels = None if self.pixels is None else self.pixels[list(order)]
        decoder = self.decoder.rows(order) if self.decoder else None
        return Batch(ids, mask, lengths, decoder, pixels, self.before, self.after)


def _written(batch: Batch) -> dict[str, Any]:
    checked(batch, batch.after is None, Batch)  # a part of a pass is in no result
    decoder = batch.decoder and _written(batch.decoder)
    lengths = list(batch.lengths)
    return {"ids": batch.ids, "mask": batch.mask, "lengths": lengths, "decoder": decoder, "pixels": batch.pixels}


def _read(saved: Any, models: Given) -> Batch:
    """Return a saved batch on the device of the model, if there is one."""
    device = models[0].device if models else "cpu"
    ids, mask = (checked(saved[name], isinstance(saved[name], Tensor), Tensor).to(device) for name in ("ids", "mask"))
    lengths = tuple(checked(length, type(length) is int and length >= 0, int) for length in saved["lengths"])
    checked(
        ids, ids.dtype == mask.dtype == torch.long and ids.shape == mask.shape == (len(lengths), ids.shape[-1]), Batch
    )
    decoder, pixels = (_read(saved["decoder"], models) if saved["decoder"] else None), saved["pixels"]
    if pixels is not None:
        checked(pixels, isinstance(pixels, Tensor) and pixels.dim() == 4 and len(pixels) == len(lengths), Tensor)
        pixels = pixels.to(device)
    return Batch(ids, mask, lengths, decoder, pixels)


saved_as(Batch, _written, _read)
