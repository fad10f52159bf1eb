"""Converters between records and plain values, whose types they check; the versions of formats."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from icebear.errors import IcebearError

if TYPE_CHECKING:
    from cattrs import Converter


def plain_converter() -> Converter:
    """Return a converter of records. A class with `parse`, such as `Neuron`, is its text."""
    from cattrs import Converter  # here, because records say how they are saved, and not all are
    from cattrs.cols import is_namedtuple

    result = Converter(forbid_extra_keys=True, detailed_validation=False, unstruct_collection_overrides={tuple: list})
    for kind in (bool, int, str):
        result.register_structure_hook(kind, lambda value, kind: checked(value, type(value) is kind, kind))
    number = lambda value: type(value) in (int, float) or value in ("nan", "inf", "-inf")  # noqa: E731
    result.register_structure_hook(float, lambda value, kind: float(checked(value, number(value), kind)))
    result.register_unstructure_hook(float, lambda value: value if math.isfinite(value) else repr(value))
    result.register_structure_hook_func(_is_text, lambda value, kind: kind.parse(value))
    result.register_unstructure_hook_func(_is_text, str)
    result.register_structure_hook_factory(lambda kind: get_origin(kind) in (tuple, list), _sequence)
    result.register_structure_hook_factory(is_namedtuple, _named_tuple)  # cattrs does not resolve postponed types
    return result


def checked(value: Any, right: bool, kind: Any) -> Any:
    """Return the value. Raises `TypeError` if it is not right."""
    if not right:
        raise TypeError(f"{str(value)[:40]!r} is not a {getattr(kind, '__name__', kind)}")
    return value


def _is_text(kind: Any) -> bool:
    return isinstance(kind, type) and hasattr(kind, "parse")


def _sequence(kind: Any, converter: Converter) -> Callable[[Any, Any], Any]:
    origin, inner = get_origin(kind), get_args(kind)

    def hook(value: Any, _: Any) -> Any:
        size = len(checked(value, isinstance(value, list), kind))
        kinds = inner if origin is tuple and inner[-1:] != (...,) else inner[:1] * size
        return origin(converter.structure(part, kind) for part, kind in zip(value, kinds, strict=True))

    return hook


def _named_tuple(kind: Any, converter: Converter) -> Callable[[Any, Any], Any]:
    kinds = tuple(get_type_hints(kind).values())

    def hook(value: Any, _: Any) -> Any:
        row = checked(value, isinstance(value, list), kind)
        return kind(*(converter.structure(part, each) for part, each in zip(row, kinds, strict=True)))

    return hook


def check_version(version: Any, known: int, source: str, error: type[IcebearError]) -> None:
    """Raise the error for the version of another format; what is no number is no version."""
    if isinstance(version, int | float) and version != known:
        raise error(
            f"{source} has format version {version}, but this version of icebear reads format version {known}; make "
            "the file again with this version."
        )
