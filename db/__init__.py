"""The store: SQLite and FAISS, and search in it. Nothing in here imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from icebear.errors import IcebearError
from icebear.records import Neuron, Ranked

if TYPE_CHECKING:
    from db.store import Store, open_store

__all__ = ["IcebearError", "Neuron", "Ranked", "Store", "open_store"]


def __getattr__(name: str) -> Any:
    if name not in ("Store", "open_store"):
        raise AttributeError(f"module 'db' has no attribute {name!r}")
    from db import store

    return getattr(store, name)
