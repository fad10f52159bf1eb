"""The SQLite file of a store: opening, transactions, errors and tables of JSON. schema.sql defines the tables."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from icebear.errors import StoreError
from icebear.paths import existing, local, locked

VERSION = 9
"""The version of the tables; a store of another version must be built again."""
BUSY_SECONDS = 10.0


class SqliteFile:
    """The file of a store: opens it, writes in transactions and explains errors."""

    def __init__(self, path: str | Path, create: bool = False):
        self.path, self._create = local(path), create
        self._database: Database | None = None
        self.facts = JsonTable(self, "icebear", "{path} has no index yet; run icebear index --store {path}.")
        if not create and os.path.lexists(self.path):
            self._open()

    @property
    def database(self) -> Database:
        """The open file; its first use makes a file that may be created. Raises `StoreError` if there is none."""
        if self._database is None:
            self._database = self._open()
        return self._database

    def _open(self) -> Database:
        try:
            size = existing(self.path, StoreError).stat().st_size
        except FileNotFoundError:
            size = None
        if not size and not self._create:  # SQLite would create one
            what = f"There is no store {self.path}" if size is None else f"{self.path} is an empty file, not a store"
            raise StoreError(f"{what}; build a store with: icebear index --store {self.path}")
        try:
            self._database = database = self._opened()
            self._check_version(database)
            database.execute("PRAGMA foreign_keys = ON")
            return database
        except sqlite3.Error as error:
            raise self.explain(error) from None

    def _opened(self) -> Database:
        """Open the file; if it is in WAL mode and nothing can be written, open it as immutable.

        A store is in WAL mode during a scan. Even reading then needs to write files next to it.
        """
        # An absolute path, because SQLite gives :memory: and file:... another meaning.
        database = _connected(str(self.path.absolute()))
        try:
            database.execute("PRAGMA user_version").fetchone()
        except sqlite3.OperationalError as error:
            log = self.path.with_name(f"{self.path.name}-wal")
            left = log.exists() and log.stat().st_size > 0  # changes that are not in the file yet
            if left or error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
                raise
            database.conn.close()
            return _connected(f"{self.path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
        return database

    def _check_version(self, database: Database) -> None:
        tables = database.table_names()  # first, because another process may be creating them
        version = _version(database)
        if version > VERSION:
            raise StoreError(f"{self.path} was written by a newer icebear; update icebear to open it.")
        if version == 0 and (tables or not self._create):
            raise StoreError(f"{self.path} is a SQLite file, but not a store of icebear; choose another --store.")
        if 0 < version < VERSION:
            raise StoreError(
                f"{self.path} was written by an older icebear; delete it, and build it again with: icebear "
                f"index --store {self.path}"
            )
        if version == 0:
            with self.writing():
                if _version(database) == 0:  # no other process was faster
                    for statement in Path(__file__).with_name("schema.sql").read_text().split(";\n"):
                        database.execute(statement)
                    database["sentences"].enable_fts(["text"], create_triggers=True)  # type: ignore[union-attr]
                    database.execute(f"PRAGMA user_version = {VERSION}")

    def insert(self, table: str, rows: Iterable[tuple], conflict: str = "REPLACE") -> None:
        """Insert rows that have all columns of the table."""
        marks = ", ".join("?" * len(self.database[table].columns))
        with self.writing():
            self.database.conn.executemany(f"INSERT OR {conflict} INTO {table} VALUES ({marks})", rows)

    def refill(self, table: str, rows: Iterable[tuple]) -> None:
        with self.writing():
            self.database.execute(f"DELETE FROM {table}")
            self.insert(table, rows)

    def close(self) -> None:
        if self._database is not None:
            self._database.conn.close()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Run a transaction, or continue an open one; roll it back after an exception.

        Raises `StoreError` if another process writes.
        """
        if self.database.conn.in_transaction:
            yield
            return
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
    def foreign_keys_unchecked(self) -> Iterator[None]:
        """For many rows, whose keys are known to be there: checks take a third of the time."""
        self.database.execute("PRAGMA foreign_keys = OFF")
        try:
            yield
        finally:
            self.database.execute("PRAGMA foreign_keys = ON")

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Lock the store for the one process that builds the index. Raises `StoreError` at once if it is locked."""
        with locked(self.path, StoreError):
            self._create = True
            yield

    def _unwritable(self) -> StoreError:
        return StoreError(f"{self.path} cannot be written; check the folder, or choose another --store.")

    def _busy(self) -> StoreError:
        return StoreError(f"Another process is writing to {self.path}; wait for it, or use another --store.")

    def explain(self, error: sqlite3.Error) -> StoreError:
        text = str(error)
        if "locked" in text or "busy" in text:
            return self._busy()
        if "not a database" in text or "malformed" in text or "disk image" in text:
            return StoreError(f"{self.path} is damaged or not a SQLite file; restore a copy or choose another --store.")
        if "full" in text:
            return StoreError(f"The disk of {self.path} is full; make room and run the same command again.")
        if "readonly" in text or "unable to open" in text:
            return self._unwritable()
        return StoreError(f"{self.path} cannot be used ({text}); restore a copy, or choose another --store.")


class JsonTable:
    def __init__(self, file: SqliteFile, table: str, missing: str = "") -> None:
        """missing: the message of the `StoreError` for an unknown name; if empty, `get` returns None."""
        self.file, self.table, self.missing = file, table, missing

    def all(self) -> dict[str, Any]:
        rows = self.file.database.execute(f"SELECT name, value FROM {self.table} ORDER BY name")
        return {name: json.loads(value) for name, value in rows}

    def get(self, name: str) -> Any:
        row = self.file.database.execute(f"SELECT value FROM {self.table} WHERE name = ?", (name,)).fetchone()
        if row is None and self.missing:
            known = ", ".join(map(repr, self.all())) or "none"
            raise StoreError(self.missing.format(path=self.file.path, name=name, known=known))
        return row and json.loads(row[0])

    def set(self, values: dict[str, Any]) -> None:
        rows = ((name, json.dumps(value, ensure_ascii=False)) for name, value in values.items())
        self.file.insert(self.table, rows)


def _connected(where: str, uri: bool = False) -> Database:
    """Connect in autocommit mode, because `writing` begins and ends transactions."""
    return Database(
        sqlite3.connect(where, uri=uri, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    )


def _version(database: Database) -> int:
    return database.execute("PRAGMA user_version").fetchone()[0]
