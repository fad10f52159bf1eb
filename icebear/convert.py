"""Results as JSON and as tables.

JSON has an object with the fields of a record; numbers are exact. Reading checks fields against their types: unknown
fields are refused, and only fields with a default may be missing. NaN and infinity are texts (``"nan"``, ``"inf"``).
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from cattrs import Converter

from icebear.converters import check_version, plain_converter
from icebear.edits import AnyEdit, Edit, VectorEdit
from icebear.errors import IcebearError, InputError, RecipeError, need
from icebear.paths import check_new, read_text, write_file
from icebear.records import InNotebooks
from icebear.values import text_of

if TYPE_CHECKING:
    import pandas
    import pyarrow

FORMAT = 2

Record = TypeVar("Record")


def converter() -> Converter:
    """Return a converter of records whose fields may be neurons and edits."""
    result = plain_converter()
    result.register_structure_hook(
        AnyEdit, lambda value, _: result.structure(value, VectorEdit) if isinstance(value, dict) else Edit.parse(value)
    )
    return result


CONVERTER = converter()


def to_json(record: Any, indent: int | None = 1) -> str:
    """Return the JSON of a record, with its kind and the version of the format."""
    data = {_name(type(record)): FORMAT, **CONVERTER.unstructure(record)}
    return json.dumps(data, ensure_ascii=False, indent=indent, allow_nan=False)


def read_json(text: str | bytes) -> Any:
    """Return the value of a JSON text of icebear's. Raises `ValueError` or `RecursionError`.

    NaN and infinity are no JSON, and icebear writes no integer that has more than 64 bits: the numbers are floats, or
    counts.
    """
    return json.loads(text, parse_constant=_no_number, parse_int=_int64)


def _no_number(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _int64(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**63:
        raise ValueError(f"the number {digits[:10]}... is too large")
    return int(digits)


def from_json(text: str, kind: type[Record], source: str, error: type[IcebearError] = InputError) -> Record:
    """Read the JSON of `to_json`. source: the name of the text in messages. Raises `error` for any other text."""
    try:
        data = read_json(text)
        json.dumps(data, ensure_ascii=False).encode()  # an unpaired surrogate is not text
    except (TypeError, ValueError, RecursionError) as reason:
        raise error(f"{source} is not JSON ({reason}); check it, or save it again with icebear.") from None
    return _structured(data, kind, source, error)


def _structured(data: Any, kind: type[Record], source: str, error: type[IcebearError]) -> Record:
    version = data.get(_name(kind)) if isinstance(data, dict) else None
    if version != FORMAT:
        check_version(version, FORMAT, source, error)
        name = kind.__name__.lower()
        raise error(
            f"{source} is not an icebear {name}, because it lacks {_name(kind)!r}: {FORMAT}; choose one that icebear "
            "saved."
        )
    try:
        return CONVERTER.structure({key: data[key] for key in data if key != _name(kind)}, kind)
    except IcebearError as reason:  # of a record that checks its fields
        raise error(f"{source} cannot be read. {reason}") from None
    except Exception as reason:  # of cattrs
        why = f"it lacks {reason}" if isinstance(reason, KeyError) else str(reason).rstrip(".")
        raise error(f"{source} cannot be read ({why}); save it again with icebear.") from None


def _name(kind: type) -> str:
    return f"icebear_{kind.__name__.lower()}"


class Saved(InNotebooks):
    """A record that is saved as JSON. Reading a file that icebear did not write raises `RecipeError`."""

    def __post_init__(self) -> None:
        """Raise `InputError` for a field that should be a text and is none, such as a name with a stray byte."""
        for declared in fields(self):  # type: ignore[arg-type]
            if declared.type == "str":
                text_of(getattr(self, declared.name))

    def to_dict(self) -> dict[str, Any]:
        """Return the record, JSON-ready."""
        return json.loads(self.to_json())

    def to_json(self) -> str:
        return to_json(self)

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        return _structured(data, cls, f"The {cls.__name__.lower()}", RecipeError)

    @classmethod
    def from_json(cls, text: str) -> Self:
        return from_json(text, cls, f"The {cls.__name__.lower()}", RecipeError)

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        """Write a file that `load` reads. Raises `RecipeError`, also if there is one and `overwrite` is False."""
        if not overwrite:
            check_new(path, RecipeError)
        try:
            text = self.to_json()
        except (TypeError, ValueError, RecursionError) as reason:
            raise RecipeError(f"The {type(self).__name__.lower()} cannot be saved ({reason}); correct it.") from None
        self.from_json(text)
        write_file(path, text + "\n", RecipeError, new=not overwrite)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        return cls.from_json(read_text(path, RecipeError))


class Tabled(InNotebooks):
    """A result with a table (pandas and Arrow)."""

    made_with: dict[str, Any]

    def to_frame(self) -> pandas.DataFrame:
        raise NotImplementedError

    def to_arrow(self, *args: Any, **how: Any) -> pyarrow.Table:
        """Return `to_frame` as an Arrow table; its metadata has the provenance as JSON under ``icebear``."""
        need("arrow")
        import pyarrow

        table = pyarrow.Table.from_pandas(self.to_frame(*args, **how), preserve_index=False)
        provenance = json.dumps(self.made_with, ensure_ascii=False)
        return table.replace_schema_metadata({**(table.schema.metadata or {}), "icebear": provenance})
