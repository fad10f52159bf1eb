"""Control vectors: a recipe as vectors that llama.cpp adds to the residual stream.

llama.cpp adds the tensor ``direction.N`` of a control vector to the residual stream after layer N (from 0), after the
layer's FFN, at every token; there is none for layer 0 (`llama_adapter_cvec`, and the end of each layer in its graphs).
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np

from icebear.edits import VectorEdit
from icebear.errors import RecipeError
from icebear.models.model import Model
from icebear.paths import written
from icebear.recipe import Recipe
from icebear.steering.apply import steer

ARCHITECTURE = "controlvector"


def save_control_vector(model: Model, recipe: Recipe, path: str | Path) -> list[int]:
    """Write a recipe's vectors to a GGUF file for llama.cpp's ``--control-vector``, and return their layers.

    Raises `RecipeError` for an edit that is not exactly such a vector, and for a file that cannot be written.
    """
    recipe.check(model)
    if not (model.task.is_causal and model.task.generates):
        raise RecipeError(
            f"A control vector is for a model that continues texts; {model.name} does not continue texts."
        )
    vectors: dict[int, np.ndarray] = {}
    for edit in recipe:
        if not isinstance(edit, VectorEdit):
            raise RecipeError(
                f"{edit} edits a neuron; make a recipe with icebear concept steer --detector means --save."
            )
        if edit.where != "all" or edit.decay != 1:
            raise RecipeError(f"A control vector acts equally at all tokens, and {edit} does not; use --where all.")
        if edit.layer == 0:
            raise RecipeError("llama.cpp adds no control vector after layer 0; add this one with icebear steer.")
        vectors[edit.layer] = vectors.get(edit.layer, 0) + np.array(edit.vector, dtype=np.float32) * edit.share
    if not vectors:
        raise RecipeError(f"The recipe {recipe.name!r} has no edits; there is nothing to export.")
    with steer(model, recipe):
        model.next_logits([0])  # raises for a vector of another length
    with written(path, RecipeError) as part:
        _write(model, vectors, part)
        if not _reads_back(part, vectors):  # numpy, which writes the tensors, is silent where the disk is full
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return list(vectors)


def _write(model: Model, vectors: dict[int, np.ndarray], path: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(path, ARCHITECTURE)
    writer.add_string(f"{ARCHITECTURE}.model_hint", str(model.config.model_type))
    writer.add_uint32(f"{ARCHITECTURE}.layer_count", len(vectors))
    for layer, vector in vectors.items():
        writer.add_tensor(f"direction.{layer}", vector)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _reads_back(path: Path, vectors: dict[int, np.ndarray]) -> bool:
    from gguf import GGUFReader

    try:
        tensors = {tensor.name: tensor.data for tensor in GGUFReader(path).tensors}
    except (ValueError, IndexError):  # the file is too short
        return False
    return all(np.array_equal(tensors.get(f"direction.{layer}", ()), vector) for layer, vector in vectors.items())
