"""Results as files: records as JSON (`icebear.convert`), with tensors bit for bit as they were."""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from cattrs import Converter
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override
from torch import Tensor

from icebear import convert
from icebear.concepts.methods.method import Method
from icebear.concepts.methods.registry import method_of
from icebear.convert import SavedRecord
from icebear.errors import InputError
from icebear.models.model import Model

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64, torch.int64, torch.bool)}


class SavedResult(SavedRecord):
    """A saved result whose fields may be tensors, methods and a model."""

    @classmethod
    def converter(cls) -> Converter:
        return CONVERTER

    @classmethod
    def load(cls, path: str | Path, model: Model | None = None) -> Self:
        """Read a result that `save` wrote.

        Parameters
        ----------
        path : str or Path
        model : Model, optional
            The model that the result was made with. Only a circuit needs it.

        Raises
        ------
        InputError
            If the file is not such a result, was changed after it was saved, or belongs to another model.
        """
        converter = CONVERTER.copy()
        converter.register_structure_hook(Model, lambda saved, _: _same(saved, model))
        return cls._read(path, converter)


def _packed(x: Tensor) -> dict[str, Any]:
    x = x.detach().cpu().contiguous()
    x = x if x.dtype in DTYPES.values() else x.float()  # bfloat16 and float16 are exact in float32
    data = b64encode(x.numpy().tobytes()).decode()
    return {"dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape), "base64": data}


def _unpacked(packed: Any, kind: type) -> Tensor:
    convert.checked(packed, isinstance(packed, Mapping) and set(packed) == {"dtype", "shape", "base64"}, Tensor)
    data, dtype, shape = b64decode(packed["base64"], validate=True), DTYPES[packed["dtype"]], packed["shape"]
    is_shape = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    convert.checked(shape, is_shape and math.prod(shape) * dtype.itemsize == len(data), Tensor)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.zeros(shape, dtype=dtype)


def _same(saved: Any, model: Model | None) -> Model:
    """The model that was passed, if it is the one that was saved."""
    if model is None:
        raise InputError(f"The result was made with {saved['name']}; load this model, and pass it as model=.")
    model.check_made(saved)
    return model


CONVERTER = convert.converter()
CONVERTER.register_structure_hook(Method, lambda name, _: method_of(convert.checked(name, isinstance(name, str), str)))
CONVERTER.register_unstructure_hook(Method, str)
CONVERTER.register_structure_hook(Tensor, _unpacked)
CONVERTER.register_unstructure_hook(Tensor, _packed)
CONVERTER.register_unstructure_hook(Model, lambda model: {"name": model.name, "fingerprint": model.fingerprint})


def never_saved(kind: type, name: str) -> None:
    """Leave a field of a record out of files and comparisons."""
    omitted: Any = {name: override(omit=True)}
    CONVERTER.register_unstructure_hook(kind, make_dict_unstructure_fn(kind, CONVERTER, **omitted))
    CONVERTER.register_structure_hook(
        kind, make_dict_structure_fn(kind, CONVERTER, _cattrs_forbid_extra_keys=True, **omitted)
    )
