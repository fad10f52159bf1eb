"""The sentences of an index, their vectors, and the maximally activating examples."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from numbers import Real

import numpy as np

from icebear.db.neuron_tables import NeuronTables
from icebear.db.sqlite import SqliteFile, json_list, reads, with_types
from icebear.db.terms import table, terms
from icebear.records import POLARITIES, Example, Neuron, Sentence, as_neuron
from icebear.values import check_int, one_of, text_of

ATTENTION = "attention"
"""The method under which the attention of a head at the token of an example is saved."""
VECTOR_TABLES = ("sentence_vectors", "embeddings")
SENTENCE_COLUMNS = 'id, text, title, "start", "end", tokens'


class SentenceTables:
    """The tables `sentences`, `sentences_fts` and `sentence_vectors`, which a scan fills."""

    def __init__(self, file: SqliteFile) -> None:
        self.file = file

    def add(self, sentences: Iterable[Sentence]) -> None:
        """Save the sentences that are not there yet, and their terms."""
        new: dict[int, Sentence] = {}
        for sentence in sentences:
            new.setdefault(sentence.id, sentence)
        for known in self.of(list(new)):
            del new[known]
        rows = ((s.id, s.text, s.title, s.start, s.end, json.dumps(s.tokens, ensure_ascii=False)) for s in new.values())
        with self.file.writing():
            self.file.insert("sentences", rows)
            if self.file.has_terms:
                _add_terms(self.file, ((s.id, s.text) for s in new.values()))
            else:  # its triggers search by the texts; its temporary table is of the earlier ones
                self.file.database.execute("DROP TABLE IF EXISTS temp.sentences_fts")

    @reads
    def of(self, ids: Sequence[int]) -> dict[int, Sentence]:
        """Return id -> sentence."""
        query = f"SELECT {SENTENCE_COLUMNS} FROM sentences WHERE id IN (SELECT value FROM json_each(?))"
        rows = self.file.database.execute(query, [json.dumps(list(ids))])
        return {row[0]: _sentence(row) for row in rows}

    @reads
    def starting_at(self, start: int) -> Iterator[Sentence]:
        """Yield all sentences in order of id from `start` on, which is a random order because ids are hashes."""
        for condition in (">=", "<"):
            query = f"SELECT {SENTENCE_COLUMNS} FROM sentences WHERE id {condition} ? ORDER BY id"
            yield from map(_sentence, self.file.database.execute(query, (start,)))

    @reads
    def texts(self) -> Iterator[str]:
        """Yield the texts of all sentences."""
        yield from (text for (text,) in self.file.database.execute("SELECT text FROM sentences"))

    @reads
    def unread(self) -> list[str]:
        """Return the texts of the sentences without a counted token; of an index of images the files that are none."""
        query = "SELECT text FROM sentences WHERE id NOT IN (SELECT sentence FROM sentence_vectors) ORDER BY text"
        return [row[0] for row in self.file.database.execute(query)]

    @reads
    def matching(self, query: str, k: int) -> list[int]:
        """Return the ids of the k sentences that match the full-text query best."""
        prepare_search(self.file)
        rows = self.file.database.execute(
            "SELECT rowid FROM sentences_fts WHERE sentences_fts MATCH ? ORDER BY rank, rowid LIMIT ?", (query, k)
        )
        return [row[0] for row in rows]

    @reads
    def count(self, query: str) -> int:
        """Return how many sentences match the full-text query."""
        prepare_search(self.file)
        rows = self.file.database.execute("SELECT COUNT(*) FROM sentences_fts WHERE sentences_fts MATCH ?", (query,))
        return rows.fetchone()[0]

    @reads
    def vectors(
        self, ids: Sequence[int] | None = None, table: str = "sentence_vectors"
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids (S,) and vectors (S, D) of these sentences, or of all.

        table: ``sentence_vectors`` or ``embeddings``.
        """
        query = f"SELECT sentence, vector FROM {one_of(table, 'table', VECTOR_TABLES)}"
        if ids is not None:
            query += f" WHERE sentence IN ({', '.join('?' * len(ids))})"
        rows = self.file.database.execute(query, ids or ()).fetchall()
        if not rows:
            return np.zeros(0, dtype=np.int64), np.zeros((0, 0), dtype=np.float16)
        vectors = np.frombuffer(b"".join(vector for _, vector in rows), dtype=np.float16)
        return np.array([identity for identity, _ in rows], dtype=np.int64), vectors.reshape(len(rows), -1)

    def with_vectors(self) -> Iterator[tuple[Sentence, bytes]]:
        """Yield all sentences with their vectors (float16), empty where a sentence has none."""
        columns = ", ".join(f"s.{name.strip()}" for name in SENTENCE_COLUMNS.split(","))
        query = f"SELECT {columns}, v.vector FROM sentences s LEFT JOIN sentence_vectors v ON v.sentence = s.id"
        for *row, vector in self.file.database.execute(f"{query} ORDER BY s.id"):
            yield _sentence(row), vector or b""

    @reads
    def of_examples(self) -> list[int]:
        """Return the ids of the sentences that are examples."""
        rows = self.file.database.execute("SELECT DISTINCT sentence FROM examples ORDER BY sentence")
        return [row[0] for row in rows]

    @reads
    def without_embedding(self, encoder: str) -> list[int]:
        """Return the ids of the sentences that are examples and have no embedding by this encoder."""
        query = (
            "SELECT DISTINCT sentence FROM examples WHERE sentence NOT IN "
            "(SELECT sentence FROM embeddings WHERE encoder = ?) ORDER BY sentence"
        )
        return [row[0] for row in self.file.database.execute(query, (encoder,))]


def _sentence(row: Sequence) -> Sentence:
    number, text, title, start, end, tokens = with_types(row, int, str, str, int, int, str)
    if not text.strip():
        raise ValueError(f"sentence {number} has no text")
    return Sentence(number, text, title, start, end, json_list(tokens, str))


def _example(row: Sequence) -> Example:
    value, token, relevance, *sentence = row
    with_types((value, token), float, int)
    tokens = None if relevance is None else with_types([json.loads(relevance)["tokens"]], list)[0]
    example = Example(value, token, _sentence(sentence), tokens and with_types(tokens, *[Real] * len(tokens)))
    if not 0 <= token < len(example.sentence.tokens) == len(tokens or example.sentence.tokens):
        raise LookupError(f"sentence {example.sentence.id} has no token {token}")
    return example


def prepare_search(file: SqliteFile) -> None:
    """Make a temporary table of terms for a store of an earlier version, which has none: reading changes no store, and
    a reader may not be allowed to write. The temporary table hides the stored one of the same name."""
    database = file.database
    temporary = "SELECT 1 FROM sqlite_temp_master WHERE name = 'sentences_fts'"
    if file.has_terms or database.execute(temporary).fetchone():
        return
    database.execute("SAVEPOINT terms")
    try:
        database.execute(table("temp.sentences_fts", content=""))
        _add_terms(file, database.execute("SELECT id, text FROM sentences"))
    except BaseException:
        database.execute("ROLLBACK TO terms")
        raise
    finally:
        database.execute("RELEASE terms")


def _add_terms(file: SqliteFile, rows: Iterable[tuple[int, str]]) -> None:
    query = "INSERT INTO sentences_fts (rowid, text) VALUES (?, ?)"
    file.database.conn.executemany(query, ((identity, terms(text)) for identity, text in rows))


class ExampleTables:
    """The tables `examples`, which a scan fills, and `attributions`."""

    def __init__(self, file: SqliteFile, neurons: NeuronTables) -> None:
        self.file, self.neurons = file, neurons

    @reads
    def of(self, neuron: Neuron | str, polarity: str, k: int | None, method: str) -> list[Example]:
        """Return the examples of a neuron, see `Store.examples`."""
        method = ATTENTION if as_neuron(neuron).site == "head" else method
        rows = self.file.database.execute(
            f"SELECT activation, token, a.relevance, {SENTENCE_COLUMNS} "
            "FROM examples e JOIN sentences s ON s.id = e.sentence LEFT JOIN attributions a ON a.neuron = e.neuron "
            "AND a.polarity = e.polarity AND a.sentence = e.sentence AND a.method = ? "
            "WHERE e.neuron = ? AND e.polarity = ? ORDER BY rank LIMIT ?",
            (
                text_of(method),
                self.neurons.id(neuron),
                _polarity_number(polarity),
                -1 if k is None else check_int(k, "The number of examples"),
            ),
        )
        return [_example(row) for row in rows]

    @reads
    def columns(self, strongest: int = 1 << 30) -> np.recarray:
        """Return the examples (E,) with `key` (2 * neuron id + (polarity is -)), `rank`, `sentence`, `token` and
        `activation`, in order of key and rank; of each side so many of the strongest."""
        query = (
            "SELECT 2 * neuron + polarity, rank, sentence, token, activation FROM examples WHERE rank < ? "
            "ORDER BY neuron, polarity, rank"
        )
        types = [*((name, "i8") for name in ("key", "rank", "sentence", "token")), ("activation", "f8")]
        return np.fromiter(self.file.database.execute(query, [strongest]), dtype=types).view(np.recarray)

    @reads
    def matching(self, query: str, sides: int) -> np.ndarray:
        """Return the number of examples (sides,) that match the full-text query, at 2 * neuron id + (polarity is -)."""
        prepare_search(self.file)
        rows = self.file.database.execute(
            "SELECT 2 * neuron + polarity FROM examples WHERE sentence IN "
            "(SELECT rowid FROM sentences_fts WHERE sentences_fts MATCH ?)",
            (query,),
        )
        return np.bincount(np.fromiter((row[0] for row in rows), dtype=np.int64), minlength=sides)

    @reads
    def totals(self, sides: int) -> np.ndarray:
        """Return the number of examples (sides,), at 2 * neuron id + (polarity is -)."""
        rows = self.file.database.execute(
            "SELECT 2 * neuron + polarity, COUNT(*) FROM examples GROUP BY neuron, polarity"
        )
        totals = np.zeros(sides, dtype=np.int64)
        for side, count in rows:
            totals[side] = count
        return totals

    def add_attributions(self, method: str, rows: Iterable[tuple[Neuron | str, str, int, list[float], dict]]) -> None:
        """Save rows of neuron, polarity, sentence id, relevance of each token, conservation."""
        packed = []
        for neuron, polarity, sentence, tokens, conservation in rows:
            text = json.dumps({"tokens": [round(value, 6) for value in tokens], "conservation": conservation})
            packed.append((self.neurons.id(neuron), _polarity_number(polarity), sentence, method, text))
        self.file.insert("attributions", packed)


def _polarity_number(polarity: str) -> int:
    return POLARITIES.index(one_of(polarity, "polarity", POLARITIES))
