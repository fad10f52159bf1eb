"""`Tables`: an open store, table by table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from icebear.db.example_tables import ExampleTables, SentenceTables
from icebear.db.label_tables import LabelTables
from icebear.db.neuron_tables import NeuronTables
from icebear.db.scan_tables import ScanTables
from icebear.db.sqlite import JsonTable, SqliteFile, reads
from icebear.db.vectors import VectorFiles
from icebear.values import one_of


class Tables(SqliteFile):
    """An open store, table by table: a SQLite file and vector indexes next to it.

    Each attribute reads and writes some of the tables. Others can read while one process writes.
    """

    def __init__(self, path: str | Path, create: bool = False) -> None:
        super().__init__(path, create)
        self.controls = JsonTable(self, "controls")
        unknown = "{path} has no concept {name!r} (it has {known}); find it with icebear concept find."
        self.concepts = JsonTable(self, "concepts", unknown)
        self.sentences = SentenceTables(self)
        self.neurons = NeuronTables(self)
        self.example_tables = ExampleTables(self, self.neurons)
        self.vectors = VectorFiles(self, self.neurons)
        self.labels = LabelTables(self, self.neurons)
        self.scan = ScanTables(self, self.sentences, self.vectors)

    @reads
    def sentence_vectors(self, ids: Sequence[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids (S,) and vectors (S, D) that examples are compared by: of a sentence encoder if the index has
        them, else those of the model."""
        return self.sentences.vectors(ids, "embeddings" if self.facts.find("encoder") else "sentence_vectors")

    def check_finished(self) -> None:
        """Raise `StoreError` if the scan is not finished."""
        self.facts.get("finished")

    @reads
    def count(self, table: str) -> int:
        """Return the number of rows of a table."""
        return self.database[one_of(table, "table", self.database.table_names())].count
