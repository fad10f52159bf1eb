"""The maximally activating examples of an index, and the relevance of their tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np

from icebear.db.facts import FactTables
from icebear.db.neurons import NeuronTables
from icebear.db.sentences import COLUMNS, sentence
from icebear.db.sqlite import SqliteFile
from icebear.records import POLARITIES, Example, Neuron
from icebear.values import one_of, whole


class ExampleTables:
    """The tables `examples`, which a scan fills, and `attributions`."""

    def __init__(self, file: SqliteFile, facts: FactTables, neurons: NeuronTables) -> None:
        self.file, self.facts, self.neurons = file, facts, neurons

    @property
    def by(self) -> str:
        """What they are the extremes of: ``activation`` or ``relevance``, whose signs their polarities are."""
        return self.facts.all().get("by", "activation")

    def of(self, neuron: Neuron | str, polarity: str, k: int | None, method: str) -> list[Example]:
        """See `Store.examples`."""
        rows = self.file.database.execute(
            f"SELECT activation, token, a.relevance, {COLUMNS} "
            "FROM examples e JOIN sentences s ON s.id = e.sentence LEFT JOIN attributions a ON a.neuron = e.neuron "
            "AND a.polarity = e.polarity AND a.sentence = e.sentence AND a.method = ? "
            "WHERE e.neuron = ? AND e.polarity = ? ORDER BY rank LIMIT ?",
            (
                method,
                self.neurons.id(neuron),
                _sign(polarity),
                -1 if k is None else whole(k, "The number of examples"),
            ),
        )
        by = self.by
        return [
            Example(value, token, sentence(row), tuple(json.loads(relevance)["tokens"]) if relevance else None, by)
            for value, token, relevance, *row in rows
        ]

    def keys(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each example 2 * neuron id + (polarity is -) (E,), ascending; sentence (E,); token position (E,)."""
        query = "SELECT 2 * neuron + polarity, sentence, token FROM examples ORDER BY neuron, polarity, rank"
        rows = np.fromiter(self.file.database.execute(query), dtype=np.dtype("i8, i8, i8"))
        return rows["f0"], rows["f1"], rows["f2"]

    def matching(self, query: str, k: int) -> list[tuple[int, str, int, int]]:
        """Neuron id, polarity, examples that match the full-text query (at least 2), examples; most first."""
        rows = self.file.database.execute(
            "SELECT neuron, polarity, COUNT(*) AS count FROM examples WHERE sentence IN "
            "(SELECT rowid FROM sentences_fts WHERE sentences_fts MATCH ?) "
            "GROUP BY neuron, polarity HAVING count > 1 ORDER BY count DESC, SUM(rank), neuron, polarity LIMIT ?",
            (query, k),
        ).fetchall()
        total = "SELECT COUNT(*) FROM examples WHERE neuron = ? AND polarity = ?"
        return [
            (neuron, "+-"[sign], count, self.file.database.execute(total, (neuron, sign)).fetchone()[0])
            for neuron, sign, count in rows
        ]

    def add_attributions(self, method: str, rows: Iterable[tuple[Neuron | str, str, int, list[float], dict]]) -> None:
        """Rows of neuron, polarity, sentence id, token relevances, conservation."""
        packed = [
            (
                self.neurons.id(neuron),
                _sign(polarity),
                sentence,
                method,
                json.dumps({"tokens": [round(value, 6) for value in tokens], "conservation": conservation}),
            )
            for neuron, polarity, sentence, tokens, conservation in rows
        ]
        with self.file.writing():
            self.file.database.conn.executemany("INSERT OR REPLACE INTO attributions VALUES (?, ?, ?, ?, ?)", packed)


def _sign(polarity: str) -> int:
    """0 for ``+``, 1 for ``-``."""
    return POLARITIES.index(one_of(polarity, "polarity", POLARITIES))
