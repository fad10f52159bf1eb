"""Controls of the relevance of patches: the first tenth takes the other image's values, and the other way round."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from icebear.concepts.methods.common import explained_numbers
from icebear.concepts.nodes.random_controls import RANDOM_DRAWS, objective_text
from icebear.concepts.results.result import Relevance
from icebear.models.model import Model
from icebear.models.objective import objective_of
from icebear.models.text.images import grid, own_names, pixels_of
from icebear.records import RandomControl

SHARE = 0.1
"""Of the patches, that are exchanged."""
PER_PASS = 16


@torch.no_grad()
def patch_controls(model: Model, relevance: Relevance, seed: int = 0) -> tuple[RandomControl, ...]:
    """Exchange the tenth of the patches with the largest relevance, and measure the explained number.

    Deletion: they take the values of the image that this one is compared with. Insertion: that image takes theirs. Each
    is measured beside as many random patches, and beside the patches that the map names when it is shifted around the
    edges, which keeps its shapes. Without exactly one other image there are no controls. Raises `InputError`.
    """
    model.check_made(relevance.made_with["model"], "The relevance")
    compared = relevance.counterfactual
    if not relevance.prompt.is_image or compared is None or len(compared.pairs) != 1 or relevance.target is None:
        return ()
    image, other = compared.pairs[0].batch.pixels  # type: ignore[misc]
    chosen, drawn, shifted = _choices(relevance.image.patches, grid(model, image), seed)
    number, controls = objective_text(relevance.target, relevance.contrast), []
    for what, base, source in (("deleted", image, other), ("inserted", other, image)):
        before, after, *others = _numbers(model, relevance, base, source, [(), chosen, *drawn, *shifted])
        by_name = {
            "as many random patches": others[: len(drawn)],
            "the patches that the shifted map names": others[len(drawn) :],
        }
        patches = f"the first {len(chosen)} patches {what}"
        controls += [
            RandomControl(patches, name, number, before, after, tuple(values)) for name, values in by_name.items()
        ]
    return tuple(controls)


def _choices(patches: Tensor, shape: tuple[int, int], seed: int) -> tuple[list[int], list[list[int]], list[list[int]]]:
    """Return the first tenth of the patches, as many random ones, and those of the map shifted by random steps."""
    generator, count = random.Random(seed), max(1, round(SHARE * patches.numel()))
    steps = [(row, column) for row in range(shape[0]) for column in range(shape[1])][1:]
    shifts = generator.sample(steps, min(RANDOM_DRAWS, len(steps)))
    drawn = [generator.sample(range(patches.numel()), count) for _ in range(RANDOM_DRAWS)]
    return _largest(patches, count), drawn, [_largest(patches.roll(shift, (0, 1)), count) for shift in shifts]


def _largest(patches: Tensor, count: int) -> list[int]:
    return patches.flatten().topk(count).indices.tolist()  # type: ignore[no-any-return]


def _numbers(
    model: Model, relevance: Relevance, base: Tensor, source: Tensor, choices: Sequence[Sequence[int]]
) -> list[float]:
    """Return the explained number of an image (C, H, W) with some patches of another one, for each choice."""
    begins, images, numbers = len(own_names(model)), [], []
    for patches in choices:
        changed = base.clone()
        for patch in patches:
            where = pixels_of(model, base, begins + patch)
            changed[where] = source[where]
        images.append(changed)
    assert relevance.target is not None
    contrast, kind = relevance.contrast and relevance.contrast.id, relevance.prediction.objective
    for start in range(0, len(images), PER_PASS):
        objective = objective_of(model, images[start : start + PER_PASS], relevance.target.id, contrast, kind=kind)
        with model.lock:
            numbers += explained_numbers(model, objective).float().tolist()
    return numbers
