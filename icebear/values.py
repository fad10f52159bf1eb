"""Checks of user input: each returns the value, or raises an error with one sentence that has the value; a hash."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from numbers import Integral, Real
from typing import Any

from icebear.errors import InputError, UnknownName

LARGEST = 3.3895313892515355e38
"""The largest number of bfloat16."""
POSITIVE = 1e-30
"""The smallest number that counts as positive."""
MOST = 10**9 - 1
"""The largest count, nine digits."""
LAST_SEED = 2**63 - 1


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


def whole(value: Any, what: str, least: int = 1, most: int = MOST) -> int:
    """Return a whole number. Raises `InputError` if it is not one in this range."""
    if type(value) is int and least <= value <= most:  # without the slow check of other kinds of numbers
        return value
    value = scalar(value)
    if not isinstance(value, Integral) or isinstance(value, bool) or not least <= value <= most:  # type: ignore[operator]
        limits = f"of at least {least}" if most == MOST else f"from {least} to {most}"
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
    return whole(value, "The seed", 0, LAST_SEED)


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


def stable_hash(text: str) -> int:
    """Return 64 bits that depend only on the text, not on the process or version."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
