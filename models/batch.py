"""Batches of prompts as token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from icebear.converters import checked
from icebear.models.prompt_image import PromptImage, loaded_image, saved_image
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
    images: tuple[PromptImage, ...] | None = None
    """The image of each prompt, of a model of images and text."""
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
        images = None if self.images is None else tuple(self.images[row] for row in order)
        return Batch(ids, mask, lengths, decoder, pixels, self.before, images, self.after)

    @property
    def joins(self) -> bool:
        """Whether the images have one shape, so that their prompts can share a pass."""
        return len({image.values.shape for image in self.images or ()}) < 2

    def of_row(self, row: int, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return what a row has of each input of a pass: of embeddings (B, T, D) and, if prompts have images, of the
        pixels of all images."""
        if self.images is None:
            return [x[row] for x in inputs]
        embeddings, pixels = inputs
        starts = list(accumulate((len(image.values) for image in self.images), initial=0))
        return [embeddings[row], pixels[starts[row] : starts[row + 1]]]


def _written(batch: Batch) -> dict[str, Any]:
    checked(batch, batch.after is None, Batch)  # a part of a pass is in no result
    decoder = batch.decoder and _written(batch.decoder)
    lengths = list(batch.lengths)
    images = [saved_image(image) for image in batch.images] if batch.images else None
    tensors = {"ids": batch.ids, "mask": batch.mask, "pixels": batch.pixels}
    return {**tensors, "lengths": lengths, "decoder": decoder, "images": images}


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
    saved_images = saved.get("images")
    images = tuple(loaded_image(image, device) for image in saved_images) if saved_images else None
    checked(images, images is None or len(images) == len(lengths), Batch)
    return Batch(ids, mask, lengths, decoder, pixels, images=images)


saved_as(Batch, _written, _read)
