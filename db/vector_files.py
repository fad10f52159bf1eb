"""The FAISS files beside a store, and what belongs to them in its tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from icebear.db import vectors
from icebear.db.facts import FactTables
from icebear.db.neurons import NeuronTables
from icebear.db.sqlite import SqliteFile
from icebear.db.vectors import NAMES
from icebear.errors import StoreError
from icebear.records import Neuron
from icebear.values import whole


class VectorFiles:
    """The files of `icebear.db.vectors`; the tables `vectors`, `w2_norms` and `tokens`."""

    def __init__(self, file: SqliteFile, facts: FactTables, neurons: NeuronTables) -> None:
        self.file, self.facts, self.neurons = file, facts, neurons

    def get(self, name: str) -> Any:
        """The index called `name`. Raises `StoreError` for a file that is missing, damaged or another store's."""
        row = self.file.database.execute("SELECT identity FROM vectors WHERE name = ?", (name,)).fetchone()
        return vectors.load(self.path(name), row and row[0])

    def save(self, name: str, blocks: Iterable[np.ndarray], unit: bool = True) -> None:
        """See `icebear.db.vectors.save`."""
        identity = vectors.save(self.path(name), blocks, unit)
        with self.file.writing():
            self.file.database.execute("INSERT OR REPLACE INTO vectors VALUES (?, ?)", (name, identity))

    def path(self, name: str) -> Path:
        return self.file.path.with_name(f"{self.file.path.name}.{name}.faiss")

    def size(self) -> int:
        """Bytes of all files together."""
        return sum(path.stat().st_size for path in map(self.path, NAMES) if path.exists())

    # --- what turns a product with W2 into logits -------------------------------------------------------

    def w2_norm(self, neuron: Neuron | str) -> float:
        query = "SELECT norm FROM w2_norms WHERE neuron = ?"
        row = self.file.database.execute(query, (self.neurons.id(neuron),)).fetchone()
        if row is None:
            raise self.missing()
        return row[0]

    def typical(self, layer: int) -> tuple[float, float] | None:
        """`Projection.typical` of a layer."""
        layer, spreads = whole(layer, "A layer", 0), self.facts.all().get("typical")
        spread = spreads[whole(layer, "A layer of the index", 0, len(spreads) - 1)] if spreads else None
        return spread and tuple(spread)

    def set_norms(self, norms: Iterable[float], spreads: Sequence[tuple[float, float] | None]) -> None:
        """The lengths of the W2 rows, in order of neuron id; `Projection.typical` of each layer."""
        with self.file.writing():
            self.file.database.execute("DELETE FROM w2_norms")
            self.file.database.conn.executemany("INSERT INTO w2_norms VALUES (?, ?)", enumerate(norms))
            self.facts.set({"typical": spreads})

    # --- the vocabulary ---------------------------------------------------------------------------------

    def set_tokens(self, texts: Iterable[str]) -> None:
        """The model's vocabulary, in order of token id."""
        with self.file.writing():
            self.file.database.execute("DELETE FROM tokens")
            self.file.database.conn.executemany("INSERT INTO tokens VALUES (?, ?)", enumerate(texts))

    def token_ids(self, texts: Iterable[str]) -> list[int]:
        """The ids of those texts that are one token."""
        query = "SELECT id FROM tokens WHERE text = ?"
        return sorted(row[0] for text in set(texts) for row in self.file.database.execute(query, (text,)))

    def token_texts(self, ids: Iterable[int]) -> list[str]:
        query = "SELECT text FROM tokens WHERE id = ?"
        return [self.file.database.execute(query, (token,)).fetchone()[0] for token in ids]

    # --- the mean of all sentences ----------------------------------------------------------------------

    def centre(self) -> np.ndarray:
        """(D,) the mean vector of all sentences."""
        return np.array(self.facts.get("centre"), dtype=np.float32)

    def set_centre(self, vector: np.ndarray) -> None:
        with self.file.writing():
            self.facts.set({"centre": vector.tolist()})

    def missing(self) -> StoreError:
        return StoreError(f"The vectors of {self.file.path} are missing; run icebear index again to make them.")
