"""A store: one SQLite file that any SQLite tool opens (see db/schema.sql for its tables)."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from icebear.db import search, vectors
from icebear.db.examples import ExampleTables, SentenceTables
from icebear.db.labels import LabelTables
from icebear.db.neurons import NeuronTables
from icebear.db.scan import ScanTables
from icebear.db.sqlite import JsonTable, SqliteFile
from icebear.errors import StoreError
from icebear.records import Example, Hit, Neuron, Projection
from icebear.values import one_of

NO_RESULT = ("icebear", "progress", "vectors", "sentences_fts", "sqlite_")
"""How the names of tables begin that say how the others came about; of `vectors` the files count."""


@contextmanager
def open_store(path: str | Path, create: bool = False) -> Iterator[Store]:
    """The store at `path`. Raises `StoreError` for something else.

    Where there is none, only `icebear.build_index` makes it; whatever reads raises, and makes nothing.
    create: its first use makes it.
    """
    store = Store(path, create)
    try:
        yield store
    except sqlite3.Error as error:
        raise store.explain(error) from None
    finally:
        store.close()


@contextmanager
def open_finished(path: str | Path, fingerprint: str, model_name: str) -> Iterator[Store]:
    """Open a store of this model whose scan is finished. Raises `StoreError` for another one."""
    with open_store(path) as store:
        store.check(fingerprint, model_name)
        store.facts.get("finished")
        yield store


class Store(SqliteFile):
    """One SQLite file; its tables are read and written by its parts. Readers may look on while one writer writes."""

    def __init__(self, path: str | Path, create: bool = False) -> None:
        super().__init__(path, create)
        self.controls = JsonTable(self, "controls")
        unknown = "{path} has no concept {name!r} (it has {known}); find it with icebear concept find."
        self.concepts = JsonTable(self, "concepts", unknown)
        self.sentences = SentenceTables(self)
        self.neurons = NeuronTables(self)
        self.example_tables = ExampleTables(self, self.neurons)
        self.vectors = vectors.VectorFiles(self, self.neurons)
        self.labels = LabelTables(self, self.neurons)
        self.scan = ScanTables(self, self.vectors)

    @property
    def by(self) -> str:
        """What its examples are the extremes of: ``activation`` or ``relevance``, whose signs its polarities are."""
        return self.facts.all().get("by", "activation")

    def examples(
        self, neuron: Neuron | str, polarity: str = "+", k: int | None = None, method: str = "attnlrp"
    ) -> list[Example]:
        """The maximally activating sentences of the neuron in this direction, the largest activation first.

        method: whose attributions come with them, where there are any.
        """
        return self.example_tables.of(neuron, polarity, k, method, self.by)

    def search(self, text: str, k: int = 20) -> list[Hit]:
        """The k neurons (with polarity) that best match `text`, each with the reasons, cosines in brackets.

        Two kinds of evidence count the same: what a neuron writes (the cosine between its W2 row and the unembedding
        of the words), and what drives it: how many of its examples contain the words, and the cosine between the mean
        vector of its examples and that of the sentences of the corpus that match the words best. (That mean finds
        neurons better than the model's vector of the bare words, which is far from that of any sentence.) A
        significant automatic label that has one of the words counts as much as either. Fused by reciprocal rank.
        In an index by relevance the polarity of examples is the sign of a relevance.
        """
        return search.by_words(self, text, k)

    def similar(self, neuron: Neuron | str, k: int = 10, by: str = "writes", polarity: str = "+") -> list[Hit]:
        """The k neurons nearest to this one at this polarity, each at the polarity that is near; the score is the
        cosine.

        by: ``writes`` (W2 rows), ``reads`` (W1 or gate rows), ``examples`` (mean vectors of their examples).
        A gate opens a neuron, but the sign of its activation is another matter: with a gated FFN in the index,
        ``reads`` has no polarity, and near is what points the same way.
        """
        return search.similar(self, neuron, k, by, polarity)

    def vocabulary(self, neuron: Neuron | str, k: int = 20) -> Projection:
        """The k tokens that the neuron promotes and suppresses, from the store alone (`icebear.project` has
        the model).

        The rows are kept in float16, so logits differ from the model's by some 0.1 %.
        """
        return search.vocabulary_projection(self, neuron, k)

    def check(self, fingerprint: str, name: str, dtype: str | None = None) -> None:
        """Raise `StoreError` if the index was made from another model, or in another dtype (None: it may be).

        What is written beside its numbers has to be of their dtype; to read them any will do.
        """
        facts = self.facts.all()
        if facts and dtype is not None and facts["dtype"] != dtype:
            own = facts["dtype"]
            raise StoreError(f"{self.path} is an index in {own}, not in {dtype}; use --dtype {own}.")
        if facts and facts["fingerprint"] != fingerprint:
            raise StoreError(f"{self.path} is an index of {facts['model']}, not of {name}; load that with --model.")

    def check_activations(self, fingerprint: str, name: str, dtype: str) -> None:
        """Raise `StoreError` where the index does not have extremes of this model's activations."""
        self.check(fingerprint, name, dtype)
        if self.by != "activation":
            raise StoreError(f"{self.path} is an index by {self.by}, not by activation; use another --store.")

    def made_with(self) -> dict[str, Any]:
        """What decides the numbers: model, versions, corpus, settings; JSON-ready."""
        facts = self.facts.all()
        provenance = facts.get("made_with") or {"model": {key: facts.get(key) for key in ("fingerprint", "dtype")}}
        settings = "corpus language limit content k by max_tokens seed tokens statistics_tokens".split()
        model = {"name": facts.get("model"), **provenance["model"]}
        return {**provenance, "model": model, "index": {key: facts[key] for key in settings if key in facts}}

    def count(self, table: str) -> int:
        """Rows of a table."""
        return self.database[one_of(table, "table", self.database.table_names())].count

    def changed(self) -> int:
        """When the file was last written, in nanoseconds."""
        log = self.path.with_name(self.path.name + "-wal")
        return max(path.stat().st_mtime_ns for path in (self.path, log) if path.exists())

    def checksum(self) -> str:
        """SHA-256 of all that was computed: the tables' rows, in key order, and the files of vectors.

        The same for the same model, corpus and settings, whatever the interruptions.
        """
        digest = hashlib.sha256()
        for table in self.database.tables:
            if not table.name.startswith(NO_RESULT):
                digest.update(table.name.encode())
                for row in self.database.execute(f"SELECT * FROM {table.name} ORDER BY {', '.join(table.pks)}"):
                    digest.update(repr(row).encode())
        for name in vectors.NAMES:
            with suppress(FileNotFoundError):
                digest.update(f"{name} {vectors.digest(self.vectors.path(name))}".encode())
        return digest.hexdigest()
