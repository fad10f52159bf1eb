"""Checks of user input: each returns the value, or raises an error with one sentence that has the value. Also a hash,
and the common beginning of two sequences."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

from icebear.errors import InputError, UnknownName

LARGEST = 3.3895313892515355e38
"""The largest number of bfloat16."""
POSITIVE = 1e-30
"""The smallest number that counts as positive."""
MOST = 10**9 - 1
"""The largest count, nine digits."""
LAST_SEED = 2**63 - 1


def common_length(values: Sequence[Any], others: Sequence[Any]) -> int:
    """Return the length of the longest common beginning."""
    shortest = min(len(values), len(others))
    return next((at for at in range(shortest) if values[at] != others[at]), shortest)


def plural(count: int, noun: str) -> str:
    """Return a number of things: "1 edit", "2 edits"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def shown(value: object) -> str:
    """Return a value for a message, in one line of at most 60 characters."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # an integer of more than 4,300 digits
        text = "a number too long to print"
    return text if len(text) <= 60 else f"{text[:57]}..."


def scalar(value: Any) -> Any:
    """Return the number in an array or tensor without dimensions, such as `logits.argmax()`; else the value."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def check_int(value: Any, what: str, least: int = 1, most: int = MOST) -> int:
    """Return a whole number. Raises `InputError` if it is not one in this range."""
    if type(value) is int and least <= value <= most:  # without the slow check of other kinds of numbers
        return value
    value = scalar(value)
    if not isinstance(value, Integral) or isinstance(value, bool) or not least <= value <= most:  # type: ignore[operator]
        too_large = isinstance(value, Integral) and value > most  # type: ignore[operator]
        limits = f"from {least} to {most}" if too_large or most != MOST else f"of at least {least}"
        raise InputError(f"{what} must be a whole number {limits}, not {shown(value)}.")
    return int(value)


def real(value: Any, what: str, least: float = -LARGEST, most: float = LARGEST) -> float:
    """Return a finite number. Raises `InputError` if it is not one in this range."""
    value = scalar(value)
    if not isinstance(value, Real) or isinstance(value, bool) or not least <= value <= most:  # type: ignore[operator]
        raise InputError(f"{what} must be a finite number{_limits(least, most)}, not {shown(value)}.")
    return float(value)


def _limits(least: float, most: float) -> str:
    if most < LARGEST:
        return f" from {least:g} to {most:g}"
    if least == POSITIVE:
        return " above 0"
    return f" of at least {least:g}" if least > -LARGEST else ""


def seed_of(value: Any) -> int:
    return check_int(value, "The seed", 0, LAST_SEED)


def one_of(value: Any, what: str, known: Collection[str]) -> Any:
    """Return a known name. Raises `UnknownName` for any other value."""
    if not isinstance(value, str) or value not in known:
        raise UnknownName(what, value if isinstance(value, str) else shown(value), known, f"Use {', '.join(known)}.")
    return value


def several(value: Any) -> list[Any]:
    """Return several values as a list; a single value, such as a text, becomes a list of one."""
    value = scalar(value)
    return list(value) if isinstance(value, Iterable) and not isinstance(value, (str, bytes)) else [value]


def text_of(value: Any) -> str:
    """Return a text in UTF-8. Raises `InputError` for any other value, such as a stray byte of a terminal."""
    if not isinstance(value, str):
        raise InputError(f"{shown(value)} is not a text; give a text (a string).")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"Character {error.start} of the text is not valid UTF-8; give the text in UTF-8.") from None
    return value


TYPES = {
    "Model": "pass the result of load_model",
    "Store": "pass the store that open_store yields",
    "Relevance": "pass the result of attribute",
    "Answer": "pass the result of model.answer",
    "Corpus": "pass the result of read_corpus or read_images",
    "Neuron": "write it like L29.ffn.860",
    "Path": "give a path",
    "str": "give a text",
    "bool": "give True or False",
}
"""The types that `typed` checks, and what to give. Numbers are checked where their range is known."""


def of_type(value: Any, name: str, known: Collection[str]) -> None:
    """Raise `InputError` if an argument is of none of these types, which are named as in `TYPES`, or None."""
    if not {*known} & {kind.__name__ for kind in type(value).__mro__} and not (value is None and "None" in known):
        kind = next(type_name for type_name in TYPES if type_name in known)
        raise InputError(f"{name} must be a {kind}, not {shown(value)}; {TYPES[kind]}.")


Function = TypeVar("Function", bound=Callable[..., Any])


def typed(function: Function) -> Function:
    """Make a public function refuse, with an `InputError`, what is not of the type that its signature names.

    It reads the annotations of which every alternative is one of `TYPES` or None, by their names: without imports.
    """
    signature, wanted = inspect.signature(function), {}
    for name, parameter in signature.parameters.items():
        alternatives = {part.strip() for part in str(parameter.annotation).split("|")}
        if alternatives <= {*TYPES, "None"} and parameter.kind is not parameter.VAR_KEYWORD:
            wanted[name] = alternatives

    closed = all(parameter.kind is not parameter.VAR_KEYWORD for parameter in signature.parameters.values())

    @functools.wraps(function)
    def checked(*values: Any, **named: Any) -> Any:
        for name in named.keys() - signature.parameters.keys() if closed else ():
            one_of(name, f"argument of {function.__name__}", signature.parameters)
        arguments = signature.bind(*values, **named).arguments
        for name in wanted.keys() & arguments.keys():
            of_type(arguments[name], name, wanted[name])
        return function(*values, **named)

    return checked  # type: ignore[return-value]


def stable_hash(text: str) -> int:
    """Return 64 bits that depend only on the text, not on the process or version."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
