"""Automatic labels with their scores, and what chance gives: the tables that `icebear.actmax.labels` fills."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from icebear.db.scan import ScanFile
from icebear.records import POLARITIES, Meaning, Neuron, Sentence, as_neuron
from icebear.values import one_of, several


class MeaningsFile(ScanFile):
    """The part of a store that keeps what neurons mean."""

    def sentences_from(self, start: int) -> Iterator[Sentence]:
        """All sentences in order of id, those from `start` on first: ids are hashes, so any run of them is a sample."""
        query = 'SELECT id, text, title, "start", "end", tokens FROM sentences WHERE id {} ? ORDER BY id'
        for condition in (">=", "<"):
            yield from map(_sentence, self.database.execute(query.format(condition), (start,)))

    def sentences(self, ids: Sequence[int]) -> dict[int, Sentence]:
        """id -> sentence."""
        query = (
            'SELECT id, text, title, "start", "end", tokens FROM sentences WHERE id IN (SELECT value FROM json_each(?))'
        )
        rows = self.database.execute(query, [json.dumps(list(ids))])
        return {row[0]: _sentence(row) for row in rows}

    def control(self, name: str) -> Any:
        """What was measured of chance under this name; None before."""
        row = self.database.execute("SELECT record FROM controls WHERE name = ?", (name,)).fetchone()
        return row and json.loads(row[0])

    def set_control(self, name: str, record: Any) -> None:
        with self.writing():
            self.database.execute("INSERT OR REPLACE INTO controls VALUES (?, ?)", (name, json.dumps(record)))

    def set_meanings(self, found: Iterable[Meaning]) -> None:
        """In place of those of the same neurons and polarities."""
        rows = [
            (
                *(m.neuron.layer, m.neuron.site, m.neuron.index, "+-".index(m.polarity)),
                *(m.kind, m.text, m.by, m.score, m.p, m.clear, json.dumps(m.record, ensure_ascii=False)),
            )
            for m in found
        ]
        with self.writing():
            self.database.conn.executemany(
                "INSERT OR REPLACE INTO meanings VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows
            )

    def meanings(self, neurons: Neuron | str | Iterable[Neuron | str]) -> dict[tuple[Neuron, str], Meaning]:
        """(neuron, polarity) -> its automatic label, of those that have one."""
        query = (
            "SELECT layer, site, idx, polarity, kind, text, by, score, p, clear, record FROM meanings "
            "WHERE layer = ? AND site = ? AND idx = ? ORDER BY polarity"
        )
        rows = (
            row
            for n in map(as_neuron, several(neurons))
            for row in self.database.execute(query, (n.layer, n.site, n.index))
        )
        return {(found.neuron, found.polarity): found for found in map(_meaning, rows)}

    def labelled(self) -> list[Meaning]:
        """All automatic labels, without their records."""
        query = "SELECT layer, site, idx, polarity, kind, text, by, score, p, clear, '{}' FROM meanings"
        return list(map(_meaning, self.database.execute(query)))

    def named(self, neuron: Neuron | str, polarity: str) -> str | None:
        """What somebody called the neuron, or its automatic label where that holds, with its score."""
        neuron, polarity = as_neuron(neuron), one_of(polarity, "polarity", (*POLARITIES, ""))
        row = self.database.execute(
            "SELECT text FROM labels JOIN neurons ON neuron = id WHERE layer = ? AND site = ? AND idx = ?",
            (neuron.layer, neuron.site, neuron.index),
        ).fetchone()
        if row:
            return row[0]
        found = self.meanings([neuron]).get((neuron, polarity))
        return found.badge if found and found.clear else None

    def clear_labels(self) -> list[tuple[int, str, str, float]]:
        """Neuron id, polarity, text and score of the automatic labels that hold, the best first."""
        rows = self.database.execute(
            "SELECT id, polarity, text, score FROM meanings JOIN neurons USING (layer, site, idx) WHERE clear "
            "ORDER BY score DESC, id, polarity"
        )
        return [(number, "+-"[polarity], text, score) for number, polarity, text, score in rows]


def _sentence(row: tuple) -> Sentence:
    number, text, title, start, end, tokens = row
    return Sentence(number, text, title, start, end, tuple(json.loads(tokens)))


def _meaning(row: tuple) -> Meaning:
    layer, site, idx, polarity, kind, text, by, score, p, clear, record = row
    neuron = Neuron(layer, site, idx)
    return Meaning(neuron, "+-"[polarity], kind, text, by, score, p, bool(clear), json.loads(record))
