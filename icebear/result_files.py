"""Results as files: one safetensors file, with the tensors of a record, and the record itself as JSON in its metadata.

Nothing in a file is run: fields are checked against their types. Numbers come back bit for bit, with their dtypes. A
checksum of the whole file refuses what was changed after it was saved.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from icebear.converters import check_version, checked, plain_converter
from icebear.errors import InputError
from icebear.paths import check_new, existing, write_file
from icebear.values import of_type

if TYPE_CHECKING:
    from cattrs import Converter

FORMAT = 1
KEY = "icebear"
"""The key of the JSON in the metadata."""
CLASS = "class"
"""The key of a record's class: a field may hold a subclass of its type. No field has this name."""
ZEROS = "0" * 64
"""In place of the checksum while it is computed."""

Tensors = dict[str, Any]
"""Key -> tensor. The index reads records too, and never imports torch."""
Given = tuple[Any, ...]
"""The models that `load` is called with."""
Write = Callable[[Any], Any]
Read = Callable[[Any, Given], Any]
PLAIN: list[tuple[type, Write, Read]] = []


def saved_as(kind: type, write: Write, read: Read) -> None:
    """Say how values of a class, and of its subclasses, are saved.

    Parameters
    ----------
    kind : type
    write : callable
        Returns a value as numbers, texts, lists, dicts and tensors.
    read : callable
        Returns the value of what `write` returned, and the models that `load` is called with. Any error refuses the
        file.
    """
    PLAIN.append((kind, write, read))


class SavedResult:
    """A result that is saved as a file."""

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        """Write the whole result to a safetensors file that `load` reads.

        Raises
        ------
        InputError
            If the file exists and `overwrite` is False, or if it cannot be written.
        """
        if not overwrite:
            check_new(path)
        tensors: Tensors = {}
        try:
            record = _packed(_converter(()).unstructure(self), tensors, {})
            text = json.dumps({_name(type(self)): FORMAT, "sha256": ZEROS, "record": record}, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as reason:
            raise InputError(f"The {_title(type(self))} cannot be saved ({reason}); correct it.") from None
        write_file(path, _signed(_bytes(tensors, text)), new=not overwrite)

    @classmethod
    def load(cls, path: str | Path, model: Any = None, base_model: Any = None) -> Self:
        """Read a result that `save` wrote.

        Parameters
        ----------
        path : str or Path
        model : Model, optional
            The model that the result was made with, for what runs it again. Without it, the result can be looked at,
            ranked and drawn.
        base_model : Model, optional
            The base model that it was compared with.

        Raises
        ------
        InputError
            If the file is not such a result, was changed after it was saved, or was made with another model.
        """
        for name, value in (("model", model), ("base_model", base_model)):
            of_type(value, name, {"Model", "None"})
        models = tuple(each for each in (model, base_model) if each is not None)
        record, tensors = _read(path, cls)
        try:
            values = _unpacked(record, tensors)
            if tensors:
                raise ValueError(f"it has {len(tensors)} tensors that no field names")
            for each in models:
                _check_made(each, values)
            checked(values, isinstance(values, dict) and values.get(CLASS) == cls.__name__, cls)
            return _converter(models).structure(values, cls)
        except InputError as reason:  # of a record that checks its fields, or of another model
            raise InputError(f"{path} cannot be read. {reason}") from None
        except Exception as reason:  # of cattrs
            why = f"it lacks {reason}" if isinstance(reason, KeyError) else str(reason).rstrip(".")
            raise InputError(f"{path} cannot be read ({why}); save the result again.") from None


class MissingModel:
    """In place of the model of a result that was read without it: whatever needs the model says so."""

    def __init__(self, name: str, saved: Any) -> None:
        """saved: how it stands in the file."""
        self.saved, self._name = saved, name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copies and debuggers look for
            raise AttributeError(name)
        raise InputError(
            f"This result was read from a file without its model {self._name}; load this model, and read the file "
            "again with load(path, model=...), or base_model= for a base model."
        )

    def __repr__(self) -> str:
        return f"MissingModel({self._name!r})"


# --- records and plain values ---------------------------------------------------------------------------


def _converter(models: Given) -> Converter:
    """Return a converter of results, which leaves tensors and numbers as they are."""
    from cattrs.strategies import configure_union_passthrough

    converter = plain_converter()
    configure_union_passthrough(str | int, converter)
    converter.register_unstructure_hook(float, lambda value: value)
    converter.register_structure_hook_func(
        _is_tensor, lambda value, kind: checked(value, isinstance(value, kind), kind)
    )
    converter.register_unstructure_hook_func(_is_tensor, lambda value: value)
    is_result = lambda kind: isinstance(kind, type) and issubclass(kind, SavedResult)  # noqa: E731
    converter.register_unstructure_hook_factory(is_result, lambda _: partial(_with_class, converter))
    converter.register_structure_hook_factory(is_result, lambda kind: partial(_of_class, converter))
    for kind, write, read in PLAIN:
        is_kind = partial(_is_kind, kind)
        converter.register_unstructure_hook_func(is_kind, partial(_written, write))
        converter.register_structure_hook_func(is_kind, partial(_checked_read, read, models))
    return converter


def _is_tensor(kind: Any) -> bool:
    return isinstance(kind, type) and (kind.__module__, kind.__name__) == ("torch", "Tensor")


def _is_kind(known: type, kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, known)


def _written(write: Write, value: Any) -> Any:
    return value.saved if isinstance(value, MissingModel) else write(value)


def _checked_read(read: Read, models: Given, value: Any, kind: type) -> Any:
    result = read(value, models)
    return checked(result, isinstance(result, (kind, MissingModel)), kind)


def _with_class(converter: Converter, result: SavedResult) -> dict[str, Any]:
    from cattrs.gen import make_dict_unstructure_fn

    kind = type(result)
    return {CLASS: kind.__name__, **make_dict_unstructure_fn(kind, converter)(result)}


def _of_class(converter: Converter, value: Any, kind: type[SavedResult]) -> Any:
    from cattrs.gen import make_dict_structure_fn

    name = value.get(CLASS) if isinstance(value, dict) else None
    chosen: Any = next((each for each in _tree(kind) if each.__name__ == name), None)
    checked(name, chosen is not None, kind)
    fields = {key: value[key] for key in value if key != CLASS}
    return make_dict_structure_fn(chosen, converter, _cattrs_forbid_extra_keys=True)(fields, chosen)


def _tree(kind: Any) -> Iterator[type]:
    """Yield a class and its subclasses."""
    yield kind
    for subclass in kind.__subclasses__():
        yield from _tree(subclass)


def _check_made(model: Any, values: Any) -> None:
    """Raise `InputError` if a file does not name this model."""
    known = list(_models(values))
    if known and model.fingerprint not in [facts["fingerprint"] for facts in known]:
        model.check_made(known[0])


def _models(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the names and fingerprints of models, wherever they stand."""
    if isinstance(value, dict):
        if isinstance(value.get("name"), str) and isinstance(value.get("fingerprint"), str):
            yield value
        value = list(value.values())
    for part in value if isinstance(value, list) else ():
        yield from _models(part)


# --- plain values and files -----------------------------------------------------------------------------


def _packed(value: Any, tensors: Tensors, keys: dict[int, str]) -> Any:
    """Return a value as JSON: tensors, which are put aside, are ``{"@tensor": key}``, and NaN ``{"@number": "nan"}``.

    keys: id of a tensor -> its key. Keys of dicts that begin with @ get another one.
    """
    if isinstance(value, dict):
        return {f"@{key}" if key[:1] == "@" else key: _packed(part, tensors, keys) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_packed(part, tensors, keys) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"@number": repr(float(value))}
    if not _is_tensor(type(value)):
        return value
    if id(value) not in keys:
        key = keys[id(value)] = str(len(tensors))
        tensors[key] = value.detach().cpu().contiguous().clone()  # so that no two share memory
    return {"@tensor": keys[id(value)]}


def _unpacked(value: Any, tensors: Tensors) -> Any:
    """Return the value of `_packed`. Tensors are taken out of `tensors` when all are read."""
    used: set[str] = set()

    def read(value: Any) -> Any:
        if isinstance(value, list):
            return [read(part) for part in value]
        if not isinstance(value, dict):
            return value
        match list(value.items()):
            case [("@number", str() as number)]:
                return float(checked(number, number in ("nan", "inf", "-inf"), float))
            case [("@tensor", str() as key)]:
                used.add(key)
                return tensors[key]
        checked(value, not any(key[:1] == "@" and key[1:2] != "@" for key in value), dict)
        return {key[1:] if key[:1] == "@" else key: read(part) for key, part in value.items()}

    result = read(value)
    for key in used:
        del tensors[key]
    return result


def _bytes(tensors: Tensors, text: str) -> bytes:
    from safetensors.torch import save

    return save(tensors, {KEY: text})


def _signed(data: bytes, checksum: str = ZEROS) -> bytes:
    """Return a file with the checksum of its bytes, in which zeros are in the place of the checksum."""
    data = data.replace(checksum.encode(), ZEROS.encode(), 1)
    return data.replace(ZEROS.encode(), sha256(data).hexdigest().encode(), 1)


def _read(path: str | Path, kind: type) -> tuple[Any, Tensors]:
    """Return the record and the tensors of a file. Raises `InputError` for any other file."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        data = existing(path).read_bytes()
    except OSError as reason:
        raise InputError(f"{path} cannot be read ({reason.strerror}); check the path.") from None
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        text = json.loads(header["__metadata__"][KEY])
        version, checksum, record = text.get(_name(kind)), text["sha256"], text["record"]
        tensors = load(data)
    except (SafetensorError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        raise InputError(
            f"{path} is not a result that icebear saved, or it is damaged; choose another file, or save the result "
            "again."
        ) from None
    if version != FORMAT:
        check_version(version, FORMAT, str(path), InputError)
        raise InputError(
            f"{path} is not an icebear {_title(kind)}, because it lacks {_name(kind)!r}: {FORMAT}; choose one that "
            "icebear saved."
        )
    if not isinstance(checksum, str) or len(checksum) != len(ZEROS) or _signed(data, checksum) != data:
        raise InputError(f"{path} was changed after it was saved; save the result again.")
    return record, tensors


def _name(kind: type) -> str:
    return f"icebear_{kind.__name__.lower()}"


def _title(kind: type) -> str:
    return kind.__name__.lower()


def given_model(saved: Any, models: Given) -> Any:
    """Return the model of a name and a fingerprint among those given; else a `MissingModel`."""
    name, fingerprint = saved["name"], saved["fingerprint"]
    return next((model for model in models if model.fingerprint == fingerprint), MissingModel(str(name), saved))
