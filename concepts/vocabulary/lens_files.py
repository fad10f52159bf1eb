"""Lenses that other software has made: Jacobian lenses (TransformerLens 4.3, jacobian-lens) and tuned lenses.

Both map the residual stream after a layer to that before the final norm: h -> J h, and h -> h + W h + b. The constant b
is the same for every neuron, so that a neuron's row needs only the matrix.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from icebear.concepts.vocabulary.calibration import calibrate
from icebear.errors import InputError
from icebear.models.loading.saved_tensors import read_saved
from icebear.models.model import Model
from icebear.models.parts.linear import through_norm
from icebear.paths import local, read_text

AFTER_THE_LAYER = ("ffn", "shared")
"""The sites whose neurons write at the end of a layer, where these lenses begin."""


@dataclass(frozen=True, eq=False)
class LensFile:
    """A lens from a file: for layers of a model, a map of the residual stream after the layer."""

    path: Path
    kind: str
    """``Jacobian lens`` or ``tuned lens``."""
    maps: dict[int, Tensor]
    """Layer -> the matrix (D, D) from the residual stream after it to that before the final norm."""

    def __str__(self) -> str:
        return f"the {self.kind} {self.path.name}"

    @classmethod
    def read(cls, path: str | Path, model: Model) -> LensFile:
        """Read a lens for a model.

        Parameters
        ----------
        path
            A .pt file of a Jacobian lens, or the folder of a tuned lens (params.pt), or that file.
        model

        Returns
        -------
        LensFile

        Raises
        ------
        InputError
            If the file is no such lens, or is of a model of another size.
        """
        file = local(path)
        file = file / "params.pt" if file.is_dir() else file
        saved = read_saved(file)
        saved = dict(saved) if isinstance(saved, Mapping) else {}
        jacobians = _jacobians(saved)
        kind, maps = ("Jacobian lens", jacobians) if jacobians else ("tuned lens", _translators(saved))
        if not maps:
            raise InputError(f"{path} is neither a Jacobian lens nor a tuned lens; give a file that one of them saved.")
        if kind == "tuned lens":
            _check_tuned(file, model)
        size = (model.config.hidden_size,) * 2
        for layer, matrix in maps.items():
            if not (0 <= layer < model.layers and matrix.shape == size and matrix.isfinite().all()):
                raise InputError(
                    f"{path} has a matrix of shape {tuple(matrix.shape)} for layer {layer}, but {model.name} has "
                    f"{model.layers} layers of shape {size}; give a lens of this model."
                )
        return cls(local(path), kind, maps)

    def jacobian(self, model: Model, site: str, layer: int) -> Tensor:
        """Return the matrix (D, D) from what a site writes in a layer to the output of the final norm, at its median
        divisor. In the last layer the residual stream is that before the final norm.

        Raises `InputError` for a layer that the lens lacks, and for a site that writes inside the layer.
        """
        if site not in AFTER_THE_LAYER:
            raise InputError(f"{self} begins after a layer; choose a neuron of site ffn, which writes there.")
        identity = torch.eye(model.config.hidden_size)
        matrix = identity if layer == model.layers - 1 else self.maps.get(layer)
        if matrix is None:
            layers = ", ".join(map(str, sorted(self.maps)))
            raise InputError(f"{self} has no layer {layer}; choose a neuron of its layers: {layers}.")
        final, divisors, rows = model.family_at(layer).final_norm, calibrate(model).divisors, identity.to(model.device)
        offset = model.family.norm_offset
        rows = rows * model.residual_scale(site)
        for path in model.norms_after(layer, site):
            if path == final:
                rows = rows @ matrix.to(model.device).T
            rows = through_norm(model.net.get_submodule(path), rows, offset, divisors[path][1])
        return (rows if final else rows @ matrix.to(model.device).T).T


def _jacobians(saved: dict[Any, Any]) -> dict[int, Tensor]:
    """Return layer -> J; a checkpoint of a fit has their sum over `n_done` prompts."""
    named, count = ("J", 1) if "J" in saved else ("jacobian_sum", saved.get("n_done"))
    matrices = saved.get(named)
    if not isinstance(matrices, Mapping) or type(count) is not int or count < 1:
        return {}
    return {layer: matrix / count for layer, matrix in _matrices(matrices)}


def _translators(saved: dict[Any, Any]) -> dict[int, Tensor]:
    """Return layer -> 1 + W. The translator `i` reads the hidden state `i`, which is the output of layer i - 1; the
    first one reads the embeddings, which no neuron writes."""
    weights = {name.removesuffix(".weight"): x for name, x in saved.items() if str(name).endswith(".weight")}
    numbered = {int(name) - 1: x for name, x in weights.items() if name.isdecimal() and len(name) < 6}
    return {layer: matrix + torch.eye(*matrix.shape) for layer, matrix in _matrices(numbered) if layer >= 0}


def _matrices(named: Mapping[Any, Any]) -> list[tuple[int, Tensor]]:
    """Return the layers and matrices, in float32. Anything else is left out."""
    rows = [(layer, x) for layer, x in named.items() if type(layer) is int and isinstance(x, Tensor) and x.dim() == 2]
    return [(layer, x.float()) for layer, x in rows if x.is_floating_point()]


def _check_tuned(file: Path, model: Model) -> None:
    """Raise `InputError` if the configuration beside a tuned lens is of a model with another number of layers."""
    beside = file.with_name("config.json")
    if not beside.exists():
        return
    try:
        layers = json.loads(read_text(beside))["num_hidden_layers"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise InputError(
            f"{beside} is not the configuration of a tuned lens; remove it, or save the lens again."
        ) from None
    if layers != model.layers:
        raise InputError(
            f"{file} is of a model with {layers} layers, and {model.name} has {model.layers}; give its lens."
        )
