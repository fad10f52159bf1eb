"""What a server keeps between calls: the model, results by handle, and the one folder that it may read and write."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import anyio

from icebear.actmax.shipped.index_choice import FOLDER_STORE, index_to_read, open_beside
from icebear.actmax.shipped.shipped_index import shipped_path
from icebear.cache import cached
from icebear.db.store import Store, open_finished
from icebear.errors import InputError, ModelError, StoreError, UnknownName
from icebear.models.loading.loading import load_model
from icebear.models.loading.presets import PRESETS
from icebear.models.model import Model
from icebear.paths import local, write_file
from icebear.steering.side_effects import HeldOutContexts

RESULTS_KEPT = 16
"""The newest answers, whose handles work."""


@dataclass(frozen=True)
class Result:
    value: Any
    lists: Mapping[str, Any]
    """Name -> all its rows."""
    files: dict[str, Callable[[], str]]
    """Suffix without its dot -> the function that returns the file's text."""


@dataclass
class Session:
    """What a server keeps between calls. One call runs at a time.

    model_name and options: the arguments of `load_model`. store_path: None for the index that `choose_index` says,
    the folder's store or, if it is prepared, the one that comes with icebear. folder: for files; None: none is read or
    written.

    base_model_name: the model that this one was made from. ledger: the file to which each call is appended. plan: the
    file of the plan that a person approves; None: calls need no plan.
    """

    model_name: str
    options: dict[str, Any] = field(default_factory=dict)
    store_path: str | None = None
    folder: Path | None = None
    base_model_name: str | None = None
    ledger: Path | None = None
    plan: Path | None = None
    lock: anyio.Lock = field(default_factory=anyio.Lock)
    results: dict[str, Result] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    async def run_exclusively(self, work: Callable[[], Any], seconds: float | None = None) -> Any:
        """Run one call at a time, in a thread; a call that waits occupies no thread.

        Raises `TimeoutError` after so many seconds of work, if the work asks whether it is cancelled."""
        async with self.lock:
            with anyio.fail_after(seconds):
                return await anyio.to_thread.run_sync(work)

    @cached_property
    def model(self) -> Model:
        """The model, loaded at first use, only from this machine."""
        return self._loaded(self.model_name)

    @cached_property
    def base_model(self) -> Model:
        """The model to compare with. Raises `InputError` if there is none."""
        if self.base_model_name is None:
            raise InputError("This server has no base model to compare with; the user can start it with --base-model.")
        return self._loaded(self.base_model_name)

    def _loaded(self, name: str) -> Model:
        missing = ModelError(
            f"{name} is not on this machine, and this server uses no network; ask the user to run: "
            f"icebear doctor --model {name}"
        )
        if name in PRESETS and not cached(PRESETS[name].folder):
            raise missing
        try:
            return load_model(name, **self.options)
        except UnknownName:  # of the hub, and not in its cache
            raise missing from None

    @cached_property
    def held_out(self) -> HeldOutContexts:
        return HeldOutContexts(self.model)

    @contextmanager
    def store(self, needs_it: str = "") -> Iterator[Store | None]:
        """Open the index, if there is one of this model.

        needs_it: the work that is impossible without an index."""
        with ExitStack() as stack:
            opened = None
            try:
                path = self._index()
                if path is None:
                    folder_store = self.store_path or FOLDER_STORE
                    make = f"icebear index --limit 300 --store {folder_store} --model {self.model_name}"
                    raise StoreError(
                        f"{needs_it} needs an index of texts; ask the user to run: "
                        + ("icebear search water" if shipped_path(self.model_name) else make)
                    )
                opened = stack.enter_context(open_finished(path, self.model.index_fingerprint, self.model.name))
            except StoreError:
                if needs_it:
                    raise
            yield opened

    def beside(self, store: Store) -> AbstractContextManager[Store | None]:
        """Open the index that is shown beside another, as `open_beside` does."""
        return open_beside(store.path, self.model_name, self.store_path is not None)

    def _index(self) -> Path | None:
        """Return the path of the index, if there is one."""
        store = local(self.store_path or FOLDER_STORE)
        path = store if self.store_path and store.exists() else index_to_read(store, self.model_name)
        return path if path.exists() else None

    def keep(self, kind: str, value: Any, lists: Mapping[str, Any], **files: Callable[[], str]) -> str:
        handle = f"{kind}-{next(self.numbers)}"
        self.results[handle] = Result(value, lists, files)
        for old in list(self.results)[:-RESULTS_KEPT]:
            del self.results[old]
        return handle

    def result(self, handle: str) -> Result:
        if handle not in self.results:
            raise InputError(
                f"{handle!r} is not a handle (handles: {', '.join(self.results) or 'none'}); call the tool again for a "
                "new one."
            )
        return self.results[handle]

    def path_of(self, name: str) -> Path:
        """Return a path in the folder. Raises `InputError` for a name outside of it, and if there is no folder."""
        if self.folder is None:
            raise InputError("This server reads and writes no files; the user can start it with --folder.")
        folder = self.folder.resolve()
        try:
            path = (folder / name).resolve()
        except (OSError, ValueError):
            raise InputError(f"{name!r} is not a file name; give a name like why.json.") from None
        if not path.is_relative_to(folder) or path.suffix not in (".json", ".html"):
            raise InputError(f"{name!r} is not a file in the server's folder; give a name that ends in .json or .html.")
        return path

    def write(self, name: str, text: str) -> Path:
        """Write a new file; no file is overwritten. Raises `InputError`."""
        path = self.path_of(name)
        write_file(path, text, new=True)
        return path
