"""Paths and text files: `~`, suffixes in capitals, compressed text, atomic writes."""

from __future__ import annotations

import codecs
import errno
import gzip
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from icebear.errors import IcebearError, InputError
from icebear.values import shown


def local(name: str | Path) -> Path:
    """Return a path. Raises `InputError` if it cannot be one."""
    if not isinstance(name, (str, Path)) or not str(name) or "\0" in str(name):
        raise InputError(f"{name!r} is not a path; give the path of a file as a string.")
    path = Path(os.path.expanduser(name))
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise InputError(f"The file name {shown(str(name))} is too long; choose a shorter name.") from None
    return path


def existing(path: str | Path, error: type[IcebearError] = InputError) -> Path:
    """Return the path of a regular file. Raises `FileNotFoundError`, and `error` for a folder, pipe or device."""
    path = local(path)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise
    except OSError as reason:  # a name too long, links in a circle, a folder that may not be looked into
        raise error(f"{path} cannot be read ({reason.strerror}); check the path.") from None
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
        raise error(f"{path} is {what}, not a file; check the path.")
    return path


def read_text(path: str | Path, error: type[IcebearError] = InputError) -> str:
    """Return a text in UTF-8. Raises `error` if it cannot be read."""
    try:
        return existing(path, error).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise error(
            f"{path} cannot be read, because it is not a text in UTF-8; convert it, or check the path."
        ) from None
    except OSError as reason:
        raise error(f"{path} cannot be read ({reason.strerror}); check the path.") from None


def write_file(path: str | Path, content: str | bytes, error: type[IcebearError] = InputError) -> None:
    """Write a temporary file and rename it, so that an existing file is replaced atomically. Raises `error`."""
    data = content.encode() if isinstance(content, str) else content
    try:
        place = _target(path)
        if place.exists() and not place.is_file():  # such as /dev/stdout
            _put(place, data, os.O_WRONLY | os.O_NONBLOCK)
            return
        part = place.with_name(f".icebear-{os.getpid()}-{secrets.token_hex(4)}.part")
        try:
            _put(part, data, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            if place.exists():
                part.chmod(stat.S_IMODE(place.stat().st_mode))
            os.replace(part, place)
        finally:
            part.unlink(missing_ok=True)
    except OSError as reason:
        raise error(f"{path} cannot be written ({reason.strerror}); choose another path.") from None


def _target(path: str | Path) -> Path:
    """Return where a link leads, so that it stays a link. Raises `OSError` for links in a circle."""
    place = Path(os.path.realpath(local(path)))
    if place.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return place


def _put(place: Path, data: bytes, flags: int) -> None:
    with open(os.open(place, flags, 0o666), "wb") as file:
        os.set_blocking(file.fileno(), True)  # a pipe without reader has failed by now
        file.write(data)


def check_writable(path: str | Path) -> None:
    """Raise `InputError` for a file, or a folder of files, that cannot be written at this path."""
    try:
        place = _target(path)
    except OSError as reason:
        raise InputError(f"{path} cannot be written ({reason.strerror}); choose another path.") from None
    if place.exists() and not place.is_dir() and not place.is_file():  # such as /dev/stdout
        if place.is_socket():
            raise InputError(f"{path} cannot be written (it is a socket); choose another path.")
        return
    if place.is_file() and (what := _precious(place)):
        raise InputError(f"{path} is {what}, which would be lost; choose another path.")
    around = place.parent if place.is_file() or not place.exists() else place
    if not around.is_dir():
        raise InputError(f"{path} cannot be written (there is no folder {around}); choose another path.")
    if not os.access(around, os.W_OK | os.X_OK):
        raise InputError(f"{path} cannot be written (no permission to write in {around}); choose another path.")


def _precious(place: Path) -> str:
    """Return what a file is that no other command can make again soon; empty for any other file."""
    with suppress(OSError), place.open("rb") as file:
        if file.read(16) == b"SQLite format 3\0":
            return "a database (a store)"
    return "a file of a model" if place.with_name("config.json").is_file() else ""


def kind(path: str | Path) -> str:
    """Return the suffix in lower case, without ``.gz``."""
    name = Path(str(path).lower())
    return Path(name.stem).suffix if name.suffix == ".gz" else name.suffix


def opened(path: Path, newline: str | None = None) -> TextIO:
    """Open a text in UTF-8, compressed or not."""
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline=newline)  # type: ignore[return-value]
    return path.open(encoding="utf-8-sig", newline=newline)


def check_text(path: Path) -> None:
    """Raise `InputError` for a file that is not UTF-8 text, with the encoding that it seems to have.

    A text with zero bytes, such as UTF-16, is refused although it is valid UTF-8.
    """
    try:
        with opened(path) as file:
            if not any("\0" in part for part in iter(lambda: file.read(1 << 20), "")):
                return
    except UnicodeDecodeError:
        pass
    with (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rb") as file:  # type: ignore[operator]
        encoding = encoding_of(file.read(1 << 20))
    if encoding is None:
        raise InputError(f"{path} is not a text file; give a text file in UTF-8.")
    raise InputError(f"{path} is not UTF-8, but reads as {encoding}; convert it with: iconv -f {encoding} -t UTF-8")


MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",  # before UTF-16, whose mark is a prefix of this one
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def encoding_of(data: bytes) -> str | None:
    """Return the encoding of bytes that are not UTF-8, from the mark, the zero bytes or the control characters.

    None if they are not text.
    """
    for mark, name in MARKS.items():
        if data.startswith(mark):
            return name
    even, odd = data[::2].count(0), data[1::2].count(0)
    if even or odd:
        fifth = len(data) / 10
        return "UTF-16LE" if odd > fifth > even else "UTF-16BE" if even > fifth > odd else None
    controls = sum(data.count(byte) for byte in range(32) if byte not in b"\t\n\r\f")
    if controls > len(data) / 1000:
        return None
    return "CP1252" if not any(byte in data for byte in b"\x81\x8d\x8f\x90\x9d") else "ISO-8859-1"
