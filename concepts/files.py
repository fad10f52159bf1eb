"""Results as files: JSON that says what it is and in which version, and holds every number as it was.

A record is an object of its fields, by their types; a neuron its id; a tensor its dtype, shape and bytes, so that what
is read is bit for bit what was written. A number that JSON has no word for is a text. What is read is checked against
those types: a file can hold numbers and texts, nothing else.
"""

from __future__ import annotations

import json
import math
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from icebear.concepts.methods.method import Method
from icebear.concepts.methods.registry import method_of
from icebear.concepts.models.model import Model
from icebear.errors import InputError
from icebear.paths import local, read_text, write_file
from icebear.records import Neuron

FORMAT = 1
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64, torch.int64, torch.bool)}

Record = TypeVar("Record")


def save(record: Any, path: str | Path, overwrite: bool = False) -> None:
    """Write a result to a file. Raises `InputError` where that cannot be written, or is there already."""
    if not overwrite and local(path).exists():
        raise InputError(f"{path} is there already; choose another path, or pass overwrite=True.")
    told = {_kind(type(record)): FORMAT, **encoded(record, type(record))}
    write_file(path, json.dumps(told, ensure_ascii=False, allow_nan=False) + "\n")


def same(one: Any, other: Any) -> bool:
    """Whether two results would be saved alike, each number bit for bit."""
    return type(one) is type(other) and encoded(one, type(one)) == encoded(other, type(other))


def load(
    kind: type[Record],
    path: str | Path,
    model: Model | None = None,
    misfits: Callable[[Any], Iterable[str]] = lambda record: (),
) -> Record:
    """Read what `save` wrote. model: of what holds one; it must be the same. misfits: the names of parts of a record
    that do not fit the others. Raises `InputError`."""
    try:
        found = json.loads(read_text(path), parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as JSON ({error}); check the path.") from None
    name = _kind(kind)
    if not isinstance(found, dict) or found.pop(name, None) != FORMAT:
        raise InputError(f"{path} is not what icebear saves: it lacks {name!r}: {FORMAT}.")
    try:
        record: Record = decoded(found, kind, model)
    except (ValueError, TypeError, KeyError, RecursionError, ArithmeticError, RuntimeError) as error:
        raise InputError(f"{path} has a part that is not as icebear saves it ({error}); save it again.") from None
    for name in misfits(record):
        raise InputError(f"{path} has parts that do not fit each other ({name}); save it again.")
    return record


def _kind(kind: type) -> str:
    return f"icebear_{kind.__name__.lower()}"


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def encoded(value: Any, kind: Any) -> Any:
    """A value of this type, JSON-ready."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None:
            return None
        told = encoded(value, type(value) if len(_others(inner)) > 1 else _others(inner)[0])
        return {"is": type(value).__name__, **told} if len(_others(inner)) > 1 and is_dataclass(value) else told
    if origin in (tuple, list):
        return [encoded(part, type_) for part, type_ in zip(value, _each(origin, inner, len(value)), strict=True)]
    if origin is dict:
        return {key: encoded(part, inner[1]) for key, part in value.items()}
    if isinstance(value, (Neuron, Method)):
        return str(value)
    if isinstance(value, Tensor):
        return _packed(value)
    if isinstance(value, Model):
        return {"name": value.name, "fingerprint": value.fingerprint}
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if is_dataclass(value):
        hints = get_type_hints(type(value))
        return {field.name: encoded(getattr(value, field.name), hints[field.name]) for field in fields(value)}
    return value


def decoded(told: Any, kind: Any, model: Model | None = None) -> Any:
    """The value of this type that `encoded` said. Raises `ValueError` or `TypeError` for anything else."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return told
    if origin in (Union, UnionType):
        return _one_of(told, inner, model)
    if origin is Literal:
        return _checked(told, told in inner, kind)
    if origin in (tuple, list):
        parts = _each(origin, inner, len(_checked(told, isinstance(told, list), kind)))
        return origin(decoded(part, type_, model) for part, type_ in zip(told, parts, strict=True))
    if origin is dict:
        items = _checked(told, isinstance(told, dict), kind).items()
        return {key: decoded(part, inner[1], model) for key, part in items}
    return _single(told, kind, model)


def _single(told: Any, kind: type, model: Model | None) -> Any:
    """What has no parts of other types, or named ones."""
    if kind is Neuron:
        return Neuron.parse(_checked(told, isinstance(told, str), kind))
    if kind is Method:
        return _method(_checked(told, isinstance(told, str), kind))
    if kind is Tensor:
        return _unpacked(told)
    if kind is Model:
        return _same(told, model)
    if kind is float:
        text = isinstance(told, str) and told in ("nan", "inf", "-inf")
        return float(_checked(told, text or (isinstance(told, (int, float)) and not isinstance(told, bool)), kind))
    if not is_dataclass(kind):
        return _checked(told, type(told) is kind, kind)
    hints, names = get_type_hints(kind), {field.name for field in fields(kind)}
    _checked(told, isinstance(told, dict) and set(told) == names, kind)
    return kind(**{name: decoded(told[name], hints[name], model) for name in names})


def _method(text: str) -> Method:
    try:
        return method_of(text)
    except InputError as error:
        raise ValueError(str(error)) from None


def _one_of(told: Any, kinds: tuple[Any, ...], model: Model | None) -> Any:
    """Of several records the one that is named; of others that whose type it has."""
    if told is None:
        return _checked(told, NoneType in kinds, kinds)
    others = _others(kinds)
    if len(others) == 1:
        return decoded(told, others[0], model)
    if isinstance(told, dict):
        known: dict[str, type] = {kind.__name__: kind for kind in others}
        rest = dict(told)
        return decoded(rest, known[rest.pop("is", "")], model)
    return _checked(told, type(told) in others, kinds)


def _others(kinds: tuple[Any, ...]) -> list[Any]:
    return [kind for kind in kinds if kind is not NoneType]


def _each(origin: Any, inner: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """The types of a list's parts, or of a tuple's."""
    return inner if origin is tuple and inner[-1:] != (...,) else inner[:1] * count


def _checked(told: Any, right: bool, kind: Any) -> Any:
    if not right:
        raise TypeError(f"{str(told)[:40]!r} is no {getattr(kind, '__name__', kind)}")
    return told


def _packed(x: Tensor) -> dict[str, Any]:
    x = x.detach().cpu().contiguous()
    x = x if x.dtype in DTYPES.values() else x.float()  # bfloat16 and float16 are exact in float32
    data = b64encode(x.numpy().tobytes()).decode()
    return {"dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape), "base64": data}


def _unpacked(told: Any) -> Tensor:
    _checked(told, isinstance(told, Mapping) and set(told) == {"dtype", "shape", "base64"}, Tensor)
    data, dtype, shape = b64decode(told["base64"], validate=True), DTYPES[told["dtype"]], told["shape"]
    whole = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    _checked(shape, whole and math.prod(shape) * dtype.itemsize == len(data), Tensor)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.zeros(shape, dtype=dtype)


def _same(told: Any, model: Model | None) -> Model:
    """The model that was given, if it is the one that was saved."""
    if model is None:
        raise InputError(f"This was made with {told['name']}; load that model, and give it.")
    if told["fingerprint"] != model.fingerprint:
        raise InputError(
            f"This was made with {told['name']} ({told['fingerprint']}), not with {model.name} "
            f"({model.fingerprint}); load that model."
        )
    return model
