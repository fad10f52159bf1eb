"""The similarity of a text and an image, by models with two towers (CLIP, SigLIP): which words and patches made it.

1. The number is the cosine of the two embeddings, without the scale and the bias that make it a logit.
2. It is a product of both towers, which get half of its relevance each (AttnLRP's uniform rule); the lengths of the
   embeddings are constants, as those of other norms are (AttnLRP Eq. 19). So words, patches, positions, biases and the
   share of the softmax are one sum.
3. The region of a word is the map without the word, taken from the map with it: what the word adds to each patch.

References: AttnLRP: Achtibat et al. 2024, arXiv 2402.05602. CLIP: Radford et al. 2021, arXiv 2103.00020.
SigLIP: Zhai et al. 2023, arXiv 2303.15343.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from icebear.concepts.methods.attnlrp import ATTNLRP, AttnLRP
from icebear.concepts.passes.run import Conservation
from icebear.errors import InputError, ModelError, need
from icebear.lrp.context import relevance_rules
from icebear.models.loading.loading import explained, image_processor
from icebear.models.lock import replaced
from icebear.models.text.counterfactual_images import blurred
from icebear.models.text.images import ImageMap, pair, read_picture
from icebear.paths import check_model_path, local
from icebear.render import page, render

KINDS = ("clip", "siglip")
"""By `config.model_type`."""
CLASSES = ("CLIPModel", "SiglipModel")
CONSTANTS = ("biases", "positions", "softmax")


def has_two_towers(name: str) -> bool:
    """Return whether a folder or a hub id is a model of both towers; False if it cannot be read."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(str(local(name)) if name.startswith("~") else name)
    except (OSError, ValueError, KeyError):
        return False
    return config.model_type in KINDS and (config.architectures or [""])[0] in CLASSES


@dataclass(frozen=True, eq=False)
class TwoTowers:
    """A model that embeds texts and images in one space."""

    net: Any
    """transformers' CLIPModel or SiglipModel."""
    tokenizer: Any = None
    processor: Any = None
    """The image processor."""
    name: str = "this model"

    def __post_init__(self) -> None:
        kind = self.net.config.model_type
        if kind not in KINDS or not hasattr(self.net, "text_model"):
            raise ModelError(f"icebear explains similarities of {' and '.join(KINDS)} with both towers, not of {kind}.")

    @classmethod
    def load(cls, name: str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> TwoTowers:
        """Load a folder or a hub id. Raises `ModelError`."""
        import transformers

        need("images")
        check_model_path(name)
        with explained(name):
            config = transformers.AutoConfig.from_pretrained(name)
            if config.model_type not in KINDS:
                raise ModelError(f"{name} ({config.model_type}) has not two towers; icebear explains {KINDS}.")
            net = transformers.AutoModel.from_pretrained(name, dtype=dtype, use_safetensors=True)
            tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        return cls(net.to(device).eval(), tokenizer, image_processor(name, {}), name)

    def text_ids(self, text: str | Sequence[int]) -> list[int]:
        """Return the token ids of a text. Raises `InputError`."""
        if not isinstance(text, str):
            return list(text)
        if self.tokenizer is None:
            raise InputError(f"{self.name} was given without a tokenizer; give token ids.")
        padding = {"padding": "max_length"} if self.is_padded else {}
        ids = list(self.tokenizer(text, truncation=False, max_length=self._longest, **padding)["input_ids"])
        if len(ids) > self._longest:
            raise InputError(f"The text has {len(ids)} tokens, but {self.name} reads {self._longest}; shorten it.")
        return ids

    @property
    def is_padded(self) -> bool:
        """Whether texts are padded to one length, as SigLIP was trained."""
        return bool(self.net.config.model_type == "siglip")

    @property
    def _longest(self) -> int:
        return int(self.net.config.text_config.max_position_embeddings)

    def pixels(self, image: Any) -> Tensor:
        """Return the pixels (C, H, W) of a path, an image or pixels. Raises `InputError`."""
        if not hasattr(image, "ndim"):
            if self.processor is None:
                raise InputError(f"{self.name} has no image processor; give pixels (C, H, W).")
            picture = image if hasattr(image, "convert") else read_picture(image)
            image = self.processor(images=picture.convert("RGB"), return_tensors="pt")["pixel_values"][0]
        size = pair(self.net.config.vision_config.image_size)
        if image.ndim != 3 or tuple(image.shape[1:]) != size:
            raise InputError(f"{self.name} reads images of {size[0]} x {size[1]} pixels; resize it first.")
        return torch.as_tensor(image).to(self.net.device, self.net.dtype)


@dataclass(frozen=True, eq=False)
class Similarity:
    """The relevance of words and patches for the similarity of a text and an image."""

    strings: tuple[str, ...]
    """The tokens of the text."""
    ids: tuple[int, ...]
    tokens: Tensor
    """(T,) their relevance."""
    image: ImageMap
    sums: Conservation
    """Its tokens are those of the text and the patches."""
    blurred: float
    """The similarity of the text and the blurred image, as control."""
    towers: TwoTowers
    pixels: Tensor
    method: AttnLRP | None

    @property
    def value(self) -> float:
        """The cosine of both embeddings."""
        return self.sums.target

    @cached_property
    def words(self) -> tuple[int, ...]:
        """The positions of tokens that are no special tokens."""
        special = set(getattr(self.towers.tokenizer, "all_special_ids", ()))
        return tuple(position for position, token in enumerate(self.ids) if token not in special)

    def region(self, position: int) -> ImageMap:
        """Return what a token of the text adds to the relevance of each patch. Raises `InputError`."""
        if position not in self.words:
            raise InputError(f"Position {position} is no word of the text; choose one of {list(self.words)}.")
        left = [*self.ids[:position], *self.ids[position + 1 :]]
        padding = [self.towers.net.config.text_config.pad_token_id] if self.towers.is_padded else []
        without = similarity(self.towers, [*left, *padding], self.pixels, self.method)
        return replace(self.image, pixels=self.image.pixels - without.image.pixels)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict: the similarity, words with their relevance, and patches (rows, columns)."""
        words = [{"position": at, "text": self.strings[at], "relevance": self.tokens[at].item()} for at in self.words]
        patches = self.image.patches.tolist()
        return {
            **{"similarity": self.value, "blurred": self.blurred, "words": words, "patches": patches},
            **{"sums": self.sums.to_dict(), "method": repr(self.method)},
        }

    def to_html(self) -> str:
        """Return a page: the map of all patches, and the region of each word."""
        maps = [(f"all {len(self.image.patches.flatten())} patches", self.image.patches.sum().item(), self.image)]
        maps += [(self.strings[at], self.tokens[at].item(), self.region(at)) for at in self.words]
        rows = [(name, value, b64encode(map_.png()).decode()) for name, value, map_ in maps]
        return str(page("Similarity", render("icebear.concepts/similarity.html", result=self, rows=rows)))

    def __str__(self) -> str:
        lines = [f"Similarity {self.value:+.3f}; with the image blurred {self.blurred:+.3f}"]
        lines += [f"  {self.strings[position]:<20} {self.tokens[position].item():+.4f}" for position in self.words]
        patches = self.image.patches
        row, column = divmod(int(patches.argmax()), patches.shape[1])
        lines.append(f"  patches {patches.sum().item():+.4f}, most at {row},{column} ({patches.max().item():+.4f})")
        return "\n".join([*lines, f"  {self.sums}"])


def similarity(
    towers: TwoTowers, text: str | Sequence[int], image: Any, method: AttnLRP | None = ATTNLRP
) -> Similarity:
    """Explain the similarity of a text and an image.

    Parameters
    ----------
    towers : TwoTowers
    text : str or list of int
        A text, or its token ids with special tokens.
    image
        A path, an image, or pixels (C, H, W) as the model reads them.
    method : AttnLRP, optional
        The relevance rules; None for gradient x input, which does not sum to the number.

    Returns
    -------
    Similarity

    Raises
    ------
    InputError
        If the text or the image cannot be read.
    """
    ids, pixels = towers.text_ids(text), towers.pixels(image)
    rows, shown = torch.tensor([ids], device=pixels.device), pixels[None]
    values, (tokens, of_pixels), constants = explained_rows(towers.net, rows, shown, method)
    with torch.no_grad():
        control = _Cosine(towers.net, is_ruled=False)(rows, blurred(pixels)[None]).item()
    low, high = pixels.amin(), pixels.amax()
    picture = (pixels - low) / (high - low).clamp(min=1e-12)
    patch = pair(towers.net.config.vision_config.patch_size)
    shares = {name: value.item() for name, value in constants.items()}
    sums = Conservation(values.item(), (tokens.sum() + of_pixels.sum()).item(), **shares)
    names = towers.tokenizer.convert_ids_to_tokens(ids) if towers.tokenizer is not None else map(str, ids)
    map_ = ImageMap(of_pixels[0].sum(0).cpu(), picture.float().cpu(), patch)
    return Similarity(tuple(names), tuple(ids), tokens[0].cpu(), map_, sums, control, towers, pixels, method)


def explained_rows(
    net: Any, ids: Tensor, pixels: Tensor, method: AttnLRP | None
) -> tuple[Tensor, tuple[Tensor, Tensor], dict[str, Tensor]]:
    """Return the similarity (B,) of each text (B, T) with its image (B, C, H, W), the relevance of tokens (B, T) and
    pixels (B, C, H, W), and what constants have of it, by name (B,)."""
    leaves: dict[str, Tensor] = {"pixels": pixels.detach().clone().requires_grad_()}

    def leaf(name: str, x: Tensor) -> Tensor:
        leaves[name] = x.detach().requires_grad_()
        return leaves[name].clone()

    constants = {name: torch.zeros(len(ids), device=pixels.device, dtype=pixels.dtype) for name in CONSTANTS}
    cosine = _Cosine(net, is_ruled=method is not None)
    with ExitStack() as undo:
        undo.enter_context(torch.enable_grad())
        if method is not None:
            undo.enter_context(relevance_rules(cosine, method, constants))
        undo.enter_context(_readable_pooling(net, leaf))
        embedding = net.text_model.embeddings.token_embedding
        undo.callback(embedding.register_forward_hook(lambda module, args, x: leaf("tokens", x)).remove)
        values = cosine(ids, leaves["pixels"])
        gradients = torch.autograd.grad(values.sum(), list(leaves.values()), allow_unused=True)
    relevance = {
        name: torch.zeros_like(x) if g is None else x.detach() * g
        for (name, x), g in zip(leaves.items(), gradients, strict=True)
    }
    if "probe" in relevance:
        constants["biases"] = constants["biases"] + relevance["probe"].flatten(1).sum(1)
    return values.detach(), (relevance["tokens"].sum(-1), relevance["pixels"]), constants


class _Cosine(nn.Module):
    """The similarity (B,) of texts (B, T) and images (B, C, H, W)."""

    def __init__(self, net: Any, is_ruled: bool) -> None:
        super().__init__()
        self.net, self.is_ruled = net, is_ruled

    def forward(self, ids: Tensor, pixels: Tensor) -> Tensor:
        text = self.net.text_model(input_ids=ids).pooler_output
        image = self.net.vision_model(pixel_values=pixels).pooler_output
        if hasattr(self.net, "text_projection"):
            text, image = self.net.text_projection(text), self.net.visual_projection(image)
        if not self.is_ruled:
            return functional.cosine_similarity(text, image)
        text, image = (x / x.detach().norm(dim=-1, keepdim=True) for x in (text, image))
        return ((text.detach() * image + text * image.detach()) / 2).sum(-1)


@contextmanager
def _readable_pooling(net: Any, leaf: Any) -> Iterator[None]:
    """Let SigLIP's attention pooling run as single operations, each of which has a rule. Its query is a constant, whose
    relevance is a leaf's."""
    head = getattr(net.vision_model, "head", None)
    if head is None:
        yield
        return
    with replaced(head.attention, "forward", partial(_pooled, head.attention, leaf)):
        yield


def _pooled(attention: nn.MultiheadAttention, leaf: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor]:
    weights, biases = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
    inputs = (leaf("probe", query), key, value)
    parts = [functional.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]
    q, k, v = (part.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2) for part in parts)
    mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    return (functional.linear(mixed, attention.out_proj.weight, attention.out_proj.bias),)
