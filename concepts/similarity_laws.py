"""The laws of models with two towers: what must hold of the relevance of a text and an image, measured."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from icebear.concepts.deviation import deviation
from icebear.concepts.methods.attnlrp import ATTNLRP, CP_LRP
from icebear.concepts.similarity import explained_rows
from icebear.models.text.images import pair

METHODS = (CP_LRP, ATTNLRP)


def similarity_laws(net: Any, ids: Tensor, pixels: Tensor) -> dict[str, float]:
    """Measure each law, as the largest deviation from it.

    ``sums``: the part of the similarity that transformers computes for which the relevance of CP-LRP and AttnLRP does
    not account, as a share of the sizes of all relevance. ``gradient``: gradient x input and torch's. ``batch``: pairs
    together, and each alone.
    ``blocks``: patches of the image that do not hang on the pixels of their block alone.

    ids: (B, T) texts. pixels: (B, C, H, W) their images.
    """
    return {
        "sums": max(_unaccounted(net, ids, pixels, method) for method in METHODS),
        "gradient": _from_gradient(net, ids, pixels),
        "batch": max(_from_alone(net, ids, pixels, method) for method in METHODS),
        "blocks": float(len(misplaced(net, pixels[:1]))),
    }


def own_similarity(net: Any, ids: Tensor, pixels: Tensor) -> Tensor:
    """Return the cosine (B,) that transformers computes."""
    output = net(input_ids=ids, pixel_values=pixels)
    return (output.text_embeds * output.image_embeds).sum(-1)


def _unaccounted(net: Any, ids: Tensor, pixels: Tensor, method: Any) -> float:
    _, (tokens, of_pixels), constants = explained_rows(net, ids, pixels, method)
    total = tokens.sum(1) + of_pixels.flatten(1).sum(1) + sum(constants.values())
    sizes = tokens.abs().sum(1) + of_pixels.abs().flatten(1).sum(1)
    return ((own_similarity(net, ids, pixels) - total).abs() / sizes).max().item()


def _from_gradient(net: Any, ids: Tensor, pixels: Tensor) -> float:
    """Compare gradient x input with the gradient that torch gives of a plain pass."""
    _, ours, _ = explained_rows(net, ids, pixels, None)
    embedding = net.text_model.embeddings.token_embedding
    vectors, image = (x.detach().requires_grad_() for x in (embedding(ids), pixels))
    hook = embedding.register_forward_hook(lambda *_: vectors)
    try:
        with torch.enable_grad():
            of_vectors, of_image = torch.autograd.grad(own_similarity(net, ids, image).sum(), (vectors, image))
    finally:
        hook.remove()
    expected = (vectors * of_vectors).sum(-1), image * of_image
    return max(deviation(left, right) for left, right in zip(ours, expected, strict=True))


def _from_alone(net: Any, ids: Tensor, pixels: Tensor, method: Any) -> float:
    """Compare pairs in one pass with each alone."""
    _, together, _ = explained_rows(net, ids, pixels, method)
    deviations = [0.0]
    for row in range(len(ids)):
        _, alone, _ = explained_rows(net, ids[row : row + 1], pixels[row : row + 1], method)
        deviations += [deviation(x[row], y[0]) for x, y in zip(together, alone, strict=True)]
    return max(deviations)


@torch.no_grad()
def misplaced(net: Any, pixels: Tensor) -> list[tuple[int, int]]:
    """Return the patches, by row and column, that do not hang on the pixels (1, C, H, W) of their block alone."""
    embed, (height, width) = net.vision_model.embeddings.patch_embedding, pair(net.config.vision_config.patch_size)
    before, wrong = embed(pixels), []
    for row, column in torch.cartesian_prod(*map(torch.arange, before.shape[-2:])).tolist():
        changed = pixels.clone()
        changed[..., height * row : height * (row + 1), width * column : width * (column + 1)] += 1
        moved = (embed(changed) != before).any(1)[0].nonzero().tolist()
        if moved != [[row, column]]:
            wrong.append((row, column))
    return wrong
