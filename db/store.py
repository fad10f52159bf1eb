"""A store: one SQLite file that any SQLite tool opens (see db/schema.py for its tables)."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from icebear.db.kept import ConceptsFile
from icebear.errors import StoreError
from icebear.records import (
    POLARITIES,
    Example,
    Hit,
    Meaning,
    Neuron,
    NeuronStatistics,
    Projection,
    Sentence,
    as_neuron,
)
from icebear.values import one_of, text_of, whole

if TYPE_CHECKING:
    from pandas import DataFrame


@contextmanager
def open_store(path: str | Path, create: bool = False) -> Iterator[Store]:
    """The store at `path`. Raises `StoreError` for something else.

    Where there is none, only `icebear.actmax.build_index` makes it; whatever reads raises, and makes nothing.
    create: its first use makes it.
    """
    store = Store(path, create)
    try:
        yield store
    except sqlite3.Error as error:
        raise store.explain(error) from None
    finally:
        store.close()


PLACE = "layer = ? AND site = ? AND idx = ?"


class Store(ConceptsFile):
    """Readers may look on while one writer writes."""

    def check(self, fingerprint: str, name: str, dtype: str | None = None) -> None:
        """Raise `StoreError` if the index was made from another model, or in another dtype (None: it may be).

        What is written beside its numbers has to be of their dtype; to read them any will do.
        """
        facts = self.facts()
        if facts and dtype is not None and facts["dtype"] != dtype:
            own = facts["dtype"]
            raise StoreError(f"{self.path} is an index in {own}, not in {dtype}; use --dtype {own}.")
        if facts and facts["fingerprint"] != fingerprint:
            raise StoreError(f"{self.path} is an index of {facts['model']}, not of {name}; load that with --model.")

    @property
    def by(self) -> str:
        """What its examples are the extremes of: ``activation`` or ``relevance``, whose signs its polarities are."""
        return self.facts().get("by", "activation")

    @property
    def gated(self) -> bool:
        """Whether it has neurons of a gated FFN: the sign of their activations is not that of what W1 reads."""
        return self.facts().get("gated", True)

    def made_with(self) -> dict[str, Any]:
        """What decides the numbers: model, versions, corpus, settings; JSON-ready."""
        facts = self.facts()
        given = facts.get("made_with") or {"model": {key: facts.get(key) for key in ("fingerprint", "dtype")}}
        asked = "corpus language limit content k by max_tokens seed tokens statistics_tokens".split()
        model = {"name": facts.get("model"), **given["model"]}
        return {**given, "model": model, "index": {key: facts[key] for key in asked if key in facts}}

    # --- reading ----------------------------------------------------------------------------------------

    def neuron_id(self, neuron: Neuron | str) -> int:
        """Its number in this index. Raises `StoreError` for a neuron that the index does not have."""
        neuron = as_neuron(neuron)
        place = (neuron.layer, neuron.site, neuron.index)
        row = self.database.execute(f"SELECT id FROM neurons WHERE {PLACE}", place).fetchone()
        if row is None:
            made = "it is empty" if not self.facts() else "it has other sites or layers, or its scan is not finished"
            raise StoreError(f"{self.path} does not have {neuron} ({made}); run icebear index --store {self.path}.")
        return row[0]

    def statistics(self, neuron: Neuron | str) -> NeuronStatistics:
        (row,) = self.database.query("SELECT * FROM neurons WHERE id = ?", (self.neuron_id(neuron),))
        numbers = {name: value for name, value in row.items() if name not in ("id", "layer", "site", "idx")}
        histogram = tuple(json.loads(numbers.pop("histogram")))
        known = {name: numbers.pop(name) for name in ("mean", "std", "min", "max", "positive")}
        return NeuronStatistics(as_neuron(neuron), **known, histogram=histogram, more=numbers)

    def statistic(self, neuron: Neuron | str, unit: str) -> float:
        """The ``max`` (largest magnitude) or ``std`` of a neuron, for edits in those units."""
        found = self.statistics(neuron)
        known = {"max": max(abs(found.max), abs(found.min)), "std": found.std}
        return known[one_of(unit, "statistic of a neuron", known)]

    def examples(
        self, neuron: Neuron | str, polarity: str = "+", k: int | None = None, method: str = "attnlrp"
    ) -> list[Example]:
        """The sentences that drive the neuron furthest in this direction, furthest first.

        method: whose attributions come with them, where there are any.
        """
        return self._examples(
            self.by,
            "FROM examples e JOIN sentences s ON s.id = e.sentence LEFT JOIN attributions a ON a.neuron = e.neuron "
            "AND a.polarity = e.polarity AND a.sentence = e.sentence AND a.method = ? "
            "WHERE e.neuron = ? AND e.polarity = ? ORDER BY rank LIMIT ?",
            method,
            self.neuron_id(neuron),
            _sign(polarity),
            -1 if k is None else whole(k, "The number of examples"),
        )

    def _examples(self, by: str, source: str, *arguments: Any) -> list[Example]:
        rows = self.database.execute(
            f'SELECT activation, token, s.id, text, title, "start", "end", tokens, a.relevance {source}', arguments
        )
        return [
            Example(
                value,
                token,
                Sentence(number, text, title, start, end, tuple(json.loads(tokens))),
                tuple(json.loads(relevance)["tokens"]) if relevance else None,
                by,
            )
            for value, token, number, text, title, start, end, tokens, relevance in rows
        ]

    def add_attributions(self, method: str, rows: Iterable[tuple[Neuron | str, str, int, list[float], dict]]) -> None:
        """Rows of neuron, polarity, sentence id, token relevances, conservation."""
        packed = [
            (
                self.neuron_id(neuron),
                _sign(polarity),
                sentence,
                method,
                json.dumps({"tokens": [round(value, 6) for value in tokens], "conservation": conservation}),
            )
            for neuron, polarity, sentence, tokens, conservation in rows
        ]
        with self.writing():
            self.database.conn.executemany("INSERT OR REPLACE INTO attributions VALUES (?, ?, ?, ?, ?)", packed)

    # --- search -----------------------------------------------------------------------------------------

    def sentence_vectors(self, ids: Sequence[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The sentences (S,), all or those of `ids`, and the vectors (S, D) of what the model made of them."""
        query = "SELECT sentence, vector FROM sentence_vectors"
        if ids is not None:
            query += f" WHERE sentence IN ({', '.join('?' * len(ids))})"
        rows = self.database.execute(query, ids or ()).fetchall()
        if not rows:
            return np.zeros(0, dtype=np.int64), np.zeros((0, 0), dtype=np.float16)
        vectors = np.frombuffer(b"".join(vector for _, vector in rows), dtype=np.float16)
        return np.array([sentence for sentence, _ in rows], dtype=np.int64), vectors.reshape(len(rows), -1)

    def example_keys(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each example 2 * neuron id + (polarity is -) (E,), ascending; sentence (E,); token position (E,)."""
        query = "SELECT 2 * neuron + polarity, sentence, token FROM examples ORDER BY neuron, polarity, rank"
        rows = np.fromiter(self.database.execute(query), dtype=np.dtype("i8, i8, i8"))
        return rows["f0"], rows["f1"], rows["f2"]

    def sentence_tokens(self) -> Iterator[tuple[int, list[str]]]:
        """The ids of all sentences, ascending, and their tokens."""
        for identity, tokens in self.database.execute("SELECT id, tokens FROM sentences ORDER BY id"):
            yield identity, json.loads(tokens)

    def largest(self) -> np.ndarray:
        """(N,) the largest activation of each neuron, in magnitude."""
        return np.array(self.database.execute("SELECT MAX(max, -min) FROM neurons ORDER BY id").fetchall())[:, 0]

    def set_classes(self, classes: Iterable[str]) -> None:
        """By 2 * neuron id + (polarity is -)."""
        with self.writing():
            self.database.execute("DELETE FROM classes")
            rows = ((number // 2, number % 2, kind) for number, kind in enumerate(classes))
            self.database.conn.executemany("INSERT INTO classes VALUES (?, ?, ?)", rows)

    def classes(self, neuron: Neuron | str) -> dict[str, str]:
        """polarity -> class, see actmax/index/classes.py."""
        query = "SELECT polarity, class FROM classes WHERE neuron = ? ORDER BY polarity"
        rows = self.database.execute(query, (self.neuron_id(neuron),))
        found = {"+-"[polarity]: kind for polarity, kind in rows}
        if not found:
            raise StoreError(f"The scan of {self.path} was interrupted at its end; run icebear index again.")
        return found

    def table(self) -> DataFrame:
        """A row a neuron: name, layer, site, index, statistics, classes at both signs, label.

        sharpness is how many standard deviations its extreme is from its mean.
        """
        import pandas

        query = (
            "SELECT name, layer, site, idx, mean, std, min, max, positive, p.class AS class_plus, "
            "m.class AS class_minus, text AS label FROM neuron_names "
            "LEFT JOIN classes p ON p.neuron = id AND p.polarity = 0 "
            "LEFT JOIN classes m ON m.neuron = id AND m.polarity = 1 LEFT JOIN labels l ON l.neuron = id ORDER BY id"
        )
        self.fact("finished")
        table = pandas.read_sql_query(query, self.database.conn)
        extreme = (table["max"] - table["mean"]).clip(lower=table["mean"] - table["min"])
        return table.assign(label=table["label"].fillna(""), sharpness=extreme / table["std"].clip(lower=1e-12))

    def changed(self) -> int:
        """When the file was last written, in nanoseconds."""
        log = self.path.with_name(self.path.name + "-wal")
        return max(path.stat().st_mtime_ns for path in (self.path, log) if path.exists())

    def search(self, text: str, k: int = 20) -> list[Hit]:
        """The neurons that know about `text`; see `icebear.db.search.search`."""
        from icebear.db.search import search

        return search(self, text, k)

    def similar(self, neuron: Neuron | str, k: int = 10, by: str = "writes", polarity: str = "+") -> list[Hit]:
        """The neurons nearest to this one; see `icebear.db.search.similar`."""
        from icebear.db.search import similar

        return similar(self, neuron, k, by, polarity)

    def by_chance(self, by: str) -> tuple[float, float]:
        """The median and the largest cosine between random neurons and the nearest to each."""
        found = self.control("nearest")
        if found is None:
            raise StoreError(f"The vectors of {self.path} are missing; run icebear index again to make them.")
        median, largest = found[by]
        return median, largest

    def vocabulary(self, neuron: Neuron | str, k: int = 20) -> Projection:
        """What the neuron promotes and suppresses; see `icebear.db.search.vocabulary`."""
        from icebear.db.search import vocabulary

        return vocabulary(self, neuron, k)

    def set_w2_norms(self, norms: Iterable[float]) -> None:
        """The lengths of the W2 rows, in order of neuron id."""
        with self.writing():
            self.database.execute("DELETE FROM w2_norms")
            self.database.conn.executemany("INSERT INTO w2_norms VALUES (?, ?)", enumerate(norms))

    def set_typical(self, spreads: Sequence[tuple[float, float] | None]) -> None:
        """By layer: `Projection.typical`."""
        with self.writing():
            self._set_facts({"typical": spreads})

    def typical(self, layer: int) -> tuple[float, float] | None:
        layer, spreads = whole(layer, "A layer", 0), self.facts().get("typical")
        found = spreads[whole(layer, "A layer of the index", 0, len(spreads) - 1)] if spreads else None
        return found and tuple(found)

    def w2_norm(self, neuron: Neuron | str) -> float:
        query = "SELECT norm FROM w2_norms WHERE neuron = ?"
        row = self.database.execute(query, (self.neuron_id(neuron),)).fetchone()
        if row is None:
            raise StoreError(f"The vectors of {self.path} are missing; run icebear index again to make them.")
        return row[0]

    def centre(self) -> np.ndarray:
        """(D,) the mean vector of all sentences."""
        return np.array(self.fact("centre"), dtype=np.float32)

    def set_centre(self, vector: np.ndarray) -> None:
        with self.writing():
            self._set_facts({"centre": vector.tolist()})

    def matching(self, query: str, k: int) -> list[int]:
        """The ids of the k sentences that match the full-text query best."""
        rows = self.database.execute(
            "SELECT rowid FROM sentences_fts WHERE sentences_fts MATCH ? ORDER BY rank, rowid LIMIT ?", (query, k)
        )
        return [row[0] for row in rows]

    def neurons(self, identities: Iterable[int]) -> dict[int, Neuron]:
        """id -> neuron."""
        query = "SELECT layer, site, idx FROM neurons WHERE id = ?"
        return {identity: Neuron(*self.database.execute(query, (identity,)).fetchone()) for identity in identities}

    def all_neurons(self) -> list[Neuron]:
        """Those of the index, in order of layer."""
        rows = self.database.execute("SELECT layer, site, idx FROM neurons ORDER BY layer, site, idx")
        return [Neuron(*row) for row in rows]

    def set_tokens(self, texts: Iterable[str]) -> None:
        """The model's vocabulary, in order of token id."""
        with self.writing():
            self.database.execute("DELETE FROM tokens")
            self.database.conn.executemany("INSERT INTO tokens VALUES (?, ?)", enumerate(texts))

    def token_ids(self, texts: Iterable[str]) -> list[int]:
        """The ids of those texts that are one token."""
        query = "SELECT id FROM tokens WHERE text = ?"
        return sorted(row[0] for text in set(texts) for row in self.database.execute(query, (text,)))

    def token_texts(self, ids: Iterable[int]) -> list[str]:
        query = "SELECT text FROM tokens WHERE id = ?"
        return [self.database.execute(query, (token,)).fetchone()[0] for token in ids]

    def neurons_driven_by(self, query: str, k: int) -> list[tuple[int, str, int, int]]:
        """Neuron id, polarity, examples that match the full-text query (at least 2), examples; most first."""
        rows = self.database.execute(
            "SELECT neuron, polarity, COUNT(*) AS count FROM examples WHERE sentence IN "
            "(SELECT rowid FROM sentences_fts WHERE sentences_fts MATCH ?) "
            "GROUP BY neuron, polarity HAVING count > 1 ORDER BY count DESC, SUM(rank), neuron, polarity LIMIT ?",
            (query, k),
        ).fetchall()
        total = "SELECT COUNT(*) FROM examples WHERE neuron = ? AND polarity = ?"
        return [
            (neuron, "+-"[sign], count, self.database.execute(total, (neuron, sign)).fetchone()[0])
            for neuron, sign, count in rows
        ]

    # --- labels of one's own ----------------------------------------------------------------------------

    def label(self, neuron: Neuron | str) -> str | None:
        """What somebody called the neuron."""
        identity = self.neuron_id(neuron)
        row = self.database.execute("SELECT text FROM labels WHERE neuron = ?", (identity,)).fetchone()
        return row[0] if row else None

    def label_scores(self, neuron: Neuron | str) -> dict[str, dict[str, Any]]:
        """polarity -> how well that holds (`Meaning.to_dict`), if it was measured."""
        identity = self.neuron_id(neuron)
        row = self.database.execute("SELECT scores FROM labels WHERE neuron = ?", (identity,)).fetchone()
        return {found["polarity"]: found for found in json.loads(row[0])} if row else {}

    def set_label(self, neuron: Neuron | str, text: str, scores: Sequence[Meaning] = ()) -> None:
        """Call the neuron `text`; an empty text removes its label. scores: how well it holds, if that was measured."""
        identity, text = self.neuron_id(neuron), text_of(text)
        with self.writing():
            self.database.execute("DELETE FROM labels WHERE neuron = ?", (identity,))
            if text.strip():
                told = json.dumps([meaning.to_dict() for meaning in scores])
                self.database.execute("INSERT INTO labels VALUES (?, ?, ?)", (identity, text.strip(), told))

    def count(self, table: str) -> int:
        return self.database[one_of(table, "table", self.database.table_names())].count


def _sign(polarity: str) -> int:
    """0 for ``+``, 1 for ``-``."""
    return POLARITIES.index(one_of(polarity, "polarity", POLARITIES))
