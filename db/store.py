"""The store: a SQLite file that any SQLite tool can open (db/schema.sql defines the tables)."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from icebear.db import search, vectors
from icebear.db.sqlite import reads
from icebear.db.tables import Tables
from icebear.errors import StoreError
from icebear.records import IMAGES, Example, Hit, Neuron, Projection

NO_RESULT = ("icebear", "progress", "vectors", "sentences_fts", "sqlite_")
"""Prefixes of tables that do not count for the checksum; of `vectors` the files count."""
RESULTS = {
    "icebear": "name <> 'digest'",
    "controls": " AND ".join(f"name NOT LIKE '{beginning}%'" for beginning in ("topics", "labels", "descriptions")),
    **dict.fromkeys(("shards", "sentences", "sentences_fts_data", "sentences_fts_docsize", "neurons", "examples"), "1"),
    "embeddings": "1",
    **dict.fromkeys(("tokens", "w_out_norms", "vectors", "vectors_null"), "1"),
}
"""The tables that nobody changes after a scan -> the condition for their rows; other controls are of labels."""


@contextmanager
def open_store(path: str | Path, create: bool = False) -> Iterator[Store]:
    """Open a store and close it at the end.

    A missing store is made by `icebear.build_index` only; reading raises an error and makes nothing.

    Parameters
    ----------
    path : str or Path
        The SQLite file.
    create : bool
        Whether the first use makes a missing file.

    Yields
    ------
    Store

    Raises
    ------
    StoreError
        If the file is missing, damaged, locked, or not a store of this version.
    """
    store = Store(path, create)
    try:
        yield store
    except sqlite3.Error as error:
        raise store.explain(error) from None
    finally:
        store.close()


@contextmanager
def open_without_model(path: str | Path, model_name: str) -> Iterator[Store]:
    """Open a store of a model of this name whose scan is finished, without the model. Raises `StoreError` otherwise."""
    with open_store(path) as store:
        store.check_finished()
        if store.facts.get("model") != model_name:
            raise StoreError(
                f"{path} is an index of {store.facts.get('model')}, not of {model_name}; use another --store."
            )
        yield store


@contextmanager
def open_finished(path: str | Path, fingerprint: str, model_name: str) -> Iterator[Store]:
    """Open a store of this model whose scan is finished. Raises `StoreError` otherwise."""
    with open_store(path) as store:
        store.check(fingerprint, model_name)
        store.check_finished()
        yield store


def complete_facts(path: Path) -> dict[str, Any]:
    """Return the facts of a complete index, or nothing. Raises `StoreError` if the file is something else."""
    if not path.exists():
        return {}
    with open_store(path) as store:
        return store.facts.all() if store.is_complete else {}


def scan_facts(path: Path) -> dict[str, Any]:
    """Return the facts of an index, also of an unfinished one, or nothing. Raises `StoreError` if the file is something
    else."""
    if not path.exists():
        return {}
    with open_store(path) as store:
        return store.facts.all() if store.scan.shards() else {}


def documents_read(facts: Mapping[str, Any]) -> int | None:
    """Return how many documents an index holds, if that is known."""
    limit, size = facts.get("limit"), facts.get("documents")
    return min((number for number in (limit, size) if number is not None), default=None)


class Store(Tables):
    """An index of neurons: its tables, checks and searches."""

    @property
    @reads
    def is_complete(self) -> bool:
        """Whether the scan is finished, with vectors and then their nulls."""
        return "finished" in self.facts.all() and self.controls.get("nearest") is not None

    @property
    @reads
    def is_of_images(self) -> bool:
        """Whether the sentences are images: the text is a file's name in the folder that is the corpus, the title its
        digest, and the tokens are its patches."""
        return self.facts.find("input") == IMAGES

    def check_texts(self, what: str) -> None:
        """Raise `StoreError` for an index of images. what: needs texts, in words that begin a sentence."""
        if self.is_of_images:
            raise StoreError(f"{what}, and {self.path} is an index of images; use an index of texts.")

    @reads
    def examples(
        self, neuron: Neuron | str, polarity: str = "+", k: int | None = None, method: str | None = None
    ) -> list[Example]:
        """Return the maximally activating sentences of a neuron, the largest activation first.

        Parameters
        ----------
        neuron : Neuron or str
        polarity : str
            ``+`` for the largest activations, ``-`` for the smallest.
        k : int, optional
            The number of examples; by default all.
        method : str, optional
            The attribution method whose token relevance is included, if the examples are annotated; by default
            ``attnlrp``, in an index of images ``vit``.

        Returns
        -------
        list of Example

        Raises
        ------
        StoreError
            If the index does not have the neuron.
        """
        if method is None:
            method = "vit" if self.is_of_images else "attnlrp"
        return self.example_tables.of(neuron, polarity, k, method)

    @reads
    def search(self, text: str, k: int = 20) -> list[Hit]:
        """Return the neurons and polarities that best match a text, with reasons.

        English stop words do not count, unless the text has no other words.

        First those with the words in their examples or in a significant automatic label. Their score is a sum of
        numbers of standard deviations: by how much more of the examples contain the words than of all sentences; how
        similar the examples are to the sentences that match the words best (the cosine of mean vectors, relative to
        random sentences); how similar the output is to the words (the cosine of the W_out row with the unembedding,
        relative to the same neuron's cosines with random tokens; weight 1/2); and the label's p.
        Then those of which only the output is similar to the words: more than any neuron's to 95 % of random directions
        with the covariance of the unembedding. Polarities without examples are left out.

        Parameters
        ----------
        text : str
            Words.
        k : int
            The number of results.

        Returns
        -------
        list of Hit
            The best first; `Hit.by` says what a result rests on.

        Raises
        ------
        InputError
            If the text has no words.
        StoreError
            If the scan is not finished.
        """
        return search.by_words(self, text, k)[:k]

    @reads
    def similar(self, neuron: Neuron | str, k: int = 10, by: str = "writes", polarity: str = "+") -> list[Hit]:
        """Return the neurons nearest to a neuron, with the polarity that is near.

        Parameters
        ----------
        neuron : Neuron or str
        k : int
            The number of results.
        by : str
            ``writes`` (W_out rows), ``reads`` (W_in or gate rows) or ``examples`` (mean vectors of examples).
        polarity : str
            The polarity of the neuron. With a gated FFN in the index, ``reads`` has no polarity, because the gate does
            not decide the sign of the activation.

        Returns
        -------
        list of Hit
            The nearest first; the score is the cosine.

        Raises
        ------
        StoreError
            If the index does not have the neuron, or vectors are missing.
        """
        return search.similar(self, neuron, k, by, polarity)

    @reads
    def vocabulary(self, neuron: Neuron | str, k: int = 20) -> Projection:
        """Return the vocabulary projection of w_out without the model (`icebear.project` uses the model).

        Rows are stored in float16, so logits differ from the model's by about 0.1 %.

        Parameters
        ----------
        neuron : Neuron or str
        k : int
            The number of promoted and of suppressed tokens.

        Returns
        -------
        Projection

        Raises
        ------
        StoreError
            If the index does not have the neuron, or vectors are missing.
        """
        return search.vocabulary_projection(self, neuron, k)

    @reads
    def check(self, fingerprint: str, name: str, dtype: str | None = None) -> None:
        """Raise `StoreError` if the index was made with another model or dtype.

        dtype: required to write results to the index; None accepts any dtype, which is enough to read.
        """
        facts = self.facts.all()
        if facts and dtype is not None and facts["dtype"] != dtype:
            stored = facts["dtype"]
            raise StoreError(f"{self.path} is an index in {stored}, not in {dtype}; use --dtype {stored}.")
        if facts and facts["fingerprint"] != fingerprint:
            of = f"images, made by {facts['model']}" if self.is_of_images else facts["model"]
            raise StoreError(f"{self.path} is an index of {of}, not of {name}; load {facts['model']} with --model.")

    @property
    @reads
    def documents_phrase(self) -> str:
        """Which documents of which corpus a finished index holds, as a phrase."""
        facts = self.facts.all()
        corpus, limit, size = facts["corpus"], facts.get("limit"), facts.get("documents")
        documents = IMAGES if self.is_of_images else "documents"
        if limit is None or (size is not None and limit >= size):
            return f"all {documents} of {corpus}"
        if size is None:
            return f"the first {limit:,} documents of {corpus}"
        shipped = "; it comes with icebear, and icebear index makes a larger one" if facts.get("shipped") else ""
        return f"{limit:,} of {size:,} {documents} of {corpus}, a random sample by hash{shipped}"

    @reads
    def made_with(self) -> dict[str, Any]:
        """Return the provenance of the index, JSON-ready: model, versions, corpus and settings."""
        facts, provenance = self.facts.all(), self.facts.get("made_with")
        settings = "corpus input language limit documents order content k max_tokens seed tokens statistics_tokens"
        model = {"name": facts["model"], **provenance["model"]}
        return {
            **provenance,
            "model": model,
            "index": {key: facts[key] for key in f"{settings} shipped from".split() if key in facts},
        }

    @reads
    def status(self) -> dict[str, Any]:
        """Return how far the scan is, and how many rows the index has of each kind, JSON-ready."""
        shards, scanned = self.scan.shards(), "finished" in self.facts.all()
        state = "complete" if self.is_complete else "without vectors" if scanned else "unfinished"
        tables = ("neurons", "examples", "attributions", "meanings", "labels", "concepts")
        rows = {table: self.count(table) for table in tables}
        rows = {
            "neurons": self.neurons.count_without_heads(),
            "heads": rows.pop("neurons") - self.neurons.count_without_heads(),
            **rows,
        }
        return {"state": state, "shards": len(shards), "sentences": sum(shards.values()), **rows}

    def changed(self) -> int:
        """Return the time of the last write, in nanoseconds."""
        log = self.path.with_name(self.path.name + "-wal")
        return max(path.stat().st_mtime_ns for path in (self.path, log) if path.exists())

    @reads
    def checksum(self) -> str:
        """Return the SHA-256 of all results: the rows of the tables in key order, and the vector indexes.

        It depends only on the model, corpus and settings, not on interruptions.
        """
        digest = self._digest({t.name: "1" for t in self.database.tables if not t.name.startswith(NO_RESULT)})
        for name in vectors.NAMES:
            with suppress(FileNotFoundError):
                digest.update(f"{name} {vectors.digest(self.vectors.path(name))}".encode())
        return digest.hexdigest()

    @reads
    def is_sound(self, identity: str) -> bool:
        """Return whether the file and its vector indexes are whole, and hold what a scan wrote when it had this
        `results_digest`."""
        for name in vectors.NAMES:
            self.vectors.verify(name)
        is_intact = self.database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return is_intact and self.is_complete and self.results_digest() == identity

    @reads
    def results_digest(self) -> str:
        """Return the SHA-256 of what a scan writes, without what is added later, such as labels."""
        return self._digest(RESULTS).hexdigest()

    def _digest(self, tables: Mapping[str, str]) -> Any:
        """Return the digest of the rows of tables that meet a condition, in key order."""
        digest = hashlib.sha256()
        for name, condition in tables.items():
            digest.update(name.encode())
            order = ", ".join(self.database.table(name).pks)
            for row in self.database.execute(f"SELECT * FROM {name} WHERE {condition} ORDER BY {order}"):
                digest.update(repr(row).encode())
        return digest
