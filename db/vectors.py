"""Vector indexes (FAISS, exact inner product) in files next to the store, and their tables.

w_out     W_out rows, by neuron id
w_in      W_in rows (of a gated FFN: gate rows), by neuron id
lens      W_out rows through the averaged Jacobian (where it is better, else as w_out), if it was built
examples  the mean vector of the examples of a neuron, by 2 * neuron id + (polarity is -)
tokens    the unembedding, by token id
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from icebear.cache import cache_folder
from icebear.db.neuron_tables import NeuronTables
from icebear.db.sqlite import SqliteFile, reads
from icebear.errors import InputError, StoreError, need
from icebear.paths import append, check_pointer, write_file, written
from icebear.records import Neuron
from icebear.values import check_int

NAMES = ("w_out", "w_in", "examples", "tokens")
LENS = "lens"
"""The name of an index that a store may lack."""
MARK = b"icebear vectors "
"""This mark follows the index in its file; the SHA-256 of the index follows the mark."""
TAIL = len(MARK) + 32
BLOCK = 4096
"""The number of rows that are read at a time."""
REMEMBERED = 100_000_000
"""From this size in bytes on, the cache folder notes that a file has its digest; a smaller one is read in no time."""


class VectorFiles:
    """The vector indexes, and the tables `vectors`, `vectors_null`, `w_out_norms` and `tokens`."""

    def __init__(self, file: SqliteFile, neurons: NeuronTables) -> None:
        self.file, self.neurons = file, neurons

    def path(self, name: str) -> Path:
        return self.file.path.with_name(f"{self.file.path.name}.{name}.faiss")

    def size(self) -> int:
        """Return the size of all files in bytes."""
        return sum(path.stat().st_size for path in map(self.path, NAMES) if path.exists())

    def save(self, name: str, blocks: Iterable[np.ndarray], unit: bool = True) -> np.ndarray:
        """Write blocks of rows (N, D) with the ids 0 to N - 1, and replace the file atomically. Return their norms.

        unit: whether to scale rows to length 1, so that inner products are cosines.
        """
        need("index")
        import faiss

        index: Any = None
        norms = []
        for block in blocks:
            rows = np.array(block, dtype=np.float32, order="C")
            norms.append(np.linalg.norm(rows, axis=1))
            if unit:
                faiss.normalize_L2(rows)
            if index is None:
                kind = faiss.ScalarQuantizer.QT_fp16
                index = faiss.IndexScalarQuantizer(rows.shape[1], kind, faiss.METRIC_INNER_PRODUCT)
            index.add(rows)
        path = self.path(name)
        try:
            with written(path, StoreError) as part:
                faiss.write_index(index, str(part))
                identity = digest(part)
                append(part, MARK + bytes.fromhex(identity))
        except (RuntimeError, StoreError):
            raise StoreError(
                f"{path} cannot be written; make room or check the folder, then run the same command again."
            ) from None
        self.file.insert("vectors", [(name, identity)])
        return np.concatenate(norms)

    def get(self, name: str) -> Any:
        """Return a vector index, memory-mapped from its file.

        Raises `StoreError` if the file is missing or damaged, or belongs to another store or to earlier results.
        """
        return self._opened(name, is_verified)

    def verify(self, name: str) -> None:
        """Raise the `StoreError` of `get`, also for damage that left size and time of a file as they were."""
        self._opened(name, lambda path, identity: digest(path) == identity)

    @reads
    def _opened(self, name: str, is_sound: Callable[[Path, str], bool]) -> Any:
        path = self.path(name)
        row = self.file.database.execute("SELECT identity FROM vectors WHERE name = ?", (name,)).fetchone()
        try:
            check_pointer(path, StoreError)
            if (identity := stored_digest(path),) != row:
                raise StoreError(
                    f"The vector file {path} does not belong to the current results of this store; {self._again}"
                )
            if not is_sound(path, identity):
                raise StoreError(f"The vector file {path} is damaged; {self._again}")
            return _read(path, path.stat().st_mtime_ns)
        except (OSError, RuntimeError):
            raise StoreError(f"The vector file {path} is missing or damaged; {self._again}") from None

    @property
    def _again(self) -> str:
        """What makes a file again."""
        if self.file.facts.find("shipped"):
            return "delete it, and run the same command again."
        return "run icebear index again with the same options to rebuild it."

    @reads
    def has(self, name: str) -> bool:
        query = "SELECT count(*) FROM vectors WHERE name = ?"
        return bool(self.file.database.execute(query, (name,)).fetchone()[0])

    @reads
    def w_out_norm(self, neuron: Neuron | str) -> float:
        query = "SELECT norm FROM w_out_norms WHERE neuron = ?"
        row = self.file.database.execute(query, (self.neurons.id(neuron),)).fetchone()
        if row is None:
            raise self.missing()
        return row[0]

    @reads
    def typical(self, layer: int) -> tuple[float, float] | None:
        layer, spreads = check_int(layer, "A layer", 0), self.file.facts.find("typical")
        spread = spreads[check_int(layer, "A layer of the index", 0, len(spreads) - 1)] if spreads else None
        return spread and tuple(spread)

    def set_norms(self, norms: Iterable[float], spreads: Sequence[tuple[float, float] | None]) -> None:
        """Save the norms of W_out rows, in order of neuron id, and `Projection.typical` of each layer."""
        with self.file.writing():
            self.file.refill("w_out_norms", enumerate(norms))
            self.file.facts.set({"typical": spreads})

    @reads
    def token_ids(self, texts: Iterable[str]) -> list[int]:
        """Return the ids of the texts that are a single token."""
        query = "SELECT id FROM tokens WHERE text = ?"
        return sorted(row[0] for text in set(texts) for row in self.file.database.execute(query, (text,)))

    @reads
    def token_texts(self, ids: Iterable[int]) -> list[str]:
        query = "SELECT text FROM tokens WHERE id = ?"
        return [self.file.database.execute(query, (token,)).fetchone()[0] for token in ids]

    @reads
    def center(self) -> np.ndarray:
        """Return the mean (D,) of the vectors of `Tables.sentence_vectors`."""
        facts = self.file.facts.all()
        return np.array((facts.get("encoder") or facts)["center"], dtype=np.float32)

    @reads
    def standardized(self, rows: np.ndarray) -> np.ndarray:
        """Return vectors (S, D) of `Tables.sentence_vectors` less the mean of all; those of the model in units of their
        standard deviations: else a few dimensions with most of the variance decide."""
        facts = self.file.facts.all()
        moments = facts.get("encoder") or facts
        center, spread = (np.array(moments[name], dtype=np.float32) for name in ("center", "spread"))
        return (rows - center) / spread if len(rows) else np.zeros((0, len(center)), dtype=np.float32)

    @property
    def output_names(self) -> list[str]:
        """The names of the indexes of what neurons write."""
        return ["w_out", *([LENS] if self.has(LENS) else [])]

    @property
    def search_output_name(self) -> str:
        """The name of the one that a search reads: through the averaged Jacobian if it was built."""
        return self.output_names[-1]

    def set_null(self, name: str, directions: np.ndarray, pooled: bool = False) -> None:
        """Save the mean and standard deviation of each row's cosines with random directions (N, D).

        pooled: take the median standard deviation for all rows. The mean vector of sentences that are about one thing
        has larger cosines of either sign than that of sentences about nothing; its own deviation would hide that.
        """
        directions = unit(directions)
        cosines = [rows @ directions.T for rows in blocks(self.get(name))]
        mean, std = (np.concatenate([getattr(block, part)(1) for block in cosines]) for part in ("mean", "std"))
        if pooled and std.any():
            neurons = (
                std[: 2 * self.neurons.count_without_heads()]
                if std[: 2 * self.neurons.count_without_heads()].any()
                else std
            )
            std[std > 0] = np.median(neurons[neurons > 0])
        self.file.insert("vectors_null", [(name, mean.tobytes(), std.tobytes())])

    def set_example_null(self, norms: np.ndarray, counts: np.ndarray, deviation: float) -> None:
        """Save the null of the index `examples` of an encoder: cosines with the mean of as many random sentences.

        A row is the mean of `counts` (N,) sentence vectors, and has a norm (N,) before it is scaled: that of sentences
        about one thing is larger. deviation: of the inner product of one sentence vector with a query.
        """
        scale = (norms * np.sqrt(counts)).astype(np.float32)
        std = np.divide(deviation, scale, out=np.zeros_like(scale), where=scale > 0, dtype=np.float32)
        self.file.insert("vectors_null", [("examples", np.zeros_like(std).tobytes(), std.tobytes())])

    def forget_null(self, name: str) -> None:
        with self.file.writing():
            self.file.database.execute("DELETE FROM vectors_null WHERE name = ?", (name,))

    @reads
    def has_null(self, name: str) -> bool:
        return self.file.database.execute("SELECT 1 FROM vectors_null WHERE name = ?", (name,)).fetchone() is not None

    @reads
    def z(self, name: str, query: np.ndarray) -> np.ndarray:
        """Return the cosine of each row with a query (D,), relative to its null (`set_null`); 0 for an empty query."""
        index = self.get(name)
        row = self.file.database.execute("SELECT mean, std FROM vectors_null WHERE name = ?", (name,)).fetchone()
        if row is None:
            raise self.missing()
        mean, std = (np.frombuffer(part, dtype=np.float32) for part in row)
        z = np.zeros(index.ntotal, dtype=np.float32)
        if query.any():
            ids, cosines = products(index, unit(query[None])[0], index.ntotal)
            z[ids] = cosines
            z = np.divide(z - mean, std, out=np.zeros_like(z), where=std > 1e-6)
        return z

    def missing(self) -> StoreError:
        return StoreError(f"The vectors of {self.file.path} are missing; run icebear index again to make them.")


def unit(rows: np.ndarray) -> np.ndarray:
    """Return rows (N, D) scaled to length 1; zeros stay."""
    return rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(1e-12)


def blocks(index: Any) -> Iterator[np.ndarray]:
    """Yield the rows of an index in order of id, as float32."""
    for start in range(0, index.ntotal, BLOCK):
        yield index.reconstruct_n(start, min(BLOCK, index.ntotal - start))


def stored_digest(path: Path) -> str:
    """Return the digest at the end of a file; empty if it has none. Raises `OSError`."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        tail = file.read()
    return tail.removeprefix(MARK).hex() if tail.startswith(MARK) else ""


def digest(path: Path) -> str:
    left, sha256 = path.stat().st_size, hashlib.sha256()
    left -= TAIL if stored_digest(path) else 0
    with path.open("rb") as file:
        while chunk := file.read(min(left, 1 << 20)):
            sha256.update(chunk)
            left -= len(chunk)
    return sha256.hexdigest()


def is_verified(path: Path, identity: str) -> bool:
    """Return whether a file has this digest, which is computed once for each size and time of the file."""
    return _is_verified(path, path.stat().st_size, path.stat().st_mtime_ns, identity)


@functools.lru_cache(maxsize=64)
def _is_verified(path: Path, size: int, modified: int, identity: str) -> bool:
    note = f"{size} {modified} {identity}"
    known = cache_folder() / "verified" / hashlib.sha256(os.fsencode(path.absolute())).hexdigest()
    with suppress(OSError, ValueError):
        if known.read_text() == note:
            return True
    if digest(path) != identity:
        return False
    if size >= REMEMBERED:
        with suppress(OSError, InputError):  # without the note the digest is computed in each process
            known.parent.mkdir(parents=True, exist_ok=True)
            write_file(known, note)
    return True


@functools.lru_cache(maxsize=8)
def _read(path: Path, modified: int) -> Any:
    need("index")
    import faiss

    return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)  # the operating system may evict its pages


def nearest(index: Any, query: np.ndarray, k: int) -> list[tuple[int, float]]:
    """Return the k rows with the largest cosine to the query (D,), largest first."""
    ids, scores = products(index, unit(query[None])[0], k)
    return list(zip(ids.tolist(), scores.tolist(), strict=True))


def products(index: Any, query: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids (k,) of the rows with the largest inner product with the query (D,), and the products (k,)."""
    scores, ids = index.search(np.asarray(query, dtype=np.float32)[None], min(k, index.ntotal))
    return ids[0], scores[0]
