"""The store: SQLite and FAISS, and search in it. Nothing in here imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icebear.public import public

if TYPE_CHECKING:
    from icebear.db.store import Store as Store
    from icebear.db.store import open_store as open_store
    from icebear.errors import IcebearError as IcebearError
    from icebear.records import Neuron as Neuron
    from icebear.records import Ranked as Ranked

__all__, __getattr__, __dir__ = public(
    __name__,
    {"icebear.db.store": "Store open_store", "icebear.errors": "IcebearError", "icebear.records": "Neuron Ranked"},
)
