"""Which index is read where no store is named: the folder's, or the one that comes with icebear."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from icebear.actmax.index.corpus import WIKI
from icebear.actmax.shipped.shipped_index import prepared_index, shipped_facts
from icebear.db.store import Store, documents_read, open_store, scan_facts

FOLDER_STORE = "icebear.db"
"""The store that is used where --store is not given."""
CORPUS = ("corpus", "language", "column", "content")
"""The facts of an index that identify its texts; a sample of them is the beginning of a larger one."""


class IndexChoice(NamedTuple):
    is_shipped: bool
    """Whether the index that comes with icebear is read, rather than the folder's store."""
    note: str = ""
    """Which of two indexes is read, and how to read the other; empty if there is no other."""


def choose_index(store: Path, model: str, site: str | None = None) -> IndexChoice:
    """Return which index is read for a model of this name: a folder's store, or the one that comes with icebear.

    The one that comes with icebear is read if the folder has none, or one of another model, or an unfinished one, or
    one of the same texts with fewer documents. Then the other one can be named. If the texts are others, the folder's
    is read, and cards and searches also have the sentences of the other (`index_beside`).

    Parameters
    ----------
    store
        Of the folder; it may be missing.
    model
    site
        The site whose neurons the index must have. If the one that comes with icebear lacks it, the folder's is read.

    Raises
    ------
    StoreError
        If the file is not a store.
    """
    shipped, facts = shipped_facts(model), scan_facts(store)
    if not shipped or not facts:
        return IndexChoice(bool(shipped))
    about_shipped = f"the {_shipped_name(shipped)}"
    if facts["fingerprint"] != shipped["fingerprint"]:
        ignored = f"Reading {about_shipped}: {store} is an index of {facts['model']}, not of {model}."
        return IndexChoice(True, ignored) if facts["model"] != model else IndexChoice(False)
    if site not in (None, *shipped["sites"]):
        return IndexChoice(False)
    if "finished" not in facts:
        return IndexChoice(True, f"Reading {about_shipped}: {store} is not finished; run icebear index again.")
    if has_same_texts(facts, shipped) and _documents(facts) < _documents(shipped):
        return IndexChoice(
            True, f"Reading {about_shipped}: {store} has fewer ({index_name(facts)}); to read it: --store {store}"
        )
    read = f"Reading {store} ({index_name(facts)})"
    if has_same_texts(facts, shipped):
        return IndexChoice(False, f"{read}, not {about_shipped}.")
    return IndexChoice(False, f"{read}; cards and searches also show {about_shipped}.")


def index_beside(store: Path, model: str) -> Path | None:
    """Return the path of the index that comes with icebear, if the index that is read is a folder's store of other
    texts, and the one that comes with icebear is prepared."""
    shipped, facts = shipped_facts(model), scan_facts(store)
    if not shipped or facts.get("shipped") or "finished" not in facts or has_same_texts(facts, shipped):
        return None
    is_folders = store.resolve() == Path(FOLDER_STORE).resolve() and facts["fingerprint"] == shipped["fingerprint"]
    return prepared_index(model) if is_folders else None


@contextmanager
def open_beside(store: Path, model: str, is_named: bool) -> Iterator[Store | None]:
    """Open the index that is shown beside the one that is read (`index_beside`); None if there is none.

    is_named: whether the user named the index that is read; then no other is shown."""
    path = None if is_named else index_beside(store, model)
    if path is None:
        yield None
        return
    with open_store(path) as other:
        yield other


def index_to_read(store: Path, model: str) -> Path:
    """Return the path of the index that is read where the user named none, and none is prepared for it: the one that
    comes with icebear, if `choose_index` says so and it is prepared, or else the folder's. Raises `StoreError` as
    `choose_index` does."""
    return (choose_index(store, model).is_shipped and prepared_index(model)) or store


def has_same_texts(facts: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    return all(facts.get(name) == others.get(name) for name in CORPUS)


def _documents(facts: Mapping[str, Any]) -> float:
    """Return how many documents an index has; a stream that was read to its end has more than any."""
    count = documents_read(facts)
    return float("inf") if count is None else count


def replacement(store: Path, model: str) -> str:
    """Say, after a store was made, which index is read in this folder now, and how to change that; empty for a store of
    another name, and where no index comes with icebear."""
    shipped = shipped_facts(model)
    if not shipped or store.resolve() != Path(FOLDER_STORE).resolve():
        return ""
    if not choose_index(store, model).is_shipped:
        is_beside = not has_same_texts(scan_facts(store), shipped)
        where = f"{'and beside it' if is_beside else 'instead of'} the {_shipped_name(shipped)}"
        back = f"to go back, move {store} to another folder."
        if is_beside:
            return f"In this folder cards and searches now show {store}, {where}; {back}"
        return f"In this folder {store} is now read {where}; {back}"
    return f"The {_shipped_name(shipped)} is larger, and is still read; to read yours: --store {store}"


def store_name(store: Store) -> str:
    """Return which index a store is, in a few words: "300 summaries, icebear.db"."""
    return named_index(store.facts.all(), store.path.name)


def named_index(facts: Mapping[str, Any], file: str) -> str:
    """Return what `store_name` does, from the facts of an index."""
    return f"{index_name(facts)}, {'shipped with icebear' if facts.get('shipped') else file}"


def index_name(facts: Mapping[str, Any]) -> str:
    """Return how many documents of which texts an index has: "300 summaries"."""
    count, of_corpus = documents_read(facts), f"{facts.get('input', 'documents')} of {facts['corpus']}"
    return f"{'all' if count is None else f'{count:,}'} {'summaries' if facts['corpus'] == WIKI else of_corpus}"


def _shipped_name(facts: Mapping[str, Any]) -> str:
    return f"index that comes with icebear ({index_name(facts)})"
