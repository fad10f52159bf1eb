"""Paths as people write them: `~` for the home folder, suffixes in capitals, text that is compressed."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import TextIO

from icebear.errors import IcebearError, InputError


def local(name: str | Path) -> Path:
    """Raises `InputError` for what names no file."""
    if not isinstance(name, (str, Path)) or not str(name):
        raise InputError(f"{name!r} is not a path; give it as text.")
    return Path(os.path.expanduser(name))


def write(path: str | Path, text: str, error: type[IcebearError] = InputError) -> None:
    """Raises `error` where that cannot be written."""
    try:
        local(path).write_text(text + "\n", encoding="utf-8")
    except OSError as reason:
        raise error(f"{path} cannot be written ({reason.strerror}); choose another path.") from None


def kind(path: str | Path) -> str:
    """The suffix in lower case; of what gzip compressed the one before ``.gz``."""
    name = Path(str(path).lower())
    return Path(name.stem).suffix if name.suffix == ".gz" else name.suffix


def opened(path: Path, newline: str | None = None) -> TextIO:
    """A text in UTF-8, compressed or not; bytes that are none become question marks."""
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", errors="replace", newline=newline)  # type: ignore[return-value]
    return path.open(encoding="utf-8", errors="replace", newline=newline)
