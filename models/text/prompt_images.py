"""Images in prompts of models of images and text: their pixels, which pixels each token was made of, and maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from icebear.errors import InputError
from icebear.models.batch import Batch
from icebear.models.prompt_image import CHANNELS, PromptImage, patches_of
from icebear.models.text.chat import Chat, templated
from icebear.models.text.counterfactual_images import KINDS, MASK, blurred
from icebear.models.text.images import ImageMap, pair, read_picture
from icebear.models.text.prompts import Prompt
from icebear.models.text.reader import Reader


def with_image(model: Reader, prompt: Prompt) -> Prompt:
    """Return a prompt with the token ids and the image that the model reads; a prompt without an image as it is.

    Raises `InputError` if the image cannot be read, or its tokens are not in the prompt.
    """
    is_read = isinstance(prompt.image, PromptImage)
    if prompt.image is None or (is_read and prompt.ids is not None):
        return prompt
    image: PromptImage = prompt.image if is_read else image_of(model, prompt.image)
    ids = _ids(model, prompt, image)
    count = ids.count(model.net.config.image_token_id)
    if count != image.count:
        raise InputError(
            f"The prompt has {count} tokens of the image, but {model.name} makes {image.count} of it; give token ids "
            f"with {image.count} times {model.net.config.image_token_id}, or a text."
        )
    return Prompt(ids=tuple(ids), image=replace(image, prompt_length=len(ids)), about=prompt.about)


def image_of(model: Reader, image: Any) -> PromptImage:
    """Return an image (a path, an image, or pixels (C, H, W)) as the model reads it. Raises `InputError`."""
    if model.vision is None:
        raise InputError(f"{model.name} reads text, not images; give it a text, token ids or chat messages.")
    read = _of_pixels(model, image) if hasattr(image, "ndim") else _of_picture(model, image)
    return replace(read, inputs={name: _to(model, x) for name, x in read.inputs.items()})


def _ids(model: Reader, prompt: Prompt, image: PromptImage) -> list[int]:
    """Return the token ids of a prompt, with those of its image."""
    if prompt.ids is not None or prompt.tokens is not None:
        return model.ids(replace(prompt, image=None))
    if model.tokenizer is None:
        raise InputError(f"{model.name} was given without a tokenizer; give token ids with those of the image.")
    text, begun = _written(model, prompt, image), getattr(model.tokenizer, "bos_token", None)
    adds = model.vision.adds_special_tokens and not (begun and text.startswith(begun))
    return list(model.tokenizer(text, add_special_tokens=adds)["input_ids"])


def _to(model: Reader, x: Tensor) -> Tensor:
    return x.to(model.device, model.dtype) if x.is_floating_point() else x.to(model.device)


def _of_pixels(model: Reader, image: Any) -> PromptImage:
    """Read pixels (C, H, W) as the model reads them."""
    pixels, tower = torch.as_tensor(image), model.net.config.vision_config
    if pixels.ndim != 3 or len(pixels) != CHANNELS or not pixels.is_floating_point():
        raise InputError(
            f"The pixels have the shape {tuple(pixels.shape)}, {str(pixels.dtype).removeprefix('torch.')}; give "
            f"{CHANNELS} x height x width as floating-point numbers."
        )
    if model.vision.pixels == "patches":
        return _of_patches(model, pixels)
    size = pair(tower.image_size)
    if pixels.shape[1:] != size:
        raise InputError(
            f"The image has {pixels.shape[1]} x {pixels.shape[2]} pixels, but {model.name} reads {size[0]} x "
            f"{size[1]}; resize it first."
        )
    values = pixels[None, None] if model.vision.pixels == "rows of tiles" else pixels[None]
    return _image(model, {"pixel_values": values})


def _of_patches(model: Reader, pixels: Tensor) -> PromptImage:
    """Cut pixels (C, H, W) into patches."""
    block, merged = _block(model), model.vision.merged(model.net.config)
    if any(size % side or not size for size, side in zip(pixels.shape[1:], block, strict=True)):
        raise InputError(
            f"The image has {pixels.shape[1]} x {pixels.shape[2]} pixels, but {model.name} reads multiples of "
            f"{block[0]} x {block[1]}; resize it first."
        )
    rows, columns = (size // side * merged for size, side in zip(pixels.shape[1:], block, strict=True))
    values = patches_of(pixels, block, merged, model.net.config.vision_config.temporal_patch_size)
    return _image(model, {"pixel_values": values, "image_grid_thw": torch.tensor([[1, rows, columns]])})


def _block(model: Reader) -> tuple[int, int]:
    height, width = pair(model.net.config.vision_config.patch_size)
    merged = model.vision.merged(model.net.config)
    return height * merged, width * merged


def _image(model: Reader, inputs: Mapping[str, Tensor], grid: tuple[int, int] = (1, 1)) -> PromptImage:
    """grid: the rows and columns of tiles."""
    config, merged = model.net.config, model.vision.merged(model.net.config)
    strategy, tower = getattr(config, "vision_feature_select_strategy", None), config.vision_config.model_type
    if strategy == "default" and tower == "siglip_vision_model":
        raise InputError(
            f"{model.name} leaves out the first patch of an image, so icebear cannot put its tokens on it."
        )
    begins = int(strategy == "full" and tower == "clip_vision_model")
    image = PromptImage(dict(inputs), model.vision.pixels, _block(model), merged, grid, begins=begins)
    count = len(image.unpacked(image.values))
    if count not in (grid[0] * grid[1], grid[0] * grid[1] + 1):
        raise InputError(
            f"The processor of {model.name} makes {count} parts of the image, which icebear cannot put on the picture; "
            "turn the cropping of images off in its configuration."
        )
    return replace(image, has_overview=count > grid[0] * grid[1])


def _of_picture(model: Reader, image: Any) -> PromptImage:
    """Read a path or an image."""
    if not isinstance(image, (str, Path)) and not hasattr(image, "convert"):
        raise InputError(f"{model.name} reads images with text; give a path, an image, or pixels (C, H, W).")
    if model.processor is None:
        raise InputError(
            f"{model.name} has no image processor (preprocessor_config.json); save one with it, or in Python give "
            "pixels (C, H, W)."
        )
    picture = (read_picture(image) if isinstance(image, (str, Path)) else image).convert("RGB")
    images = [[picture]] if model.vision.pixels == "rows of tiles" else [picture]
    read = model.processor(images=images, return_tensors="pt", **model.vision.options)
    inputs = {name: read[name] for name in INPUTS if name in read}
    return _image(model, inputs, _grid(model, picture, read))


INPUTS = ("pixel_values", "pixel_attention_mask", "image_grid_thw")
"""What models read of an image."""


def _grid(model: Reader, picture: Any, read: Mapping[str, Any]) -> tuple[int, int]:
    """Return the rows and columns of the tiles that the processor cut a picture into. read: its output."""
    if "rows" in read:
        return max(read["rows"][0][0], 1), max(read["cols"][0][0], 1)
    if "crop_to_patches" not in model.vision.options:
        return 1, 1
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

    size = model.processor.size["height"], model.processor.size["width"]
    limits = model.processor.min_patches, model.processor.max_patches
    columns, rows = get_optimal_tiled_canvas((picture.height, picture.width), size, *limits)
    return rows, columns


def _written(model: Reader, prompt: Prompt, image: PromptImage) -> str:
    """Return the text of a prompt with the tokens of its image: before the text, if it does not say where. Raises
    `InputError` if it stands for several images."""
    vision = model.vision
    token = model.text(model.net.config.image_token_id)
    sign = vision.sign or token
    if prompt.chat is not None:
        text = _chat_text(model, prompt.chat)
    elif prompt.text is not None:
        before, after = vision.around
        text = prompt.text if sign in prompt.text else f"{before}{sign}{after}{prompt.text}"
    else:
        raise InputError("An image stands in a text or a chat; give one of them, or pixels (C, H, W) with token ids.")
    if text.count(sign) != 1:
        raise InputError(
            f"The prompt has {text.count(sign)} signs {sign!r} of an image, and icebear explains one image; leave one."
        )
    return text.replace(sign, vision.written(image, token, model.tokenizer)) + vision.ends


def _chat_text(model: Reader, chat: Chat) -> str:
    """Return a chat by the model's template, with the image before the text of its message: the one that has it, or the
    first one of the user."""
    chosen = chat.image_turn
    if chosen is None:
        raise InputError("The chat has no message of the user that an image could stand in; add one.")
    messages = []
    for turn, message in enumerate(chat.messages):
        others = {key: value for key, value in message.items() if key not in ("ids", "image")}
        picture = [{"type": "image"}] if turn == chosen else []
        messages.append({**others, "content": [*picture, {"type": "text", "text": message["content"] or ""}]})
    return str(templated(model, messages, chat.template, tokenize=False))


def counterfactual_prompt(model: Reader, prompt: Prompt, kind: Any, about: str) -> Prompt:
    """Return a prompt with another image in place of its own.

    kind: ``blur`` (each view of the image under a Gaussian), ``grey`` (all pixels are medium gray), or another image of
        the same size.

    Raises `InputError`.
    """
    read = with_image(model, prompt)
    image: PromptImage = read.image
    if isinstance(kind, str) and kind.startswith(MASK):
        raise InputError("A mask is for classifiers of images; of a prompt with an image give blur, grey or an image.")
    if isinstance(kind, str) and kind in KINDS:
        tiles = image.tiles
        other = _gray(model, tiles) if kind == "grey" else image.cut([blurred(x) for x in image.views(tiles)])
        return replace(read, image=image.with_tiles(other), about=about)
    shown = kind if isinstance(kind, PromptImage) else image_of(model, kind)
    if shown.values.shape != image.values.shape or shown.grid != image.grid:
        raise InputError("The counterfactual image has another size than the image; give one of the same size.")
    return replace(read, image=replace(shown, prompt_length=image.prompt_length), about=about)


def _gray(model: Reader, tiles: Tensor) -> Tensor:
    """Return tiles (N, C, H, W) of medium gray; without a processor with the usual mean and deviation of 1/2."""
    mean, deviation = (
        torch.as_tensor(getattr(model.processor, name, None) or [0.5] * CHANNELS).to(tiles)
        for name in ("image_mean", "image_std")
    )
    return ((128 / 255 - mean) / deviation)[:, None, None].expand_as(tiles)


def prompt_images_of(prompts: Sequence[Prompt]) -> tuple[PromptImage, ...] | None:
    """Return the image of each prompt that was read, None if there are none. Raises `InputError` if only some have
    one."""
    images = tuple(prompt.image for prompt in prompts if prompt.image is not None)
    if images and len(images) < len(prompts):
        raise InputError("Some prompts have an image and others have none; explain them apart.")
    return images or None


def image_inputs(model: Reader, batch: Batch) -> dict[str, Tensor]:
    """Return what a model reads of the images of a batch."""
    images = batch.images or ()
    inputs = {name: torch.cat([image.inputs[name] for image in images]) for name in images[0].inputs}
    if not model.vision.token_types:
        return inputs
    if model.vision.marks_answers:
        lengths = torch.tensor([image.prompt_length for image in images], device=batch.ids.device)
        types = (torch.arange(batch.ids.shape[1], device=batch.ids.device) >= lengths[:, None]).long()
    else:
        types = (batch.ids == model.net.config.image_token_id).long()
    return {**inputs, model.vision.token_types: types}


def map_of(image: PromptImage, relevance: Tensor) -> ImageMap:
    """Return the map of the relevance of an image's pixel values. A pixel of the overview is as many pixels of the
    picture as there are tiles, to which its relevance goes in equal parts."""
    picture, *overviews = image.views(image.unpacked(relevance).sum(1, keepdim=True))
    for overview in overviews:
        rows, columns = image.grid
        spread = overview.repeat_interleave(rows, 1).repeat_interleave(columns, 2)
        picture = picture + spread / (rows * columns)
    shown = image.views(image.tiles)[0].float()
    low, high = shown.amin(), shown.amax()
    scaled = (shown - low) / (high - low).clamp(min=1e-12)
    return ImageMap(picture[0].cpu(), scaled.cpu(), image.block)
