"""The image of a prompt, as a model reads it: tiles, and the blocks of pixels that its tokens are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, floor
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from icebear.converters import checked

PixelFormat = Literal["tiles", "rows of tiles", "patches"]
"""The shape of ``pixel_values``: tiles (N, C, H, W); tiles of each prompt (B, N, C, H, W); or patches (N, C * F * P *
P) in the order of tokens, in which each pixel stands once for each of F frames."""


@dataclass(frozen=True, eq=False)
class PromptImage:
    """The image of a prompt, as the model reads it: cut into tiles of equal size, each tile into blocks that are a
    token, and maybe followed by the whole picture at the size of a tile (the overview)."""

    inputs: dict[str, Tensor]
    """``pixel_values``, and what describes them, as the model takes them of one prompt."""
    pixels: PixelFormat
    block: tuple[int, int]
    """The height and width, in pixels, of what a token is made of."""
    merged: int
    """The patches of a row, and of a column, of a block."""
    grid: tuple[int, int] = (1, 1)
    """The rows and columns of tiles."""
    has_overview: bool = False
    begins: int = 0
    """The tokens of a tile before its blocks ([CLS]), which have no pixels."""
    prompt_length: int = 0
    """The tokens of the prompt; those after it are an answer."""

    @property
    def values(self) -> Tensor:
        return self.inputs["pixel_values"]

    @property
    def tile_count(self) -> int:
        """The number of tiles, the overview among them."""
        return self.grid[0] * self.grid[1] + self.has_overview

    @property
    def count(self) -> int:
        """The number of the image's tokens."""
        return len(self.token_names)

    @property
    def tiles(self) -> Tensor:
        """(N, C, H, W)"""
        tiles = self.unpacked(self.values)
        return tiles / (self.values.numel() // tiles.numel())  # frames are equal

    def unpacked(self, values: Tensor) -> Tensor:
        """Return values of the pixels, in the shape in which the model reads pixels, as tiles (N, C, H, W): the sum
        over frames."""
        if self.pixels != "patches":
            return values[0] if self.pixels == "rows of tiles" else values
        rows, columns = self.inputs["image_grid_thw"][0, 1:].tolist()
        height, width = (size // self.merged for size in self.block)
        squares = rows // self.merged, columns // self.merged, self.merged, self.merged
        pixels = values.reshape(*squares, CHANNELS, -1, height, width).sum(5)
        return pixels.permute(4, 0, 2, 5, 1, 3, 6).reshape(1, CHANNELS, rows * height, columns * width)

    def packed(self, tiles: Tensor) -> Tensor:
        """Return tiles (N, C, H, W) in the shape in which the model reads pixels."""
        if self.pixels != "patches":
            return tiles[None] if self.pixels == "rows of tiles" else tiles
        frames = self.values.numel() // tiles.numel()
        return patches_of(tiles[0], self.block, self.merged, frames)

    def with_tiles(self, tiles: Tensor) -> PromptImage:
        """Return an image of the same shape with other pixels (N, C, H, W)."""
        return replace(self, inputs={**self.inputs, "pixel_values": self.packed(tiles).to(self.values)})

    def views(self, tiles: Tensor) -> list[Tensor]:
        """Return the picture (C, rows * H, columns * W) that tiles were cut from, and the overview (C, H, W)."""
        rows, columns = self.grid
        cut = tiles[: rows * columns].unflatten(0, self.grid)  # (rows, columns, C, H, W)
        return [cut.permute(2, 0, 3, 1, 4).flatten(1, 2).flatten(2), *tiles[rows * columns :]]

    def cut(self, views: Sequence[Tensor]) -> Tensor:
        """Return views as tiles (N, C, H, W)."""
        (rows, columns), picture = self.grid, views[0]
        split = picture.unflatten(2, (columns, -1)).unflatten(1, (rows, -1))  # (C, rows, H, columns, W)
        return torch.cat((split.permute(1, 3, 0, 2, 4).flatten(0, 1), *(view[None] for view in views[1:])))

    def exchanged(self, other: PromptImage, patches: Sequence[tuple[int, int]]) -> PromptImage:
        """Return the image with the pixels of another one of its shape at some patches (row, column) of the picture;
        in the overview at the pixels that these cover."""
        views = [view.clone() for view in self.views(self.tiles)]
        sources = self.views(other.tiles)
        for number, (view, source) in enumerate(zip(views, sources, strict=True)):
            sides = [side / count if number else side for side, count in zip(self.block, self.grid, strict=True)]
            for patch in patches:
                area = (slice(floor(at * side), ceil((at + 1) * side)) for at, side in zip(patch, sides, strict=True))
                where = (slice(None), *area)
                view[where] = source[where]
        return self.with_tiles(self.cut(views))

    def token_sums(self, values: Tensor) -> Tensor:
        """Return the sums (tokens,) of values of the pixels, over the block of each token of the image."""
        height, width = self.block
        blocks = self.unpacked(values).sum(1).unfold(1, height, height).unfold(2, width, width).sum((-1, -2))
        return functional.pad(blocks.flatten(1), (self.begins, 0)).flatten()

    @property
    def token_names(self) -> tuple[str, ...]:
        """The names of the image's tokens: ``row,column`` in the picture or, after ``overview:``, in the overview."""
        count, _, *size = self.unpacked(self.values).shape
        rows, columns = (length // side for length, side in zip(size, self.block, strict=True))
        names: list[str] = []
        for number in range(count):
            row, column = divmod(number, self.grid[1])
            is_overview = self.has_overview and number == count - 1
            row, column, before = (0, 0, "overview:") if is_overview else (row * rows, column * columns, "")
            names += ["[CLS]"] * self.begins
            names += [f"{before}{row + y},{column + x}" for y in range(rows) for x in range(columns)]
        return tuple(names)


CHANNELS = 3


def patches_of(picture: Tensor, block: tuple[int, int], merged: int, frames: int) -> Tensor:
    """Return a picture (C, H, W) as patches (N, C * F * P * P), each pixel once for each frame; patches of a block
    follow each other."""
    height, width = (size // merged for size in block)
    rows, columns = (size // side for size, side in zip(picture.shape[1:], block, strict=True))
    split = picture.reshape(CHANNELS, rows, merged, height, columns, merged, width).permute(1, 4, 2, 5, 0, 3, 6)
    return (
        split[:, :, :, :, :, None]
        .expand(-1, -1, -1, -1, -1, frames, -1, -1)
        .reshape(rows * merged * columns * merged, -1)
    )


def saved_image(image: PromptImage) -> dict[str, Any]:
    """Return an image as `loaded_image` reads it."""
    return {**vars(image), "inputs": dict(image.inputs), "block": list(image.block), "grid": list(image.grid)}


def loaded_image(saved: Any, device: Any) -> PromptImage:
    """Return a saved image on a device. Raises what `checked` raises."""
    inputs = {
        str(name): checked(x, isinstance(x, Tensor), Tensor).to(device)
        for name, x in checked(saved["inputs"], isinstance(saved["inputs"], dict), dict).items()
    }
    for name in ("merged", "begins", "prompt_length"):
        checked(saved[name], type(saved[name]) is int and saved[name] >= 0, int)
    checked(saved["pixels"], saved["pixels"] in get_args(PixelFormat), str)
    checked(saved["has_overview"], type(saved["has_overview"]) is bool, bool)
    sides = {name: tuple(checked(n, type(n) is int and n > 0, int) for n in saved[name]) for name in ("block", "grid")}
    return PromptImage(**{**saved, "inputs": inputs, **sides})
