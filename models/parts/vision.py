"""Models of images and text: how each kind makes tokens of an image, and what else it reads of it.

A kind is a row of `VISION`; `icebear.models.text.prompt_images` reads images by it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from icebear.errors import ModelError
from icebear.models.prompt_image import PixelFormat, PromptImage

Written = Callable[[PromptImage, str, Any], str]
"""Returns the text of an image's tokens in a prompt, from the image, the text of one of them and the tokenizer."""


@dataclass(frozen=True)
class Vision:
    """How a kind of model reads an image."""

    merged: Callable[[Any], int] = lambda config: 1
    """Returns how many patches of a row, and of a column, become one token."""
    pixels: PixelFormat = "tiles"
    written: Written = lambda image, token, tokenizer: token * image.count
    sign: str = ""
    """What stands for the image in a text; by default its token."""
    around: tuple[str, str] = ("", "")
    """What a template writes around it."""
    ends: str = ""
    """What ends a text."""
    adds_special_tokens: bool = True
    """Whether the tokenizer's special tokens are added to a text."""
    token_types: str = ""
    """The input that is 1 for the tokens of images, or empty."""
    marks_answers: bool = False
    """Whether that input is 1 for the tokens of answers instead."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the image processor."""
    towers: tuple[str, ...] = ("clip_vision_model", "siglip_vision_model")
    """The model types of vision towers that are read."""


def _pooled(config: Any) -> int:
    """Return Gemma 3's patches per token: its projector takes the mean of squares of patches."""
    return config.vision_config.image_size // config.vision_config.patch_size // isqrt(config.mm_tokens_per_image)


def _tiled(image: PromptImage, token: str, tokenizer: Any) -> str:
    """Return SmolVLM's text of an image: each tile after the names of its row and column, then the overview."""
    edge, (rows, columns) = "<fake_token_around_image>", image.grid
    tile = token * (image.count // image.tile_count)
    lines = (
        "".join(f"{edge}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(columns)) for row in range(rows)
    )
    cut = "".join(f"{line}\n" for line in lines) + "\n" if image.has_overview else ""
    return f"{cut}{edge}<global-img>{tile}{edge}"


def _qwen(tower: str) -> Vision:
    return Vision(
        merged=lambda config: config.vision_config.spatial_merge_size,
        pixels="patches",
        around=("<|vision_start|>", "<|vision_end|>"),
        token_types="mm_token_type_ids",
        towers=(tower,),
    )


VISION = {
    "llava": Vision(),
    "smolvlm": Vision(
        merged=lambda config: config.scale_factor,
        pixels="rows of tiles",
        written=_tiled,
        options={"return_row_col_info": True},
        towers=("smolvlm_vision",),
    ),
    "paligemma": Vision(
        written=lambda image, token, tokenizer: token * image.count + tokenizer.bos_token,
        ends="\n",
        adds_special_tokens=False,
        token_types="token_type_ids",
        marks_answers=True,
        towers=("siglip_vision_model",),
    ),
    "gemma3": Vision(
        merged=_pooled,
        written=lambda image, token, tokenizer: f"\n\n<start_of_image>{token * image.count}<end_of_image>\n\n",
        sign="<start_of_image>",
        token_types="token_type_ids",
        towers=("siglip_vision_model",),
    ),
    "internvl": Vision(
        merged=lambda config: round(1 / config.downsample_ratio),
        written=lambda image, token, tokenizer: f"<img>{token * image.count}</img>",
        options={"crop_to_patches": True},
        towers=("internvl_vision",),
    ),
    "qwen2_vl": _qwen("qwen2_vl_vision"),
    "qwen2_5_vl": _qwen("qwen2_5_vl_vision"),
    "qwen3_vl": _qwen("qwen3_vl_vision"),
}
"""By `config.model_type`."""


def vision_of(net: Any) -> Vision | None:
    """Return how a transformers model reads images with text; None for a model of texts, or of images alone. Raises
    `ModelError` for a kind that icebear does not know."""
    tower = getattr(net.config, "vision_config", None)
    if tower is None or net.config.is_encoder_decoder:
        return None
    vision = VISION.get(net.config.model_type)
    if vision is not None and tower.model_type in vision.towers:
        return vision
    kind, known = net.config.model_type, ", ".join(VISION)
    which = f"with a {tower.model_type} as vision tower" if vision else "with images"
    raise ModelError(f"icebear cannot explain {kind} models {which}; it explains images with text of {known}.")


def forward_in_pass(module: Any, rows: int) -> Callable[..., Tensor] | None:
    """Return a forward method for a pass with relevance rules, if the module is attention over the patches of all
    images in one row (Qwen): rules need a row for each prompt. rows: the number of prompts, whose images have the same
    size."""
    if not type(module).__name__.endswith("VisionAttention") or not hasattr(module, "qkv"):
        return None
    code = sys.modules[type(module).__module__]

    def forward(x: Tensor, cu_seqlens: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Tensor:
        patches, lengths = len(x), cu_seqlens.diff().tolist()
        split = module.qkv(x).reshape(patches, 3, module.num_heads, -1).permute(1, 0, 2, 3).unbind(0)
        rotated = code.apply_rotary_pos_emb_vision(*split[:2], *position_embeddings)
        q, k, v = (
            part.reshape(rows, patches // rows, module.num_heads, -1).transpose(1, 2) for part in (*rotated, split[2])
        )  # (B, H, N, D)
        attend = code.ALL_ATTENTION_FUNCTIONS.get_interface(
            module.config._attn_implementation, code.eager_attention_forward
        )
        windows = lengths[: len(lengths) // rows]
        parts = zip(*(part.split(windows, 2) for part in (q, k, v)), strict=True)
        attended = [attend(module, *part, None, scaling=module.scaling, is_causal=False)[0] for part in parts]
        return module.proj(torch.cat(attended, 1).reshape(patches, -1))  # type: ignore[no-any-return]

    return forward
