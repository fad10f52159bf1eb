"""Control vectors: a recipe as vectors that llama.cpp adds to the residual stream.

llama.cpp adds the tensor ``direction.N`` of a control vector to the residual stream after layer N (from 0), after the
layer's FFN, at every token; there is none for layer 0 (`llama_adapter_cvec` and the end of each layer in its graphs).
"""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from icebear.edits import Edit
from icebear.errors import RecipeError
from icebear.models.model import Model
from icebear.models.parts.linear import Linear
from icebear.paths import written
from icebear.recipe import Recipe
from icebear.steering.apply import steer
from icebear.steering.concept.reading import vector_added

ARCHITECTURE = "controlvector"


def control_vectors(model: Model, recipe: Recipe) -> dict[int, Tensor]:
    """Return the vector (D,) that the edits of a recipe add to the residual stream after each of their layers.

    An edit that adds c to an FFN neuron at all tokens adds c times its W_out row there. Raises `RecipeError` for an
    edit that is not exactly such a vector.
    """
    recipe.check(model)
    if not recipe.edits:
        raise RecipeError(f"The recipe {recipe.name!r} has no edits; there is nothing to export.")
    vectors: dict[int, Tensor] = {}
    for edit in recipe:
        _check(model, edit)
        layer = edit.neuron.layer
        row = Linear(model.site_module("ffn", layer)).columns(edit.neuron.index).cpu()
        vector = edit.share * edit.value * model.residual_scale("ffn") * row
        vectors[layer] = vectors.get(layer, torch.zeros_like(vector)) + vector
    return dict(sorted(vectors.items()))


def _check(model: Model, edit: Edit) -> None:
    if edit.op != "add":
        raise RecipeError(f"{edit} sets or scales its neuron, which a control vector cannot do; use + or -.")
    if edit.where != "all" or edit.decay != 1:
        raise RecipeError(f"A control vector acts equally at all tokens, but {edit} does not; use @all without decay.")
    if edit.unit:
        raise RecipeError(f"The value of {edit} is in units of an index (std or max); give a plain number.")
    if edit.neuron.site != "ffn" or model.family.experts:
        raise RecipeError(
            f"{edit} does not edit a plain FFN neuron, so it adds no constant vector; leave out this edit."
        )
    if not (model.task.is_causal and model.task.generates):
        raise RecipeError(
            f"A control vector is for a model that continues texts; {model.name} does not continue texts."
        )
    if edit.neuron.layer == 0:
        raise RecipeError(
            f"{edit} is in layer 0, and llama.cpp adds control vectors to later layers only; leave out this edit."
        )
    if model.family.ffn_norm:
        raise RecipeError(
            f"{model.name} has a norm after W_out, so {edit} adds a different vector at each token; use icebear steer."
        )


def save_control_vectors(model: Model, vectors: dict[int, Tensor], path: str | Path) -> None:
    """Write a GGUF file for llama.cpp's ``--control-vector``. Raises `RecipeError` if it cannot be written."""
    with written(path, RecipeError) as part:
        _write(model, vectors, part)
        if not _reads_back(part, vectors):  # numpy, which writes the tensors, is silent where the disk is full
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _write(model: Model, vectors: dict[int, Tensor], path: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(path, ARCHITECTURE)
    writer.add_string(f"{ARCHITECTURE}.model_hint", str(model.config.model_type))
    writer.add_uint32(f"{ARCHITECTURE}.layer_count", len(vectors))
    for layer, vector in vectors.items():
        writer.add_tensor(f"direction.{layer}", vector.float().numpy())
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _reads_back(path: Path, vectors: dict[int, Tensor]) -> bool:
    from gguf import GGUFReader

    try:
        tensors = {tensor.name: tensor.data for tensor in GGUFReader(path).tensors}
    except (ValueError, IndexError):  # the file is too short
        return False
    return all(np.array_equal(tensors.get(f"direction.{n}", ()), x.float().numpy()) for n, x in vectors.items())


@torch.no_grad()
def difference(model: Model, recipe: Recipe, vectors: dict[int, Tensor], prompt: str) -> float:
    """Return the largest difference of a logit between the model with added vectors and the steered model, over the
    largest logit."""
    inputs = model.inputs(model.encode([prompt]))
    with steer(model, recipe):
        steered = model.net(**inputs).logits
    with ExitStack() as added:
        for layer, vector in vectors.items():
            added.enter_context(vector_added(model, layer, vector.to(steered.device))())
        changed = model.net(**inputs).logits
    return ((changed - steered).abs().max() / steered.abs().max()).item()
