"""Records as JSON: an object of their fields, and each number as it was.

What is read is checked against the fields' types: no field is unknown or of another type, and only one that has a
default may be missing. A number that JSON has no word for is a text (``"nan"``, ``"inf"``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar, get_args, get_origin

from cattrs import Converter
from cattrs.errors import CattrsError

from icebear.edits import Edit
from icebear.errors import IcebearError, InputError, RecipeError
from icebear.paths import read_text, write_file
from icebear.records import Neuron

FORMAT = 1
READING = (
    IcebearError,
    CattrsError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    RecursionError,
    ArithmeticError,
    RuntimeError,
)
"""What `Converter.structure` raises, or a record that checks its own fields."""

Record = TypeVar("Record")
Hook = Callable[[Any, Any], Any]


def converter() -> Converter:
    """Of records, whose fields may be neurons and edits."""
    made = Converter(forbid_extra_keys=True, detailed_validation=False, unstruct_collection_overrides={tuple: list})
    for kind in (bool, int, str):
        made.register_structure_hook(kind, _strictly)
    made.register_structure_hook(float, _float)
    made.register_unstructure_hook(float, lambda value: value if math.isfinite(value) else repr(value))
    for record in (Neuron, Edit):
        made.register_structure_hook(record, lambda value, kind: kind.parse(value))
        made.register_unstructure_hook(record, str)
    made.register_structure_hook_factory(lambda kind: get_origin(kind) in (tuple, list), _sequence)
    return made


def checked(value: Any, right: bool, kind: Any) -> Any:
    """Raises `TypeError`."""
    if not right:
        raise TypeError(f"{str(value)[:40]!r} is no {getattr(kind, '__name__', kind)}")
    return value


def _strictly(value: Any, kind: type) -> Any:
    return checked(value, type(value) is kind, kind)


def _float(value: Any, kind: type) -> float:
    return float(checked(value, value in ("nan", "inf", "-inf") or type(value) in (int, float), kind))


def _sequence(kind: Any, converter: Converter) -> Hook:
    origin, inner = get_origin(kind), get_args(kind)

    def hook(value: Any, _: Any) -> Any:
        size = len(checked(value, isinstance(value, list), kind))
        kinds = inner if origin is tuple and inner[-1:] != (...,) else inner[:1] * size
        return origin(converter.structure(part, kind) for part, kind in zip(value, kinds, strict=True))

    return hook


CONVERTER = converter()

# --- files ---------------------------------------------------------------------------------------------------


def to_dict(record: Any, converter: Converter = CONVERTER) -> dict[str, Any]:
    """JSON-ready, with what it is and in which version."""
    return {_name(type(record)): FORMAT, **converter.unstructure(record, type(record))}


def from_dict(
    data: Any,
    kind: type[Record],
    error: type[IcebearError] = InputError,
    converter: Converter = CONVERTER,
    source: str = "",
) -> Record:
    """What `to_dict` made. Raises `error` for anything else."""
    name, what = kind.__name__.lower(), source or f"The {kind.__name__.lower()}"
    if not isinstance(data, dict) or data.get(_name(kind)) != FORMAT:
        raise error(f"{what} is not an icebear {name}: it lacks {_name(kind)!r}: {FORMAT}.")
    try:
        return converter.structure({key: data[key] for key in data if key != _name(kind)}, kind)
    except READING as reason:
        why = f"it lacks {reason}" if isinstance(reason, KeyError) else str(reason).rstrip(".")
        raise error(f"{what} has a bad part ({why}); save it again with icebear.") from None


def from_json(
    text: str,
    kind: type[Record],
    error: type[IcebearError] = InputError,
    converter: Converter = CONVERTER,
    source: str = "",
) -> Record:
    """What `to_json` made. Raises `error` for anything else."""
    try:
        data = json.loads(text, parse_constant=_refused)
        json.dumps(data, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError) as reason:
        what = source or f"The {kind.__name__.lower()}"
        raise error(f"{what} is not JSON ({reason}); check it, or save it again with icebear.") from None
    return from_dict(data, kind, error, converter, source)


def to_json(record: Any, indent: int | None = 1, converter: Converter = CONVERTER) -> str:
    return json.dumps(to_dict(record, converter), ensure_ascii=False, indent=indent, allow_nan=False)


def _name(kind: type) -> str:
    return f"icebear_{kind.__name__.lower()}"


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


class Saved:
    """A record that is saved as JSON. What is read and is not as icebear writes it raises `RecipeError`."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return to_dict(self)

    def to_json(self) -> str:
        return to_json(self)

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        return from_dict(data, cls, RecipeError)

    @classmethod
    def from_json(cls, text: str) -> Self:
        return from_json(text, cls, RecipeError)

    def save(self, path: str | Path) -> None:
        write_file(path, self.to_json() + "\n", RecipeError)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        return cls.from_json(read_text(path, RecipeError))
