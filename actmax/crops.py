"""The crops on a card: of each example of an index of images, the part that the neuron is about."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from icebear.actmax.card import CROPS
from icebear.actmax.page import Crop
from icebear.actmax.reading import image_file
from icebear.db.store import Store
from icebear.errors import InputError, StoreError
from icebear.models.model import Model
from icebear.models.text.images import own_names, pair, read_picture
from icebear.records import Example
from icebear.render import POSITIVE
from icebear.values import one_of

if TYPE_CHECKING:
    from PIL.Image import Image

AROUND = 2
"""Patches that are shown on each side of a patch's own square."""
LEAST = 3
"""The smallest square of relevance, in patches."""
HALF = 0.5
DARK = 0.5
"""The brightness of patches without relevance."""
SIDE = 168
"""Pixels of a crop's side."""
ANNOTATE = "Its relevance is not measured; run icebear index --annotate, or choose the crop by patch."
Box = tuple[int, int, int, int]
"""The first row, the first column, rows and columns, in patches."""


def crops_of(model: Model, store: Store, examples: Sequence[Example], kind: str = "patch") -> list[Crop]:
    """Return a crop for each example of one polarity, cut from the files of the index's folder, as the model sees them.

    A file that is missing or has changed has no crop, and `Crop.about` says so.

    kind: one of `CROPS`.
    """
    one_of(kind, "crop", CROPS)
    store.check(model.index_fingerprint, model.name)
    folder, shown = store.facts.get("corpus"), list[Crop]()
    for example in examples:
        try:
            picture = _as_seen(model, read_picture(image_file(folder, example.sentence)))
        except (StoreError, InputError) as error:
            shown.append(Crop("", str(error)))
            continue
        rows, columns = _grid(model, picture)
        if len(own_names(model)) + rows * columns != len(example.sentence.tokens):
            shown.append(Crop("", "The image processor of the model has changed; build the index anew."))
            continue
        shown.append(_around(model, picture, example) if kind == "patch" else _relevant(model, picture, example))
    return shown


def _as_seen(model: Model, picture: Image) -> Image:
    """Return a picture, resized and cropped as the model reads it."""
    from PIL import Image

    how: dict[str, Any] = {"return_tensors": "pt", "do_rescale": True, "do_normalize": False}
    pixels = model.processor(images=picture.convert("RGB"), **how)["pixel_values"][0]
    return Image.fromarray((255 * pixels).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).contiguous().numpy())


def _grid(model: Model, picture: Image) -> tuple[int, int]:
    height, width = pair(model.config.patch_size)
    return picture.height // height, picture.width // width


def _around(model: Model, picture: Image, example: Example) -> Crop:
    rows, columns = _grid(model, picture)
    row, column = divmod(example.token - len(own_names(model)), columns)
    size = 2 * AROUND + 1
    top, left = (max(0, min(at - AROUND, count - size)) for at, count in ((row, rows), (column, columns)))
    return Crop(_cut(model, picture, (top, left, min(size, rows), min(size, columns)), (row, column)), "")


def _relevant(model: Model, picture: Image, example: Example) -> Crop:
    if example.relevance is None:
        return Crop("", ANNOTATE)
    rows, columns = _grid(model, picture)
    sign = 1 if example.activation > 0 else -1
    values = torch.tensor(example.relevance[len(own_names(model)) :]).reshape(rows, columns)
    relevance = (sign * values).clamp(min=0)
    if not relevance.any():
        return Crop("", "No patch has relevance for this activation.")
    box, share = smallest_square(relevance)
    bright = DARK + (1 - DARK) * (relevance / relevance.max()).sqrt()
    patch = divmod(example.token - len(own_names(model)), columns)
    inside = all(start <= at < start + size for start, at, size in zip(box[:2], patch, box[2:], strict=True))
    png = _cut(model, _darkened(picture, bright), box, patch if inside else None)
    return Crop(png, f"{share:.0%} of the relevance")


def smallest_square(relevance: Tensor) -> tuple[Box, float]:
    """Return the smallest square with half of the relevance (rows, columns), which is not negative, and its share. Of
    an oblong image a square is cut off at its sides."""
    rows, columns = relevance.shape
    total = relevance.sum()
    for size in range(LEAST, max(LEAST, rows, columns) + 1):
        height, width = min(size, rows), min(size, columns)
        sums = relevance.unfold(0, height, 1).unfold(1, width, 1).sum((-1, -2))
        if sums.max() >= HALF * total:
            break
    top, left = divmod(int(sums.argmax()), sums.shape[1])
    return (top, left, height, width), (sums.max() / total).item()


def _darkened(picture: Image, bright: Tensor) -> Image:
    """Return a picture whose patches have these shares (rows, columns) of their brightness."""
    from PIL import Image

    mask = Image.fromarray((255 * bright).round().to(torch.uint8).numpy())
    mask = mask.resize(picture.size, Image.Resampling.BILINEAR)
    return Image.composite(picture, Image.new("RGB", picture.size), mask)


def _cut(model: Model, picture: Image, box: Box, outlined: tuple[int, int] | None) -> str:
    """Return a box of a picture as a PNG file in base64, with the outline of a patch."""
    from PIL import Image, ImageDraw

    height, width = pair(model.config.patch_size)
    top, left, rows, columns = box
    scale = SIDE / max(rows * height, columns * width)
    size = (round(columns * width * scale), round(rows * height * scale))
    corners = (left * width, top * height, (left + columns) * width, (top + rows) * height)
    crop = picture.crop(corners).resize(size, Image.Resampling.BICUBIC)
    if outlined:
        across, down = width * scale, height * scale
        x, y = (outlined[1] - left) * across, (outlined[0] - top) * down
        draw = ImageDraw.Draw(crop)
        draw.rectangle((x - 1, y - 1, x + across, y + down), outline=(255, 255, 255), width=4)
        draw.rectangle((x, y, x + across - 1, y + down - 1), outline=POSITIVE, width=2)
    file = io.BytesIO()
    crop.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()
