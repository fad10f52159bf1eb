"""Images in, relevance maps out: pixels, patches, and a picture of both."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from icebear.concepts.models.prompts import Batch
from icebear.concepts.render import NEGATIVE, POSITIVE
from icebear.errors import InputError
from icebear.paths import existing

if TYPE_CHECKING:
    from PIL.Image import Image

    from icebear.concepts.models.model import Model


@dataclass(frozen=True, eq=False)
class ImageMap:
    """Where in an image the relevance is."""

    pixels: Tensor
    """(H, W) relevance, summed over colours."""
    picture: Tensor
    """(C, H, W) what the model read, 0 to 1."""
    patch: tuple[int, int]
    """The height and width of a patch."""

    @property
    def patches(self) -> Tensor:
        """(rows, columns) relevance summed over the pixels of each patch."""
        height, width = self.patch
        return self.pixels.unfold(0, height, height).unfold(1, width, width).sum((-1, -2))

    def overlay(self, by: str = "patches", size: int = 448) -> Image:
        """The image in grey, under its relevance in red (for) and blue (against), by ``patches`` or ``pixels``.

        size: of the longer side, in pixels.
        """
        from PIL import Image

        found = self.pixels if by == "pixels" else self.patches
        share = (found / found.abs().max().clamp(min=1e-30)).float()
        color = torch.where(share[..., None] >= 0, torch.tensor(POSITIVE), torch.tensor(NEGATIVE)).float()
        strength = 0.85 * share.abs()
        height, width = self.pixels.shape
        shape = (round(size * height / max(height, width)), round(size * width / max(height, width)))
        grey = _resized(self.picture.mean(0), shape) * 255
        ink = torch.stack([_resized(color[..., channel], shape) for channel in range(3)], -1)
        alpha = _resized(strength, shape)[..., None]
        mixed = grey[..., None] * (1 - alpha) + ink * alpha
        return Image.fromarray(mixed.round().clamp(0, 255).to(torch.uint8).numpy())

    def png(self, by: str = "patches", size: int = 448) -> bytes:
        """`overlay` as a PNG file."""
        file = io.BytesIO()
        self.overlay(by, size).save(file, "PNG")
        return file.getvalue()


def _resized(x: Tensor, shape: tuple[int, int]) -> Tensor:
    """A map (h, w) at another size, by nearest neighbours."""
    return torch.nn.functional.interpolate(x[None, None].float(), size=shape, mode="nearest")[0, 0]


def encode(model: Model, images: Sequence[Any]) -> Batch:
    """A batch of images: paths, PIL images, or pixels (C, H, W) as the model reads them."""
    pixels = torch.stack([_pixels(model, image) for image in images]).to(model.device, model.dtype)
    count = len(names(model))
    ids = torch.zeros(len(images), count, dtype=torch.long, device=model.device)
    return Batch(ids, torch.ones_like(ids), (count,) * len(images), pixels=pixels)


def _pixels(model: Model, image: Any) -> Tensor:
    if isinstance(image, Tensor):
        return image
    if isinstance(image, (str, Path)):
        from PIL import Image, UnidentifiedImageError

        try:
            image = Image.open(existing(image))
            image.load()
        except (OSError, UnidentifiedImageError) as error:
            raise InputError(f"{image} is not an image that can be read ({error}); check the path.") from None
    if model.processor is None:
        raise InputError(f"{model.name} was given without an image processor; pass pixels (C, H, W) instead.")
    return model.processor(images=image.convert("RGB"), return_tensors="pt")["pixel_values"][0]


def grid(model: Model) -> tuple[int, int]:
    """Rows and columns of patches."""
    size, patch = _pair(model.net.config.image_size), _pair(model.net.config.patch_size)
    return size[0] // patch[0], size[1] // patch[1]


def names(model: Model) -> tuple[str, ...]:
    """Of the positions: the model's own tokens ([CLS], ...), then patches by row and column."""
    rows, columns = grid(model)
    patches = tuple(f"{row},{column}" for row in range(rows) for column in range(columns))
    total = model.net.get_parameter(model.family.position_embedding).shape[1]
    return ("[CLS]", "[DIST]")[: total - len(patches)] + patches


def image_map(model: Model, pixels: Tensor, relevance: Tensor) -> ImageMap:
    """Of one image (C, H, W) and the relevance of its values (C, H, W)."""
    low, high = pixels.amin(), pixels.amax()
    picture = (pixels.float() - low) / (high - low).clamp(min=1e-12)
    return ImageMap(relevance.sum(0).cpu(), picture.cpu(), _pair(model.net.config.patch_size))


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)
