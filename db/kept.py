"""Concepts that are kept: the tables that `icebear concept` fills."""

from __future__ import annotations

import json
from typing import Any

from icebear.db.meanings import MeaningsFile
from icebear.errors import StoreError
from icebear.records import Neuron

PART = ("weight", "mean", "std", "furthest")


class ConceptsFile(MeaningsFile):
    """The part of a store that keeps concepts, as the records of their files."""

    def set_concept(self, record: dict[str, Any]) -> None:
        """In place of one of the same name; all of it or nothing."""
        told = {key: record[key] for key in record if key not in ("name", "parts")}
        rows = []
        for part in record["parts"]:
            neuron = Neuron.parse(part["neuron"])
            place = (neuron.layer, neuron.site, neuron.index, "+-".index(part["polarity"]))
            rows.append((record["name"], *place, *(part[name] for name in PART)))
        told_as = json.dumps(told, ensure_ascii=False)
        with self.writing():
            self._remove(record["name"])
            self.database.execute("INSERT INTO concepts VALUES (?, ?)", (record["name"], told_as))
            self.database.conn.executemany("INSERT INTO concept_parts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)

    def _remove(self, name: str) -> None:
        self.database.execute("DELETE FROM concept_parts WHERE concept = ?", (name,))
        self.database.execute("DELETE FROM concepts WHERE name = ?", (name,))

    def concept(self, name: str) -> dict[str, Any]:
        """Its record. Raises `StoreError` for a name that it does not have."""
        row = self.database.execute("SELECT record FROM concepts WHERE name = ?", (name,)).fetchone()
        if row is None:
            known = ", ".join(map(repr, self.concepts())) or "none"
            raise StoreError(
                f"{self.path} has no concept {name!r} (it has {known}); find it with icebear concept find."
            )
        parts = self.database.execute(
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

    def concepts(self) -> list[str]:
        """Their names."""
        return [name for (name,) in self.database.execute("SELECT name FROM concepts ORDER BY name")]
