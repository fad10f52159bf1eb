"""All FAISS: exact inner-product indexes in files beside the store.

w2        what neurons write, by neuron id
w1        what neurons read (of a gated FFN the gate), by neuron id
examples  the mean vector of the sentences that drive a neuron, by 2 * neuron id + (polarity is -)
tokens    the unembedding, by token id
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from icebear.errors import StoreError
from icebear.extras import need

NAMES = ("w2", "w1", "examples", "tokens")


MARK = b"icebear vectors "
"""Behind what FAISS wrote; then the file's identity follows, the SHA-256 of what is before the mark."""
TAIL = len(MARK) + 32
"""Bytes."""


def save(path: Path, blocks: Iterable[np.ndarray], unit: bool = True) -> str:
    """Write the rows (N, D) of all blocks with the ids 0 to N - 1; replaces `path` at once. Returns its identity.

    unit: scale the rows to length 1, so that inner products are cosines.
    """
    need("index")
    import faiss

    index: Any = None
    for block in blocks:
        rows = np.array(block, dtype=np.float32, order="C")
        if unit:
            faiss.normalize_L2(rows)
        if index is None:
            kind = faiss.ScalarQuantizer.QT_fp16
            index = faiss.IndexScalarQuantizer(rows.shape[1], kind, faiss.METRIC_INNER_PRODUCT)
        index.add(rows)
    part = path.with_name(path.name + ".part")
    try:
        faiss.write_index(index, str(part))
        found = digest(part)
        with part.open("ab") as file:
            file.write(MARK + bytes.fromhex(found))
        os.replace(part, path)
    except (OSError, RuntimeError):
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise StoreError(f"{path} cannot be written; make room or check the folder, and run it again.") from None
    return found


def load(path: Path, identity: str | None) -> Any:
    """The index with this identity, mapped from its file until that changes.

    Raises `StoreError` when it is missing, damaged, or another's: of another store, or of earlier results of this one.
    """
    again = "run icebear index again with the same options to rebuild them."
    try:
        if marked(path) != identity:
            raise StoreError(f"The vectors {path} are not those of this store's results; {again}")
        return _read(path, path.stat().st_mtime_ns)
    except (OSError, RuntimeError):
        raise StoreError(f"The vectors {path} are missing or damaged; {again}") from None


def marked(path: Path) -> str:
    """The identity at a file's end; empty where it has none. Raises `OSError`."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        tail = file.read()
    return tail.removeprefix(MARK).hex() if tail.startswith(MARK) else ""


def digest(path: Path) -> str:
    """The SHA-256 of what FAISS wrote, as it is now."""
    left, found = path.stat().st_size, hashlib.sha256()
    left -= TAIL if marked(path) else 0
    with path.open("rb") as file:
        while chunk := file.read(min(left, 1 << 20)):
            found.update(chunk)
            left -= len(chunk)
    return found.hexdigest()


@functools.lru_cache(maxsize=8)
def _read(path: Path, modified: int) -> Any:
    need("index")
    import faiss

    return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)  # its pages are the system's to keep, or take back


def search(index: Any, query: np.ndarray, k: int) -> list[tuple[int, float]]:
    """The k rows with the largest cosine to query (D,), largest first."""
    query = np.asarray(query, dtype=np.float32)
    ids, scores = products(index, query / max(float(np.linalg.norm(query)), 1e-12), k)
    return list(zip(ids.tolist(), scores.tolist(), strict=True))


def products(index: Any, query: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The ids (k,) of the rows with the largest inner product with query (D,), largest first, and the products."""
    scores, ids = index.search(np.asarray(query, dtype=np.float32)[None], min(k, index.ntotal))
    return ids[0], scores[0]


def row(index: Any, identity: int) -> np.ndarray:
    """(D,) one row."""
    return index.reconstruct(identity)
