"""What a caller gives, checked where it comes in: one sentence that has the value in it, or the value itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from numbers import Integral, Real
from typing import Any

from icebear.errors import InputError, UnknownName

LARGEST = 3.3895313892515355e38
"""That bfloat16 holds, and float32."""
POSITIVE = 1e-30
"""The least number that counts as more than 0."""
MOST = 10**9 - 1
"""Of anything that is counted: nine digits."""
LAST_SEED = 2**63 - 1


def shown(value: object) -> str:
    """For a sentence: in one line, cut where it is long."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # an integer of more than 4,300 digits
        text = "a number too long to print"
    return text if len(text) <= 60 else f"{text[:57]}..."


def whole(value: Any, what: str, least: int = 1, most: int = MOST) -> int:
    """Raises `InputError` for what is no whole number in this range."""
    if not isinstance(value, Integral) or isinstance(value, bool) or not least <= value <= most:  # type: ignore[operator]
        limits = f"of at least {least}" if most == MOST else f"from {least} to {most}"
        raise InputError(f"{what} must be a whole number {limits}, not {shown(value)}.")
    return int(value)


def real(value: Any, what: str, least: float = -LARGEST, most: float = LARGEST) -> float:
    """Raises `InputError` for what is no number in this range, as NaN and infinity are not."""
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
    """Raises `UnknownName` for what is none of the known names."""
    if not isinstance(value, str) or value not in known:
        raise UnknownName(what, value if isinstance(value, str) else shown(value), known, f"Use {', '.join(known)}.")
    return value


def several(value: Any) -> list[Any]:
    """What is value as a list; one alone, a text above all, is a list of one."""
    return list(value) if isinstance(value, Iterable) and not isinstance(value, (str, bytes)) else [value]


def text_of(value: Any) -> str:
    """Raises `InputError` for what is no text."""
    if not isinstance(value, str):
        raise InputError(f"{shown(value)} is not a text; give one.")
    return value
