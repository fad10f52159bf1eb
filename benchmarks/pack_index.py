"""Pack the strongest sentences of a finished index of `wiki-summaries`, for the index that comes with icebear.

python benchmarks/pack_index.py wiki.db actmax/index/shipped/smollm2-135m.npz
"""

from __future__ import annotations

import argparse
import json
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np

from icebear.actmax.index.shipped_index import CONTROLS, STATISTICS, digest, documents_of
from icebear.db.store import Store, open_store
from icebear.errors import StoreError
from icebear.paths import written

EXAMPLES = 6
"""The number of sentences of each side of a neuron; heads, which are few, have all."""
OF_VECTORS = ("center", "spread", "ceilings", "typical")
"""Facts that are made with the vectors."""


def pack(store: Store, path: Path) -> None:
    """Write the strongest sentences of a finished index of `wiki-summaries`, and all statistics."""
    facts = {name: fact for name, fact in store.facts.all().items() if name not in OF_VECTORS}
    documents = {title: number for number, (title, _) in enumerate(documents_of(facts))}
    sentences = list(store.sentences.starting_at(0))  # in order of id
    columns = store.neurons.columns()
    examples = store.example_tables.columns()
    examples = examples[(examples.rank < EXAMPLES) | (examples.key >= 2 * store.neurons.count())]
    if any("".join(s.tokens) != s.text[: sum(map(len, s.tokens))] for s in sentences):
        raise StoreError("The tokens of this index are not parts of its texts, so that they cannot be packed.")
    about = {
        "facts": {**facts, "k": EXAMPLES, "shipped": True},
        **{name: store.controls.get(name) for name in CONTROLS},
    }
    with written(path, StoreError) as part, part.open("wb") as file:
        _save(
            file,
            about=np.frombuffer(json.dumps(about).encode(), np.uint8),
            ids=np.frombuffer(digest(sentences), np.uint8),
            documents=np.array([documents[s.title] for s in sentences], np.uint16),
            starts=np.array([s.start for s in sentences], np.uint16),
            lengths=np.array([s.end - s.start for s in sentences], np.uint16),
            tokens=np.array([len(s.tokens) for s in sentences], np.uint16),
            letters=np.array([len(token) for s in sentences for token in s.tokens], np.uint8),
            histogram=np.array([json.loads(row) for row in columns["histogram"]], np.uint16),
            statistics=np.array([columns[name] for name in STATISTICS], np.float16),
            layers=np.array(columns["layer"], np.uint16),
            sites=np.array(columns["site"]),
            indices=np.array(columns["idx"], np.uint16),
            example_counts=np.bincount(examples.key, minlength=2 * len(columns["id"])).astype(np.uint8),
            example_sentences=np.searchsorted([s.id for s in sentences], examples.sentence).astype(np.uint16),
            example_tokens=examples.token.astype(np.uint8),
            example_values=examples.activation.astype(np.float16),
        )


def _save(file: IO[bytes], **arrays: np.ndarray[Any, Any]) -> None:
    """Write an .npz file that bzip2 makes an eighth smaller than numpy does."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_BZIP2) as packed:
        for name, array in arrays.items():
            with packed.open(f"{name}.npy", "w") as part:
                np.lib.format.write_array(part, array)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    with open_store(options.store) as store:
        pack(store, options.out)
