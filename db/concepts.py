"""Concepts that are kept: the tables that `icebear concept` fills."""

from __future__ import annotations

import json
from typing import Any

from icebear.db.sqlite import SqliteFile
from icebear.errors import StoreError
from icebear.records import Neuron

PART = ("weight", "mean", "std", "furthest")


class ConceptTables:
    """The part of a store that keeps concepts, as the records of their files."""

    def __init__(self, file: SqliteFile) -> None:
        self.file = file

    def set(self, record: dict[str, Any]) -> None:
        """In place of one of the same name; all of it or nothing."""
        name, rows = record["name"], []
        for part in record["parts"]:
            neuron = Neuron.parse(part["neuron"])
            place = (neuron.layer, neuron.site, neuron.index, "+-".index(part["polarity"]))
            rows.append((name, *place, *(part[number] for number in PART)))
        rest = json.dumps({key: record[key] for key in record if key not in ("name", "parts")}, ensure_ascii=False)
        database = self.file.database
        with self.file.writing():
            database.execute("DELETE FROM concept_parts WHERE concept = ?", (name,))
            database.execute("INSERT OR REPLACE INTO concepts VALUES (?, ?)", (name, rest))
            database.conn.executemany("INSERT INTO concept_parts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)

    def get(self, name: str) -> dict[str, Any]:
        """Its record. Raises `StoreError` for a name that the store does not have."""
        row = self.file.database.execute("SELECT record FROM concepts WHERE name = ?", (name,)).fetchone()
        if row is None:
            known = ", ".join(map(repr, self.names())) or "none"
            raise StoreError(
                f"{self.file.path} has no concept {name!r} (it has {known}); find it with icebear concept find."
            )
        parts = self.file.database.execute(
            "SELECT layer, site, idx, polarity, weight, mean, std, furthest FROM concept_parts WHERE concept = ? "
            "ORDER BY weight DESC, layer, site, idx",
            (name,),
        )
        rows = [
            {
                "neuron": str(Neuron(layer, site, idx)),
                "polarity": "+-"[polarity],
                **dict(zip(PART, numbers, strict=True)),
            }
            for layer, site, idx, polarity, *numbers in parts
        ]
        return {"name": name, "parts": rows, **json.loads(row[0])}

    def names(self) -> list[str]:
        return [name for (name,) in self.file.database.execute("SELECT name FROM concepts ORDER BY name")]
