"""What a server keeps between calls: the model, results by handle, and the one folder that it may touch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from icebear.cache import cached
from icebear.errors import InputError, ModelError, StoreError, UnknownName
from icebear.paths import local

if TYPE_CHECKING:
    from icebear.concepts.models.model import Model
    from icebear.db.store import Store
    from icebear.steering.side_effects import HeldOutContexts

KEPT = 16
"""Results, the newest."""
SUFFIXES = (".json", ".html")


@dataclass(frozen=True)
class Kept:
    """A result: its lists as rows, and what it is saved as."""

    value: Any
    parts: dict[str, list[dict[str, Any]]]
    files: dict[str, Callable[[], str]]
    """Suffix -> the file's text."""


@dataclass
class Session:
    """model_name and how: as of `load_model`. folder: the one in which files are read and written; None for nowhere."""

    model_name: str
    how: dict[str, Any] = field(default_factory=dict)
    store_path: str = "icebear.db"
    folder: Path | None = None
    lock: anyio.Lock = field(default_factory=anyio.Lock)
    results: dict[str, Kept] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    @cached_property
    def model(self) -> Model:
        """Loaded at first use, from what is on this machine only."""
        from icebear.concepts.models.loading import load_model
        from icebear.concepts.models.presets import PRESETS

        name = self.model_name
        missing = ModelError(
            f"{name} is not on this machine, and this server uses no network; ask the user to run: "
            f"icebear doctor --model {name}"
        )
        if name in PRESETS and not cached(PRESETS[name].folder):
            raise missing
        try:
            return load_model(name, **self.how)
        except UnknownName:  # of the hub, and not in its cache
            raise missing from None

    @cached_property
    def neutral(self) -> HeldOutContexts:
        from icebear.steering.side_effects import HeldOutContexts

        return HeldOutContexts(self.model)

    @contextmanager
    def store(self, needed: str = "") -> Iterator[Store | None]:
        """The index, if there is one of this model. needed: what for, where it cannot be done without."""
        from icebear.db.store import open_finished

        with ExitStack() as stack:
            found = None
            try:
                if not local(self.store_path).exists():
                    raise StoreError(
                        f"{needed} needs an index of texts; ask the user to run: icebear index --limit 300 --store "
                        f"{self.store_path} --model {self.model_name}"
                    )
                found = stack.enter_context(open_finished(self.store_path, self.model.fingerprint, self.model.name))
            except StoreError:
                if needed:
                    raise
            yield found

    # --- results by handle ------------------------------------------------------------------------------

    def keep(self, kind: str, value: Any, parts: dict[str, list[dict[str, Any]]], **files: Callable[[], str]) -> str:
        """A handle. files: suffix without its dot -> what writes it."""
        handle = f"{kind}-{next(self.numbers)}"
        self.results[handle] = Kept(value, parts, files)
        for old in list(self.results)[:-KEPT]:
            del self.results[old]
        return handle

    def kept(self, handle: str) -> Kept:
        """Raises `InputError`."""
        if handle not in self.results:
            raise InputError(f"{handle!r} is no handle (there are: {', '.join(self.results) or 'none'}); ask again.")
        return self.results[handle]

    # --- files ------------------------------------------------------------------------------------------

    def place(self, name: str) -> Path:
        """A file in the folder. Raises `InputError` for a name that leads out of it, and where there is no folder."""
        if self.folder is None:
            raise InputError("This server reads and writes no files; the user can start it with --folder.")
        folder = self.folder.resolve()
        try:
            found = (folder / name).resolve()
        except (OSError, ValueError):
            raise InputError(f"{name!r} is no name of a file; give one like story.json.") from None
        if not found.is_relative_to(folder) or found.suffix not in SUFFIXES:
            raise InputError(f"{name!r} is not a file in the server's folder; give a name that ends in .json or .html.")
        return found

    def write(self, name: str, text: str) -> Path:
        """A new file; what is there is left alone. Raises `InputError`."""
        place = self.place(name)
        data = text.encode()
        try:
            handle = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o644)
        except OSError as error:
            raise InputError(f"{name!r} cannot be written ({error.strerror}); choose another name.") from None
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        return place
