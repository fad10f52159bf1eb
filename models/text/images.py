"""Images as input, and maps of relevance by pixel and by patch."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from icebear.errors import InputError
from icebear.models.batch import Batch
from icebear.models.text.reader import Reader
from icebear.paths import existing
from icebear.render import NEGATIVE, POSITIVE

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, eq=False)
class ImageMap:
    """The relevance of an image by pixel and by patch."""

    pixels: Tensor
    """(H, W) relevance, summed over colors."""
    picture: Tensor
    """(C, H, W) the input of the model, scaled to 0 to 1."""
    patch: tuple[int, int]
    """The height and the width of a patch, in pixels."""

    @property
    def patches(self) -> Tensor:
        """(rows, columns) the relevance summed over the pixels of each patch."""
        height, width = self.patch
        return self.pixels.unfold(0, height, height).unfold(1, width, width).sum((-1, -2))

    def overlay(self, by: str = "patches", size: int = 448) -> Image:
        """Return the image in gray under its relevance in red (positive) and blue (negative).

        by: ``patches`` or ``pixels``. size: pixels of the longer side.
        """
        from PIL import Image

        height, width = self.pixels.shape
        shape = round(size * width / max(height, width)), round(size * height / max(height, width))

        def layer(values: Tensor) -> Image.Image:
            picture = Image.fromarray(values.float().round().clamp(0, 255).to(torch.uint8).numpy())
            return picture.resize(shape, Image.Resampling.NEAREST)

        relevance = self.pixels if by == "pixels" else self.patches
        share = relevance / relevance.abs().max().clamp(min=1e-30)
        color = torch.where(share[..., None] >= 0, torch.tensor(POSITIVE), torch.tensor(NEGATIVE))
        gray = layer(255 * self.picture.mean(0)).convert("RGB")
        return Image.composite(layer(color), gray, layer(0.85 * 255 * share.abs()))

    def png(self, by: str = "patches", size: int = 448) -> bytes:
        """Return `overlay` as a PNG file."""
        file = io.BytesIO()
        self.overlay(by, size).save(file, "PNG")
        return file.getvalue()


def encode(model: Reader, images: Sequence[Any]) -> Batch:
    """Return a batch of images: paths, PIL images, or pixels (C, H, W) as the model reads them."""
    pixels = torch.stack([_pixels(model, image) for image in images]).to(model.device, model.dtype)
    count = len(names(model))
    ids = torch.zeros(len(images), count, dtype=torch.long, device=model.device)
    return Batch(ids, torch.ones_like(ids), (count,) * len(images), pixels=pixels)


def _pixels(model: Reader, image: Any) -> Tensor:
    if isinstance(image, Tensor):
        return image
    if isinstance(image, (str, Path)):
        from PIL import Image, UnidentifiedImageError

        try:
            image = Image.open(existing(image))
            image.load()
        except (OSError, UnidentifiedImageError) as error:
            raise InputError(f"{image} cannot be read as an image ({error}); check the path.") from None
    if model.processor is None:
        raise InputError(f"{model.name} was given without an image processor; pass pixels (C, H, W) instead.")
    return model.processor(images=image.convert("RGB"), return_tensors="pt")["pixel_values"][0]


def grid(model: Reader) -> tuple[int, int]:
    """Return the number of rows and of columns of patches."""
    size, patch = pair(model.net.config.image_size), pair(model.net.config.patch_size)
    return size[0] // patch[0], size[1] // patch[1]


def names(model: Reader) -> tuple[str, ...]:
    """Return the names of the positions: the model's own tokens ([CLS], ...), then patches as ``row,column``."""
    rows, columns = grid(model)
    patches = tuple(f"{row},{column}" for row in range(rows) for column in range(columns))
    total = model.net.get_parameter(model.family.position_embedding).shape[1]
    return ("[CLS]", "[DIST]")[: total - len(patches)] + patches


def image_map(model: Reader, pixels: Tensor, relevance: Tensor) -> ImageMap:
    """Return the map of one image (C, H, W) and the relevance of its values (C, H, W)."""
    low, high = pixels.amin(), pixels.amax()
    picture = (pixels.float() - low) / (high - low).clamp(min=1e-12)
    return ImageMap(relevance.sum(0).cpu(), picture.cpu(), pair(model.net.config.patch_size))


def pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)
