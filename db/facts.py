"""What an index was made of, and what was measured of it once."""

from __future__ import annotations

import json
from typing import Any

from icebear.db.sqlite import SqliteFile
from icebear.errors import StoreError


class FactTables:
    """The tables `icebear` and `controls`: JSON by name."""

    def __init__(self, file: SqliteFile) -> None:
        self.file = file

    def all(self) -> dict[str, Any]:
        """What the index was made of; empty before the first commit of a scan."""
        return {key: json.loads(value) for key, value in self.file.database.execute("SELECT key, value FROM icebear")}

    def get(self, key: str) -> Any:
        """One of these. Raises `StoreError` when there is no index yet."""
        facts = self.all()
        if key not in facts:
            raise StoreError(f"{self.file.path} has no index yet; run icebear index --store {self.file.path}.")
        return facts[key]

    def set(self, facts: dict[str, Any]) -> None:
        """Inside a transaction."""
        rows = [(key, json.dumps(value)) for key, value in facts.items()]
        self.file.database.conn.executemany("INSERT OR REPLACE INTO icebear VALUES (?, ?)", rows)

    def control(self, name: str) -> Any:
        """What was measured of the index under this name; None before."""
        row = self.file.database.execute("SELECT record FROM controls WHERE name = ?", (name,)).fetchone()
        return row and json.loads(row[0])

    def set_control(self, name: str, record: Any) -> None:
        with self.file.writing():
            self.file.database.execute("INSERT OR REPLACE INTO controls VALUES (?, ?)", (name, json.dumps(record)))
