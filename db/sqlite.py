"""The SQLite file under a store: opening, migrations, transactions, errors."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from sqlite_utils import Database

from db.errors import StoreError
from db.schema import MIGRATIONS

BUSY_SECONDS = 10.0
"""How long to wait for another writer."""


class SqliteFile:
    """A store's file: opened, brought up to date, written in transactions, its troubles put into words."""

    def __init__(self, path: Path, create: bool = True):
        self.path = path
        if not create and not path.exists():
            raise StoreError(f"There is no store {path}; build one with: icebear index --store {path}")
        try:
            # Autocommit: `writing` says where a transaction begins and ends.
            connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
            self.database = Database(connection)
            self._migrate()
            connection.execute("PRAGMA foreign_keys = ON")
        except sqlite3.Error as error:
            raise self.explain(error) from None

    def close(self) -> None:
        self.database.conn.close()

    def _migrate(self) -> None:
        version = self.database.execute("PRAGMA user_version").fetchone()[0]
        if version > len(MIGRATIONS):
            raise StoreError(f"{self.path} was written by a newer icebear; update icebear to open it.")
        if version == 0 and self.database.table_names():
            raise StoreError(f"{self.path} is a SQLite file of something else; name another one with --store.")
        if version < len(MIGRATIONS):
            self.database.execute("PRAGMA journal_mode = WAL")
            with self.writing():
                for migrate in MIGRATIONS[version:]:
                    migrate(self.database)
                self.database.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """One transaction; rolled back after an exception. Raises `StoreError` when another process writes."""
        try:
            self.database.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                if self.database.conn.in_transaction:  # a full disk rolls back by itself
                    self.database.execute("ROLLBACK")
                raise
            self.database.execute("COMMIT")
        except sqlite3.Error as error:
            raise self.explain(error) from None

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Held by the one process that builds the index. Raises `StoreError` in a second one."""
        try:
            with FileLock(f"{self.path}.lock", timeout=0):
                yield
        except Timeout:
            raise self._busy() from None

    def _busy(self) -> StoreError:
        return StoreError(f"Another process is writing to {self.path}; wait for it, or use another --store.")

    def explain(self, error: sqlite3.Error) -> StoreError:
        text = str(error)
        if "locked" in text or "busy" in text:
            return self._busy()
        if "not a database" in text or "malformed" in text or "disk image" in text:
            return StoreError(f"{self.path} is no SQLite file or damaged; restore a copy or name another --store.")
        if "full" in text:
            return StoreError(f"The disk of {self.path} is full; make room and run the same command again.")
        if "readonly" in text or "unable to open" in text:
            return StoreError(f"{self.path} cannot be written here; check the folder, or name another --store.")
        return StoreError(f"{self.path} cannot be used ({text}).")
