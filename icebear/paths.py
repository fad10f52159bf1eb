"""Paths and files: `~`, suffixes in capitals, compressed text; every file that is written, and locks."""

from __future__ import annotations

import codecs
import errno
import gzip
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from icebear.errors import IcebearError, InputError, ModelError
from icebear.values import shown, stable_hash

STALE = 3600
"""Seconds after which a temporary file belongs to no process any more."""
WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
"""Endings of files of weights that may be in TransformerLens' format."""


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


def check_new(path: str | Path, error: type[IcebearError] = InputError) -> None:
    """Raise `error` if there is a file, in words for Python and for the command line, which replaces no file."""
    if local(path).exists():
        raise error(
            f"{path} exists already; choose another path, or delete the file (in Python, overwrite=True replaces it)."
        )


def write_file(
    path: str | Path, content: str | bytes, error: type[IcebearError] = InputError, new: bool = False
) -> None:
    """Write a file as `written` does. new: only if there is no file. Raises `error`."""
    try:
        data = content.encode() if isinstance(content, str) else content
    except UnicodeEncodeError as reason:  # a stray byte of a terminal, or half of a pair
        raise error(f"{path} cannot be written, because {shown(reason.object[reason.start :])} is no text.") from None
    with _explained(path, error):
        target = _target(path)
        if not new and target.exists() and not target.is_file():  # such as /dev/stdout
            with open(os.open(target, os.O_WRONLY | os.O_NONBLOCK), "wb") as file:
                os.set_blocking(file.fileno(), True)  # a pipe without reader has failed by now
                file.write(data)
            return
    with written(path, error, new) as part:
        part.write_bytes(data)


@contextmanager
def written(path: str | Path, error: type[IcebearError] = InputError, new: bool = False) -> Iterator[Path]:
    """Give a temporary path in the same folder, which replaces `path` at the end, when it is on the disk.

    After any exception, an existing file stays as it was, and the temporary file is removed. Raises `error` if the
    file cannot be written.
    """
    with _explained(path, error):
        target = _target(path)
        part = _part(target)
        try:
            os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            yield part
            with part.open("rb+") as file:
                os.fsync(file.fileno())
            if new:  # takes the name, on file systems without links too
                os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            elif target.exists():
                part.chmod(stat.S_IMODE(target.stat().st_mode))
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)


def _part(target: Path) -> Path:
    """Return a temporary path beside a target, and remove those of processes that were killed."""
    parts = f".icebear-{stable_hash(ascii(target.name)):016x}-"
    for old in target.parent.glob(f"{parts}*.part"):
        with suppress(OSError):
            if time.time() - old.stat().st_mtime > STALE:
                shutil.rmtree(old) if old.is_dir() else old.unlink()
    return target.with_name(f"{parts}{secrets.token_hex(4)}.part")


@contextmanager
def new_folder(path: str | Path, error: type[IcebearError] = InputError) -> Iterator[Path]:
    """Give a temporary folder beside `path`, which gets this name at the end; after any exception it is removed.

    Raises `error` if something is at `path` (other than an empty folder), or if nothing can be written there.
    """
    with _explained(path, error):
        target = _target(path)
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise error(f"{path} exists, and would be overwritten; choose another folder.")
        part = _part(target)
        try:
            part.mkdir()
            yield part
            os.rename(part, target)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def append(path: str | Path, data: bytes, error: type[IcebearError] = InputError) -> None:
    """Add bytes at the end of a file; if not all of them fit, none. Raises `error`."""
    with _explained(path, error), open(path, "ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
        except BaseException:
            file.truncate(size)
            raise


@contextmanager
def locked(path: str | Path, error: type[IcebearError] = InputError, seconds: float = 0) -> Iterator[None]:
    """Hold the lock of a file or folder: a hidden file, which is removed at the end.

    seconds: how long to wait for another process. Raises `error` if it still has the lock, or if nothing can be
    written there.
    """
    from filelock import FileLock, Timeout

    with _explained(path, error):
        target = _target(path)
        hidden = target / ".lock" if target.is_dir() else target.with_name(f".{target.name}.lock")
        try:
            lock = FileLock(hidden, timeout=seconds).acquire()
        except Timeout:
            raise error(f"Another process is writing to {path}; wait for it, or choose another path.") from None
    with lock:
        try:
            yield
        finally:
            with suppress(OSError):  # a process that waits for this file sees that it is gone, and makes another one
                hidden.unlink()


@contextmanager
def _explained(path: str | Path, error: type[IcebearError]) -> Iterator[None]:
    try:
        yield
    except OSError as reason:
        raise error(f"{path} cannot be written ({reason.strerror or reason}); choose another path.") from None


def _target(path: str | Path) -> Path:
    """Return where a link leads, so that it stays a link. Raises `OSError` for links in a circle."""
    target = Path(os.path.realpath(local(path)))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return target


def check_writable(path: str | Path) -> None:
    """Raise `InputError` for a file, or a folder of files, that cannot be written at this path."""
    with _explained(path, InputError):
        target = _target(path)
    if target.exists() and not target.is_dir() and not target.is_file():  # such as /dev/stdout
        if target.is_socket():
            raise InputError(f"{path} cannot be written (it is a socket); choose another path.")
        return
    if target.is_file() and (what := _precious(target)):
        raise InputError(f"{path} is {what}, which would be lost; choose another path.")
    around = target.parent if target.is_file() or not target.exists() else target
    if not around.is_dir():
        raise InputError(f"{path} cannot be written (there is no folder {around}); choose another path.")
    if not os.access(around, os.W_OK | os.X_OK):
        raise InputError(f"{path} cannot be written (no permission to write in {around}); choose another path.")


def _precious(path: Path) -> str:
    """Return what a file is that no other command can make again soon; empty for any other file."""
    with suppress(OSError), path.open("rb") as file:
        if file.read(16) == b"SQLite format 3\0":
            return "a database (a store)"
    return "a file of a model" if path.with_name("config.json").is_file() else ""


def kind(path: str | Path) -> str:
    """Return the suffix in lower case, without ``.gz``."""
    name = Path(str(path).lower())
    return Path(name.stem).suffix if name.suffix == ".gz" else name.suffix


def opened(path: Path, newline: str | None = None) -> TextIO:
    """Open a text in UTF-8, compressed or not."""
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline=newline)  # type: ignore[return-value]
    return path.open(encoding="utf-8-sig", newline=newline)


def check_pointer(path: Path, error: type[IcebearError]) -> None:
    """Raise `error` for a file that holds only git-lfs's pointer to its content."""
    with suppress(OSError), path.open("rb") as file:
        if file.read(len(POINTER)) == POINTER:
            raise error(f"{path} is a pointer of git-lfs without its content; fetch it with: git lfs pull")


POINTER = b"version https://git-lfs"
"""The beginning of such a file."""


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


def check_model_path(name: str) -> None:
    """Raise `ModelError` for a path that cannot be a model's folder or file; a hub id or preset is none."""
    path = local(name)
    suffix = path.suffix.lower()
    if suffix == ".gguf" or (suffix in WEIGHTS and path.is_file()):
        return
    if suffix in WEIGHTS and not path.exists():
        raise ModelError(f"There is no file {name}; check the path.")
    if path.is_file():
        raise ModelError(f"{name} is a file; give the folder of a model, a .gguf file, or a {'/'.join(WEIGHTS)} file.")
    is_path = name.startswith((".", "~")) or path.is_absolute() or path.is_symlink()
    if is_path and not path.exists():
        raise ModelError(f"There is no folder {name}; check the path.")
    if is_path and not any(path.glob("*.json")):
        raise ModelError(f"The folder {name} has no model, because it has no config.json; check the path.")
