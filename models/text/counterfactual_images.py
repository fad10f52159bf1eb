"""Images to compare an image with: blurred, gray, with the area of a mask blurred, or another one."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from icebear.errors import InputError
from icebear.models.text.images import encode_pixels, read_picture
from icebear.models.text.reader import Reader

if TYPE_CHECKING:
    from PIL.Image import Image

BLUR = 15 / 224
"""The standard deviation of the blur, as a share of the shorter side."""
KINDS = {"blur": "the image blurred", "grey": "a gray image"}
MASK = "mask:"
"""Before the path of a mask: where it is light, the image is blurred."""


def counterfactual_image(model: Reader, image: Any, kind: Any) -> Tensor:
    """Return the pixels (C, H, W) of the image to compare an image with.

    Parameters
    ----------
    model
        A model that reads images.
    image
        A path, a PIL image, or pixels (C, H, W) as the model reads them.
    kind
        ``blur``: every pixel is the mean of its neighborhood (a Gaussian, standard deviation 15 pixels of 224);
        ``grey``: all pixels are the same medium gray; ``mask:FILE``: blurred where the picture FILE, of the size of the
        image, is light; anything else: that image.

    Raises
    ------
    InputError
        If an image or mask cannot be read, or a mask has another size than the image.
    """
    pixels = encode_pixels(model, image)
    if kind == "blur":
        return blurred(pixels)
    if kind == "grey":
        return _gray(model, pixels)
    if isinstance(kind, str) and kind.startswith(MASK):
        return torch.where(_mask(model, image, kind.removeprefix(MASK)), blurred(pixels), pixels)
    return encode_pixels(model, kind)


def about(kind: Any) -> str:
    """Return in words what an image is compared with."""
    if isinstance(kind, str) and kind.startswith(MASK):
        return f"the image blurred where {Path(kind.removeprefix(MASK)).name} is light"
    return KINDS.get(kind, "another image") if isinstance(kind, str) else "another image"


def blurred(pixels: Tensor) -> Tensor:
    """Return pixels (C, H, W) under a Gaussian; at the edges they are mirrored."""
    deviation = BLUR * min(pixels.shape[-2:])
    values = pixels.double()
    for axis in (-2, -1):
        radius = min(ceil(4 * deviation), values.shape[axis] - 1)
        weights = torch.exp(-0.5 * (torch.arange(-radius, radius + 1, dtype=torch.float64) / deviation) ** 2)
        rows = values.movedim(axis, -1)
        padded = functional.pad(rows, (radius, radius), "reflect")
        values = (padded.unfold(-1, 2 * radius + 1, 1) @ (weights / weights.sum())).movedim(-1, axis)
    return values.to(pixels.dtype)


def _gray(model: Reader, pixels: Tensor) -> Tensor:
    """Return medium gray, as the processor makes it; without one, 0, to which most processors move the mean color."""
    if model.processor is None:
        return torch.zeros_like(pixels)
    from PIL import Image

    size = (pixels.shape[-1], pixels.shape[-2])
    gray = model.processor(images=Image.new("RGB", size, (128, 128, 128)), return_tensors="pt")["pixel_values"][0]
    return gray.amax((-2, -1), keepdim=True).expand_as(pixels).clone()


def _mask(model: Reader, image: Any, path: str) -> Tensor:
    """Return where a mask (H, W) is light, resized and cropped as the image is."""
    mask = read_picture(path)
    picture: Image | None = image if hasattr(image, "convert") else None
    picture = read_picture(image) if isinstance(image, (str, Path)) else picture
    if model.processor is None or picture is None:
        raise InputError("A mask needs an image that an image processor reads; give a path or an image, no pixels.")
    if mask.size != picture.size:
        raise InputError(
            f"The mask {path} has {mask.width} x {mask.height} pixels, the image {picture.width} x {picture.height}; "
            "give a mask of the same size."
        )
    light = mask.convert("L").point(lambda value: 255 * (value > 127)).convert("RGB")
    processed = model.processor(images=light, return_tensors="pt", do_normalize=False)["pixel_values"][0]
    return processed[0] > processed[0].amax() / 2 if processed[0].any() else torch.zeros_like(processed[0]).bool()
