"""Control vectors: a recipe as vectors that llama.cpp, repeng or hotwire add to the residual stream, and their files as
recipes.

llama.cpp adds the tensor ``direction.N`` of a control vector to the residual stream after layer N (from 0), after the
layer's FFN, at every token; there is none for layer 0 (`llama_adapter_cvec`, and the end of each layer in its graphs).
repeng (0.4) has the same files. hotwire (0.1) has .pt files of a tensor (layers, D), of which a request names a layer.
"""

from __future__ import annotations

import errno
import os
import re
from io import BytesIO
from pathlib import Path

import numpy as np
import torch

from icebear.edits import VectorEdit
from icebear.errors import InputError, RecipeError
from icebear.models.loading.conversion import read_gguf
from icebear.models.loading.saved_tensors import read_saved
from icebear.models.model import Model
from icebear.paths import existing, kind, local, written
from icebear.recipe import Recipe
from icebear.steering.apply import steer
from icebear.values import check_int

ARCHITECTURE = "controlvector"
_DIRECTION = re.compile(r"direction\.(\d{1,6})")


def save_control_vector(model: Model, recipe: Recipe, path: str | Path) -> list[int]:
    """Write a recipe's vectors to a .gguf file for llama.cpp's ``--control-vector``, or to a .pt file for hotwire, and
    return their layers.

    Raises `RecipeError` for an edit that is not exactly such a vector, and for a file that cannot be written.
    """
    recipe.check(model)
    if not (model.task.is_causal and model.task.generates):
        raise RecipeError(
            f"A control vector is for a model that continues texts; {model.name} does not continue texts."
        )
    vectors: dict[int, np.ndarray] = {}
    is_tensor = kind(Path(path)) == ".pt"
    for edit in recipe:
        if not isinstance(edit, VectorEdit):
            raise RecipeError(
                f"{edit} edits a neuron; make a recipe with icebear concept steer --detector means --save."
            )
        if edit.where != "all" or edit.decay != 1:
            raise RecipeError(f"A control vector acts equally at all tokens, and {edit} does not; use --where all.")
        if edit.layer == 0 and not is_tensor:
            raise RecipeError("llama.cpp adds no control vector after layer 0; add this one with icebear steer.")
        vectors[edit.layer] = vectors.get(edit.layer, 0) + np.array(edit.vector, dtype=np.float32) * edit.share
    if not vectors:
        raise RecipeError(f"The recipe {recipe.name!r} has no edits; there is nothing to export.")
    with steer(model, recipe):
        model.next_logits([0])  # raises for a vector of another length
    with written(path, RecipeError) as part:
        if is_tensor:
            buffer = BytesIO()  # torch has an error of its own where the disk is full
            torch.save(_stacked(model, vectors), buffer)
            part.write_bytes(buffer.getvalue())
            return list(vectors)
        _write(model, vectors, part)
        if not _reads_back(part, vectors):  # numpy, which writes the tensors, is silent where the disk is full
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return list(vectors)


def read_control_vector(model: Model, path: str | Path, layer: int | None = None) -> Recipe:
    """Read a control vector as a recipe: a .gguf file of llama.cpp or repeng, or a .pt file of hotwire.

    Parameters
    ----------
    model : Model
    path : str or Path
    layer : int, optional
        The layer whose vector is used; default all. A .pt file with vectors of several layers needs it, because hotwire
        adds one of them.

    Raises
    ------
    InputError
        If the file has no vectors of this model's size, or several of which none is chosen.
    """
    file = local(path)
    if layer is not None:
        check_int(layer, "The layer", 0, model.layers - 1)
    vectors = _of_tensor(model, file, layer) if kind(file) == ".pt" else _of_gguf(file)
    chosen = {at: row for at, row in vectors.items() if layer in (None, at) and row.any()}
    if not chosen:
        layers = f"; its layers are {', '.join(map(str, vectors))}" if vectors else ""
        raise InputError(f"{path} has no control vector{'' if layer is None else f' of layer {layer}'}{layers}.")
    if kind(file) == ".pt" and len(chosen) > 1:
        raise InputError(f"{path} has vectors of {len(chosen)} layers; choose the one that is added with --layer.")
    recipe = Recipe.for_model(model, file.stem, [VectorEdit(at, row.tolist()) for at, row in chosen.items()])
    with steer(model, recipe):
        model.next_logits([0])  # raises for a vector of another length
    return recipe.noting(read_from=file.name)


def _of_tensor(model: Model, file: Path, layer: int | None) -> dict[int, np.ndarray]:
    saved = read_saved(file)
    if isinstance(saved, dict):  # as hotwire reads it
        saved = next((value for value in saved.values() if isinstance(value, torch.Tensor)), None)
    if not isinstance(saved, torch.Tensor) or saved.dim() not in (1, 2) or not saved.is_floating_point():
        raise InputError(f"{file} has no tensor of vectors (layers, width); give a file that hotwire reads.")
    if saved.dim() == 1 and layer is None:
        raise InputError(f"{file} has a vector without its layer; name it with --layer.")
    rows = saved.detach().float().numpy()
    if saved.dim() == 1 and layer is not None:
        return {layer: rows}
    if len(rows) != model.layers:
        raise InputError(
            f"{file} has vectors of {len(rows)} layers, but {model.name} has {model.layers}; give a file of this model."
        )
    return dict(enumerate(rows))


def _of_gguf(file: Path) -> dict[int, np.ndarray]:
    try:
        tensors = [(_DIRECTION.fullmatch(tensor.name), tensor.data) for tensor in read_gguf(existing(file)).tensors]
    except FileNotFoundError:
        raise InputError(f"There is no file {file}; check the path.") from None
    except Exception:  # of any kind: what the reader meets in a damaged file
        raise InputError(f"{file} is not a GGUF file, or it is damaged; export it again.") from None
    return {int(name[1]): np.array(row, dtype=np.float32) for name, row in tensors if name and row.ndim == 1}


def _stacked(model: Model, vectors: dict[int, np.ndarray]) -> torch.Tensor:
    """Return a tensor (layers, D) with zeros where there is no vector."""
    rows = torch.zeros(model.layers, model.config.hidden_size)
    for layer, vector in vectors.items():
        rows[layer] = torch.from_numpy(vector)
    return rows


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
