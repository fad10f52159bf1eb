"""Images as input, and maps of relevance by pixel and by patch."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import ismethod
from operator import ge
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor

from icebear.errors import InputError, need
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


FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Other formats are not opened: some run programs."""


def encode(model: Reader, images: Sequence[Any]) -> Batch:
    """Return a batch of images: paths, PIL images, or pixels (C, H, W) as the model reads them. Raises `InputError`."""
    read = [encode_pixels(model, image) for image in images]
    if len({pixels.shape for pixels in read}) > 1:
        raise InputError("The images have different sizes; explain them one by one, or give images of one size.")
    pixels = torch.stack(read).to(model.device, model.dtype)
    count = len(names(model, pixels))
    ids = torch.zeros(len(images), count, dtype=torch.long, device=model.device)
    return Batch(ids, torch.ones_like(ids), (count,) * len(images), pixels=pixels)


def encode_pixels(model: Reader, image: Any) -> Tensor:
    """Return the pixels (C, H, W) of an image as the model reads them. Raises `InputError`."""
    return _checked(model, _pixels(model, image))


def _pixels(model: Reader, image: Any) -> Tensor:
    if hasattr(image, "ndim"):
        return torch.as_tensor(image)
    if not (isinstance(image, (str, Path)) or hasattr(image, "convert")):
        raise InputError(f"{model.name} reads images; give a path, an image or pixels (C, H, W).")
    if model.processor is None:
        raise InputError(
            f"{model.name} has no image processor (preprocessor_config.json), which makes pixels of an image; save one "
            "with it, or in Python give pixels (C, H, W)."
        )
    picture = read_picture(image) if isinstance(image, (str, Path)) else image
    return model.processor(images=picture.convert("RGB"), return_tensors="pt")["pixel_values"][0]


def read_picture(file: str | Path | BinaryIO) -> Image:
    """Return the picture in a file, by its path or open, the right way up. Raises `InputError`."""
    need("images")
    from PIL import Image, ImageOps

    try:
        picture = Image.open(existing(file) if isinstance(file, (str, Path)) else file, formats=FORMATS)
        picture.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        name = getattr(file, "name", file)
        raise InputError(
            f"{name} cannot be read as an image ({error}); give a file of one of the formats {', '.join(FORMATS)}."
        ) from None
    return ImageOps.exif_transpose(picture)


def _checked(model: Reader, pixels: Tensor) -> Tensor:
    """Return pixels (C, H, W) if the model reads them. Raises `InputError`."""
    size, patch = (pair(getattr(model.config, name)) for name in ("image_size", "patch_size"))
    channels, any_size = model.config.num_channels, interpolates(model)
    fits = pixels.ndim == 3 and len(pixels) == channels and pixels.is_floating_point()
    if fits and (pixels.shape[1:] == size or (any_size and all(map(ge, pixels.shape[1:], patch)))):
        return pixels
    wanted = f"of {patch[0]} x {patch[1]} pixels or more" if any_size else f"of {size[0]} x {size[1]} pixels"
    raise InputError(
        f"The image has the shape {tuple(pixels.shape)}, {str(pixels.dtype).removeprefix('torch.')}, but {model.name} "
        f"reads {channels} x height x width, {wanted}, as floating-point numbers; resize it first."
    )


def interpolates(model: Reader) -> bool:
    """Return whether the model fits its position embeddings to the size of an image (DINOv2)."""
    home, _, name = model.family.position_embedding.rpartition(".")
    return ismethod(getattr(model.net.get_submodule(home), name))


def usual_size(model: Reader) -> tuple[int, int]:
    """Return the height and width of the images that the processor makes, or that the configuration names."""
    crop = getattr(model.processor, "crop_size", None) if getattr(model.processor, "do_center_crop", False) else None
    if crop is not None and interpolates(model):  # whose configuration names the size of the position table
        return crop["height"], crop["width"]
    return pair(model.config.image_size)


def grid(model: Reader, pixels: Tensor) -> tuple[int, int]:
    """Return the number of rows and of columns of patches of images (..., H, W)."""
    patch = pair(model.config.patch_size)
    return pixels.shape[-2] // patch[0], pixels.shape[-1] // patch[1]


OWN_TOKENS = {"cls_token": "[CLS]", "class_embedding": "[CLS]", "distillation_token": "[DIST]"}
REGISTER = "[REG]"
"""A token without a position."""


def own_names(model: Reader) -> tuple[str, ...]:
    """Return the names of the tokens that the model reads before the patches, one for each row of their weights."""
    weights = ((path.rpartition(".")[2], model.net.get_parameter(path)) for path in model.family.own_tokens)
    counts = ((OWN_TOKENS.get(name, REGISTER), weight.numel() // weight.shape[-1]) for name, weight in weights)
    return tuple(name for name, count in counts for _ in range(count))


def names(model: Reader, pixels: Tensor) -> tuple[str, ...]:
    """Return the names of the positions: the model's own tokens ([CLS], ...), then patches as ``row,column``."""
    rows, columns = grid(model, pixels)
    return (*own_names(model), *(f"{row},{column}" for row in range(rows) for column in range(columns)))


def pixels_of(model: Reader, pixels: Tensor, position: int) -> tuple[Any, slice, slice]:
    """Return the index of a position's patch in pixels (..., H, W); of one of the model's own tokens it is empty."""
    patch = position - len(own_names(model))
    if patch < 0:
        return ..., slice(0), slice(0)
    row, column = divmod(patch, grid(model, pixels)[1])
    height, width = pair(model.config.patch_size)
    return ..., slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width)


def image_map(model: Reader, pixels: Tensor, relevance: Tensor) -> ImageMap:
    """Return the map of one image (C, H, W) and the relevance of its values (C, H, W)."""
    low, high = pixels.amin(), pixels.amax()
    picture = (pixels.float() - low) / (high - low).clamp(min=1e-12)
    return ImageMap(relevance.sum(0).cpu(), picture.cpu(), pair(model.config.patch_size))


def pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)
