"""What `icebear app` was started with: the model and its index."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from icebear.actmax.shipped.index_choice import FOLDER_STORE, IndexChoice, choose_index, open_beside
from icebear.app import example
from icebear.app.web.shared import all_visitors
from icebear.db.store import Store, complete_facts, open_store
from icebear.errors import IcebearError
from icebear.records import IMAGES


def settings() -> dict[str, Any]:
    """Return the path of the index, None if none was named, and the arguments of `load_model` that `icebear app` was
    started with."""
    return {"store": None, "model": example.MODEL, **json.loads(os.environ.get("ICEBEAR_APP", "{}"))}


def model_settings() -> dict[str, Any]:
    return {name: value for name, value in settings().items() if name != "store"}


def model_name() -> str:
    return settings()["model"]


def a_neuron() -> str:
    """Return the neuron that views show first; in the default model it fires on the ice bear."""
    return str(example.NEURON) if model_name() == example.MODEL else "L0.ffn.0"


def named_store() -> Path:
    """Return the path of the index that was named, or else of the folder's store."""
    return Path(settings()["store"] or FOLDER_STORE)


def choice(site: str | None = None) -> IndexChoice:
    """Return what `choose_index` does for this model; of an index that was named, that it is read."""
    named = settings()["store"] is not None
    return IndexChoice(False) if named else choose_index(named_store(), model_name(), site)


def store_path(site: str | None = None) -> Path:
    """Return the path of the index that is read: the named one or the folder's; while that is missing or unfinished, or
    has fewer documents than the one that comes with icebear, the largest in the cache.

    site: whose neurons the index must have, if any index has them; else the path is of the named one.
    """
    if not choice(site).is_shipped and _has(named_store(), site):
        return named_store()
    paths = [path for path in all_visitors.cached_indexes(model_name()) if _has(path, site)]
    return paths[0] if paths else named_store()


def _has(path: Path, site: str | None) -> bool:
    facts = complete_facts(path)
    return bool(facts) and site in (None, *facts["sites"])


@contextmanager
def store(site: str | None = None) -> Iterator[Store]:
    """Open the index for this run of the script. Raises `StoreError` if there is none."""
    with open_store(store_path(site)) as opened:
        yield opened


def beside(opened: Store) -> AbstractContextManager[Store | None]:
    """Open the index that is shown beside another, as `open_beside` does."""
    return open_beside(opened.path, model_name(), settings()["store"] is not None)


def has_store(site: str | None = None) -> bool:
    """Return whether cards can be read. Raises `StoreError` if the named file is something else."""
    return _has(store_path(site), site)


def has_images() -> bool:
    """Return whether the index that is read is one of images. Raises `StoreError` as `has_store` does."""
    return complete_facts(store_path()).get("input") == IMAGES


def has_readable_store() -> bool:
    """Return whether there is an index that can be read; the views that need one report its errors."""
    with suppress(IcebearError):
        return has_store()
    return False
