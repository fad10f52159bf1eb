"""The SQLite file of a store: opening, transactions, errors and tables of JSON. schema.sql defines the tables."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from types import MappingProxyType
from typing import Any, TypeVar, cast

from sqlite_utils import Database

from icebear.db.terms import table
from icebear.errors import IcebearError, InputError, StoreError, too_many_files
from icebear.paths import check_pointer, existing, local, locked
from icebear.values import shown, text_of

VERSION = 13
"""The version of the tables."""
BEFORE_TERMS = 12
"""The version whose full-text search was of the texts as they are."""
OPENED = (BEFORE_TERMS, VERSION)
"""Stores of other versions must be built again."""
BUSY_SECONDS = 10.0
WRITE_ERRORS = {
    *(sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_DIR_FSYNC),
    *(sqlite3.SQLITE_IOERR_TRUNCATE, sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_SHMMAP),
}
"""SQLite's codes of writes that the system refuses, such as above a quota."""
LATE_INDEX = "CREATE INDEX examples_by_sentence ON examples (sentence)"
"""A scan drops this index while it writes its results."""
FACTS = {
    **dict.fromkeys(("model", "fingerprint", "dtype", "corpus", "content"), str),
    **dict.fromkeys(("k", "max_tokens", "seed", "shard", "tokens", "statistics_tokens"), int),
    **dict.fromkeys(("limit", "claimed_limit", "documents"), int | None),
    **dict.fromkeys(("sites", "center", "spread", "typical"), list),
    "encoder": dict | None,
    "digest": str,
    **{"ceilings": list | None, "counts": dict, "made_with": dict, "finished": bool, "gated": bool, "shipped": bool},
}
"""The fact of an index -> its type in JSON."""
UNEXPECTED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What Python raises at values of another form: JSON that is cut off, a number instead of a list, a missing row."""

Function = TypeVar("Function", bound=Callable[..., Any])


def reads(function: Function) -> Function:
    """Raise `StoreError` where a function of a store, or of its tables, meets what icebear did not write."""

    def values(tables: Any, *args: Any, **options: Any) -> Any:
        with getattr(tables, "file", tables).reading():
            return function(tables, *args, **options)

    def rows(tables: Any, *args: Any, **options: Any) -> Iterator[Any]:
        with getattr(tables, "file", tables).reading():
            yield from function(tables, *args, **options)

    return cast(Function, functools.wraps(function)(rows if inspect.isgeneratorfunction(function) else values))


def with_types(row: Iterable[Any], *kinds: Any) -> tuple[Any, ...]:
    """Return a row whose values have these types, which SQLite does not enforce. Raises `TypeError`."""
    values = tuple(row)
    for value, kind in zip(values, kinds, strict=True):
        if not isinstance(value, kind):
            raise TypeError(f"{shown(value)} is not of type {getattr(kind, '__name__', kind)}")
    return values


def json_list(text: str, kind: type) -> tuple[Any, ...]:
    """Return a list of values of one type from its JSON. Raises `TypeError` or `ValueError`."""
    (values,) = with_types([json.loads(text)], list)
    return with_types(values, *[kind] * len(values))


class SqliteFile:
    """The file of a store: opens it, writes in transactions and explains errors."""

    def __init__(self, path: str | Path, create: bool = False):
        self.path, self._create = local(path), create
        self._database: Database | None = None
        self.facts = JsonTable(self, "icebear", "{path} has no index yet; run icebear index --store {path}.", FACTS)
        if not create and os.path.lexists(self.path):
            self._open()

    @property
    def database(self) -> Database:
        """The open file; its first use makes a file that may be created. Raises `StoreError` if there is none."""
        if self._database is None:
            self._database = self._open()
        return self._database

    @property
    def has_terms(self) -> bool:
        """Whether the table of the full-text search has terms (`icebear.db.terms`)."""
        return _version(self.database) != BEFORE_TERMS

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a query; none if the file does not exist yet (the first write makes it).

        Raises `StoreError` if the file cannot be made, so that no work is lost.
        """
        if self._database is None and self._create and not os.path.lexists(self.path):
            try:
                with TemporaryFile(dir=self.path.absolute().parent):
                    return []
            except OSError:
                raise self._unwritable() from None
        return self.database.execute(query, values).fetchall()

    def _open(self) -> Database:
        try:
            size = existing(self.path, StoreError).stat().st_size
        except FileNotFoundError:
            size = None
        if not size and not self._create:  # SQLite would create the file
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
        if 0 < version < BEFORE_TERMS:
            raise StoreError(
                f"{self.path} was written by an older icebear; delete it, and build it again with: icebear "
                f"index --store {self.path}"
            )
        if version == 0:
            with self.writing():
                if _version(database) == 0:  # no other process was faster
                    _create_tables(database)
                    database.execute(f"PRAGMA user_version = {VERSION}")
        self._check_tables(database)

    def _check_tables(self, database: Database) -> None:
        """Raise `StoreError` for a table, index, view or trigger that icebear did not define, and for a missing one.

        A view in the place of a table could compute forever, and a trigger could change what is read.
        """
        actual, (needed, known) = _definitions(database), _defined(_version(database))
        for kind, name in {row[:2] for row in actual - known} or {row[:2] for row in needed - actual}:
            raise StoreError(
                f"{self.path} is not as icebear defines a store (see its {kind} {name}); restore a copy, or delete it "
                f"and build it again with: icebear index --store {self.path}"
            )

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
    def reading(self) -> Iterator[None]:
        """Raise `StoreError` for values that icebear did not write."""
        try:
            yield
        except sqlite3.Error as error:
            raise self.explain(error) from None
        except UNEXPECTED as error:
            raise StoreError(
                f"{self.path} has values that icebear did not write ({type(error).__name__}: {error}); restore a copy, "
                f"or delete it and build it again with: icebear index --store {self.path}"
            ) from error

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
        except UnicodeEncodeError as error:
            raise InputError(f"{shown(error.object)} is not valid UTF-8; give the text in UTF-8.") from None

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

    def explain(self, error: sqlite3.Error) -> StoreError:
        text, code = str(error), getattr(error, "sqlite_errorcode", 0)
        if "closed" in text:
            return StoreError(f"The store {self.path} is closed; open it again.")
        if "locked" in text or "busy" in text:
            return StoreError(f"Another process is writing to {self.path}; wait for it, or use another --store.")
        if "not a database" in text or "malformed" in text or "disk image" in text:
            check_pointer(self.path, StoreError)
            return StoreError(f"{self.path} is damaged or not a SQLite file; restore a copy or choose another --store.")
        if "full" in text or code in WRITE_ERRORS:
            return StoreError(f"The disk (or quota) of {self.path} is full; make room and run the same command again.")
        if "unable to open" in text and (too_many := _too_many_files()):
            return StoreError(str(too_many))
        if "readonly" in text or "unable to open" in text:
            return self._unwritable()
        return StoreError(f"{self.path} cannot be used ({text}); restore a copy, or choose another --store.")


def _too_many_files() -> IcebearError | None:
    """Return an error if this process cannot open three files more, which SQLite does not tell from other reasons."""
    try:
        with ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(open(os.devnull))
    except OSError as error:
        return too_many_files(error)
    return None


def _create_tables(database: Database, version: int = VERSION) -> None:
    for statement in Path(__file__).with_name("schema.sql").read_text().split(";\n"):
        database.execute(statement)
    if version == BEFORE_TERMS:
        database["sentences"].enable_fts(["text"], create_triggers=True)  # type: ignore[union-attr]
    else:
        database.execute(table("sentences_fts", content="sentences"))


@functools.cache
def _defined(version: int) -> tuple[set[tuple[str, ...]], set[tuple[str, ...]]]:
    """Return the definitions that a store has, and those that it may have (`ANALYZE` of SQLite adds some)."""
    database = Database(memory=True)
    _create_tables(database, version)
    needed = _definitions(database)
    database.execute(LATE_INDEX)
    database.execute("ANALYZE")
    return needed, _definitions(database)


def _definitions(database: Database) -> set[tuple[str, ...]]:
    """Return the kind, name and definition of each table, index, view and trigger, without quotes and spaces, which
    depend on versions, and without the columns that statistics of neurons add."""
    rows = database.execute("SELECT type, name, coalesce(sql, '') FROM sqlite_master")
    added = re.compile(r'(, "\w+")+\)$')
    return {(kind, name, re.sub(r'[\s"\[\]]', "", added.sub(")", sql)).lower()) for kind, name, sql in rows}


class JsonTable:
    def __init__(
        self, file: SqliteFile, table: str, missing: str = "", kinds: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """missing: the message of the `StoreError` for an unknown name; if empty, `get` returns None. kinds: name ->
        the type of its value, if that is not any."""
        self.file, self.table, self.missing, self.kinds = file, table, missing, kinds

    @reads
    def all(self) -> dict[str, Any]:
        rows = self.file.rows(f"SELECT name, value FROM {self.table} ORDER BY name")
        return {name: self._value(name, value) for name, value in rows}

    @reads
    def find(self, name: str) -> Any:
        """Return a value; None if there is none of this name, or the file is not there yet."""
        rows = self.file.rows(f"SELECT value FROM {self.table} WHERE name = ?", (text_of(name),))
        return self._value(name, rows[0][0]) if rows else None

    @reads
    def get(self, name: str) -> Any:
        query = f"SELECT value FROM {self.table} WHERE name = ?"
        row = self.file.database.execute(query, (text_of(name),)).fetchone()
        if row is None and self.missing:
            known = ", ".join(map(repr, self.all())) or "none"
            raise StoreError(self.missing.format(path=self.file.path, name=name, known=known))
        return row and self._value(name, row[0])

    def _value(self, name: str, text: str) -> Any:
        return with_types([json.loads(text)], self.kinds.get(name, object))[0]

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
