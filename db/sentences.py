"""The sentences of an index, and the vectors of what the model made of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np

from icebear.db.sqlite import SqliteFile
from icebear.records import Sentence

COLUMNS = 'id, text, title, "start", "end", tokens'


class SentenceTables:
    """The tables `sentences` and `sentence_vectors`, which a scan fills."""

    def __init__(self, file: SqliteFile) -> None:
        self.file = file

    def of(self, ids: Sequence[int]) -> dict[int, Sentence]:
        """id -> sentence."""
        query = f"SELECT {COLUMNS} FROM sentences WHERE id IN (SELECT value FROM json_each(?))"
        rows = self.file.database.execute(query, [json.dumps(list(ids))])
        return {row[0]: sentence(row) for row in rows}

    def starting_at(self, start: int) -> Iterator[Sentence]:
        """All sentences in order of id, those from `start` on first: ids are hashes, so any run of them is a sample."""
        for condition in (">=", "<"):
            query = f"SELECT {COLUMNS} FROM sentences WHERE id {condition} ? ORDER BY id"
            yield from map(sentence, self.file.database.execute(query, (start,)))

    def tokens(self) -> Iterator[tuple[int, list[str]]]:
        """The ids of all sentences, ascending, and their tokens."""
        for identity, tokens in self.file.database.execute("SELECT id, tokens FROM sentences ORDER BY id"):
            yield identity, json.loads(tokens)

    def matching(self, query: str, k: int) -> list[int]:
        """The ids of the k sentences that match the full-text query best."""
        rows = self.file.database.execute(
            "SELECT rowid FROM sentences_fts WHERE sentences_fts MATCH ? ORDER BY rank, rowid LIMIT ?", (query, k)
        )
        return [row[0] for row in rows]

    def vectors(self, ids: Sequence[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The sentences (S,), all or those of `ids`, and the vectors (S, D) of what the model made of them."""
        query = "SELECT sentence, vector FROM sentence_vectors"
        if ids is not None:
            query += f" WHERE sentence IN ({', '.join('?' * len(ids))})"
        rows = self.file.database.execute(query, ids or ()).fetchall()
        if not rows:
            return np.zeros(0, dtype=np.int64), np.zeros((0, 0), dtype=np.float16)
        vectors = np.frombuffer(b"".join(vector for _, vector in rows), dtype=np.float16)
        return np.array([identity for identity, _ in rows], dtype=np.int64), vectors.reshape(len(rows), -1)


def sentence(row: Sequence) -> Sentence:
    """Of a row of `COLUMNS`."""
    number, text, title, start, end, tokens = row
    return Sentence(number, text, title, start, end, tuple(json.loads(tokens)))
