"""The tables that a scan writes: facts, shards, the running summary and the results."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from icebear.db.example_tables import SentenceTables
from icebear.db.sqlite import LATE_INDEX, SqliteFile, reads
from icebear.db.vectors import LENS, NAMES, VectorFiles
from icebear.errors import StoreError
from icebear.records import Sentence

NOT_COMPARED = ("model", "corpus", "claimed_limit", "order")
"""Facts that may be written in other ways; a path has many spellings, but one fingerprint or content."""
MADE_OF_RESULTS = ("examples", "meanings", "controls", "vectors", "vectors_null")


class ScanTables:
    """Facts are saved with the first commit of shards; results change in one transaction at the end."""

    def __init__(self, file: SqliteFile, sentences: SentenceTables, vectors: VectorFiles) -> None:
        self.file, self.sentences, self.vectors = file, sentences, vectors

    @reads
    def finished_with(self, facts: dict[str, Any]) -> bool:
        """Return whether the index has these facts and is finished; False if a scan can start or continue.

        Raises `StoreError` if the index has other facts, or more documents of the corpus. Writes nothing.
        """
        have, path = self.file.facts.all(), self.file.path
        if not have:
            return False
        if have["corpus"] == facts["corpus"] and have["content"] != facts["content"]:
            raise StoreError(f"{path} was built when {have['corpus']} had other content; use another --store.")
        for key in facts:
            if key not in NOT_COMPARED and have.get(key) != facts[key]:
                name = "corpus" if key == "content" else key
                raise StoreError(
                    f"{path} was built with {name} {have.get(name)!r}, not {facts[name]!r}; use "
                    f"{name} {have.get(name)!r}, or another --store."
                )
        claimed, limit = have["claimed_limit"], facts["claimed_limit"]
        if limit is not None and (claimed is None or limit < claimed):
            raise StoreError(
                f"{path} was built with {'no limit' if claimed is None else f'the limit {claimed}'}, not {limit}, and "
                "a scan cannot remove documents; use the same limit again, or another --store."
            )
        if have["order"] != facts["order"]:
            raise StoreError(
                f"{path} has {claimed} drawn documents, and a scan without a limit reads them in another order; give a "
                "larger limit, or another --store."
            )
        return "finished" in have and have["limit"] == limit

    @reads
    def shards(self) -> dict[int, int]:
        return dict(self.file.rows("SELECT number, sentences FROM shards"))

    @reads
    def progress(self) -> dict[str, bytes]:
        return dict(self.file.rows("SELECT part, packed FROM progress"))

    def commit(
        self, shards: dict[int, list[tuple[Sentence, bytes]]], progress: dict[str, bytes], facts: dict[str, Any]
    ) -> None:
        """Save shards of sentences with their vectors (float16), the running summary and the facts, in one transaction.

        A shard that was committed before is replaced; its sentences are among the new ones.
        """
        with suppress(sqlite3.Error):  # if others are reading
            self.file.database.execute("PRAGMA journal_mode = WAL").fetchone()  # so that others can read
        rows = [row for shard in shards.values() for row in shard]
        with self.file.writing():
            self.file.facts.set(facts)
            self.file.insert("shards", ((number, len(shards[number])) for number in shards))
            self.sentences.add(sentence for sentence, _ in rows)
            self.file.insert("sentence_vectors", ((s.id, vector) for s, vector in rows if vector))
            # In another batch the top token may differ, by rounding.
            query = "DELETE FROM attributions WHERE sentence IN (SELECT value FROM json_each(?))"
            self.file.database.execute(query, [json.dumps([s.id for s, _ in rows])])
            self.file.insert("progress", progress.items())

    def finish(self, statistics: dict[str, Sequence[Any]], examples: Iterable[tuple], facts: dict[str, Any]) -> None:
        """Save the results in one transaction; they replace those of a smaller limit.

        statistics: columns of the table of neurons; missing columns are added.
        The running summary is deleted if the scan had no limit: it takes about 1,500 bytes per neuron (k = 32).
        """
        for name in (*NAMES, LENS):  # of earlier results
            self.vectors.path(name).unlink(missing_ok=True)
        with self.file.foreign_keys_unchecked(), self.file.writing():
            # Faster than to update it row by row.
            self.file.database.execute("DROP INDEX IF EXISTS examples_by_sentence")
            for table in (*MADE_OF_RESULTS, *(["progress"] if facts["limit"] is None else [])):
                self.file.database.execute(f"DELETE FROM {table}")
            have = {column.name for column in self.file.database["neurons"].columns}
            for name in [name for name in statistics if name not in have]:
                self.file.database.execute(f'ALTER TABLE neurons ADD COLUMN "{name}"')
            names = ", ".join(f'"{name}"' for name in statistics)
            query = f"INSERT OR REPLACE INTO neurons ({names}) VALUES ({', '.join('?' * len(statistics))})"
            self.file.database.conn.executemany(query, zip(*statistics.values(), strict=True))
            self.file.insert("examples", examples)
            self.file.database.execute(LATE_INDEX)
            self.file.facts.set(facts)
        with suppress(sqlite3.Error):  # without disk space for a copy the file keeps its size
            self.file.database.execute("VACUUM")  # deleted rows took as much space as the results
        self.close_log()

    def close_log(self) -> bool:
        """Leave one file: one in WAL mode cannot be read where it cannot be written. Return whether it did."""
        try:
            mode = self.file.database.execute("PRAGMA journal_mode = DELETE").fetchone()
        except sqlite3.Error:  # others are reading
            return False
        return mode == ("delete",)

    def passed_over(self, limit: int) -> dict[str, int]:
        """Return how many sentences have no counted token, and how many were truncated at `limit` tokens."""
        query = (
            "SELECT COUNT(*) - (SELECT COUNT(*) FROM sentence_vectors), "
            "COALESCE(SUM(json_array_length(tokens) >= ?), 0) FROM sentences"
        )
        without, cut = self.file.database.execute(query, (limit,)).fetchone()
        return {"without tokens": without, f"cut at {limit} tokens": cut}
