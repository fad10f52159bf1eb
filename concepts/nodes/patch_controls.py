"""Controls of the relevance of patches: the first tenth takes the other image's values, and the other way round."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from icebear.concepts.methods.common import explained_numbers
from icebear.concepts.nodes.random_controls import RANDOM_DRAWS, objective_text
from icebear.concepts.results.result import Relevance
from icebear.models.batch import Batch
from icebear.models.model import Model
from icebear.models.objective import objective_of
from icebear.models.text.images import grid, own_names, pixels_of
from icebear.models.text.prompts import Prompt
from icebear.records import RandomControl

SHARE = 0.1
"""Of the patches, that are exchanged."""
PER_PASS = 16


@torch.no_grad()
def patch_controls(model: Model, relevance: Relevance) -> tuple[RandomControl, ...]:
    """Exchange the tenth of the patches with the largest relevance, and measure the explained number.

    Deletion: they take the values of the image that this one is compared with. Insertion: that image takes theirs. Each
    is measured beside as many random patches, and beside the patches that the map names when it is shifted around the
    edges, which keeps its shapes. Without exactly one other image there are no controls. Raises `InputError`.
    """
    model.check_made(relevance.made_with["model"], "The relevance")
    counterfactual = relevance.counterfactual
    if relevance.image is None or counterfactual is None or len(counterfactual.pairs) != 1 or relevance.target is None:
        return ()
    batch = counterfactual.pairs[0].batch
    if batch.images is not None and batch.row_ids(0) != batch.row_ids(1):
        return ()  # another text
    chosen, drawn, shifted = _choices(relevance.image.patches)
    number, controls = objective_text(relevance.target, relevance.contrast), []
    for what, base in (("deleted", 0), ("inserted", 1)):
        prompts = [_exchanged(model, batch, base, patches) for patches in ((), chosen, *drawn, *shifted)]
        before, after, *others = _numbers(model, relevance, prompts)
        by_name = {
            "as many random patches": others[: len(drawn)],
            "the patches that the shifted map names": others[len(drawn) :],
        }
        patches = f"the first {len(chosen)} patches {what}"
        controls += [
            RandomControl(patches, name, number, before, after, tuple(values)) for name, values in by_name.items()
        ]
    return tuple(controls)


Patches = list[tuple[int, int]]
"""The rows and columns of patches."""


def _choices(patches: Tensor) -> tuple[Patches, list[Patches], list[Patches]]:
    """Return the first tenth of the patches, as many random ones, and those of the map shifted by random steps."""
    generator, count = random.Random(0), max(1, round(SHARE * patches.numel()))
    rows, columns = patches.shape
    steps = [(row, column) for row in range(rows) for column in range(columns)][1:]
    shifts = generator.sample(steps, min(RANDOM_DRAWS, len(steps)))
    drawn = [generator.sample(range(patches.numel()), count) for _ in range(RANDOM_DRAWS)]
    shifted = [_largest(patches.roll(shift, (0, 1)), count) for shift in shifts]
    chosen, *others = ([divmod(n, columns) for n in part] for part in (_largest(patches, count), *drawn, *shifted))
    return chosen, others[: len(drawn)], others[len(drawn) :]


def _largest(patches: Tensor, count: int) -> list[int]:
    return patches.flatten().topk(count).indices.tolist()  # type: ignore[no-any-return]


def _exchanged(model: Model, batch: Batch, base: int, patches: Sequence[tuple[int, int]]) -> Tensor | Prompt:
    """Return one of the two images of a batch with some patches of the other one, in its prompt if it has one."""
    if batch.images is not None:
        image, source = batch.images[base], batch.images[1 - base]
        return Prompt(ids=batch.row_ids(base), image=image.exchanged(source, patches))
    assert batch.pixels is not None
    changed, before, columns = batch.pixels[base].clone(), len(own_names(model)), grid(model, batch.pixels)[1]
    for row, column in patches:
        where = pixels_of(model, changed, before + row * columns + column)
        changed[where] = batch.pixels[1 - base][where]
    return changed


def _numbers(model: Model, relevance: Relevance, prompts: Sequence[Tensor | Prompt]) -> list[float]:
    """Return the explained number of each prompt."""
    assert relevance.target is not None
    numbers: list[float] = []
    contrast, kind = relevance.contrast and relevance.contrast.id, relevance.prediction.objective
    for start in range(0, len(prompts), PER_PASS):
        objective = objective_of(model, prompts[start : start + PER_PASS], relevance.target.id, contrast, kind=kind)
        with model.lock:
            numbers += explained_numbers(model, objective).float().tolist()
    return numbers
