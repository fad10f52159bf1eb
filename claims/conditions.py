"""`Condition`: a way in which claims are measured again, such as ``dtype=bfloat16``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from icebear.errors import InputError
from icebear.openai_server import check_address
from icebear.values import LAST_SEED, check_int, one_of, shown, text_of

MOST_THREADS = 1024
AUTO = "auto"
"""The value of ``paraphrases`` that stands for `TEMPLATES`."""
TEMPLATES = {
    "declarative": "It is known to everyone. {}",
    "question": "Do you know how this sentence ends? {}",
    "list": "- Snow is white.\n- {}",
    "quotation": 'She said: "{}',
}
"""Beginnings before a prompt that leave what follows it as it is."""
WRITE_LIKE = "write it like dtype=bfloat16"


@dataclass(frozen=True)
class Condition:
    """What is changed before claims are measured again, written ``kind=value``."""

    kind: str
    """A key of `CONDITIONS`."""
    value: str

    def __post_init__(self) -> None:
        one_of(self.kind, "condition", CONDITIONS)
        if not text_of(self.value).strip():
            raise InputError(f"The condition {self.kind}= has no value; {WRITE_LIKE}.")
        CONDITIONS[self.kind](self.value)

    def __str__(self) -> str:
        return f"{self.kind}={self.value}"

    @property
    def label(self) -> str:
        """Its text for the heading of a column: of a path, the last part."""
        is_path = self.kind in ("model", "paraphrases")
        return f"{self.kind}={PurePath(self.value).name or self.value}" if is_path else str(self)

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read a condition. Raises `InputError` for any other text."""
        kind, equals, value = text_of(text).partition("=")
        if not equals:
            raise InputError(f"{shown(text)} is not a condition; {WRITE_LIKE}. The kinds are {', '.join(CONDITIONS)}.")
        return cls(kind.strip(), value.strip())


def conditions_of(values: Iterable[str | Condition]) -> tuple[Condition, ...]:
    """Return each condition once, in order. Raises `InputError`."""
    read = (value if isinstance(value, Condition) else Condition.parse(value) for value in values)
    return tuple(dict.fromkeys(read))


def whole_number(value: str) -> int:
    """Read the digits of a count or a seed. Raises `InputError`."""
    if not (value.isascii() and value.isdigit() and len(value) < 20):
        raise InputError(f"{shown(value)} is not a whole number; write it in digits.")
    return int(value)


CONDITIONS: dict[str, Callable[[str], Any]] = {
    "dtype": lambda value: one_of(value, "dtype", ("float32", "bfloat16", "float16", "float64")),
    "bits": lambda value: one_of(value, "number of bits", ("8", "4")),
    "attention": lambda value: one_of(value, "attention", ("sdpa", "eager")),
    "model": text_of,
    "paraphrases": text_of,
    "threads": lambda value: check_int(whole_number(value), "The number of threads", 1, MOST_THREADS),
    "seed": lambda value: check_int(whole_number(value), "The seed", 0, LAST_SEED),
    "url": check_address,
}
"""Kind -> what checks its value."""
