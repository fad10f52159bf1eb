"""The index that comes with icebear for a preset: its strongest sentences, as numbers without text.

`benchmarks/pack_index.py` takes them from a store. Unpacking reads the texts from the corpus again. The store is in a
folder of the cache, and made again when it is damaged.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from icebear.actmax.head_attention import MEASURED
from icebear.actmax.index.corpus import read_corpus, sentence_id
from icebear.cache import cache_folder, cached, ensure, write_manifest
from icebear.db.search import KURTOSIS
from icebear.db.sqlite import VERSION
from icebear.db.store import Store, open_store
from icebear.errors import StoreError
from icebear.records import Sentence

if TYPE_CHECKING:
    from icebear.models.model import Model

FOLDER = Path(__file__).parent
STATISTICS = ("mean", "std", "min", "max", "positive")
CONTROLS = (MEASURED, KURTOSIS)
"""Measurements of the model alone, which take longer than all the rest."""
ROOM = 450_000_000
"""The free disk space, in bytes, that making the index takes; it has 320 MB."""
ADDED = ("labels", "meanings", "attributions", "concepts")
"""The tables that people fill."""


class OtherWeights(StoreError):
    """The index that comes with icebear is of other weights than a model of the same name."""


def shipped_index(name: str, load: Callable[[], Model]) -> Path | None:
    """Return the index that comes with icebear for a model of this name, made in the cache at the first call, and again
    if it is damaged; None if there is none. While another process makes it, this one waits.

    load: returns the model, which is needed to make it. Raises `DownloadError` if the cache cannot hold it, and
    `StoreError`, as `unpack` does.
    """
    path = shipped_path(name)
    if path is None:
        return None

    def make(folder: Path) -> None:
        unpack_index(_packed(name), load(), folder / path.name)
        _carry_over(path, folder / path.name)

    what = f"The index of {name} that comes with icebear"
    ensure(path.parent, make, what=what, room=ROOM, is_sound=partial(_is_sound, name))
    return path


def prepared_index(name: str) -> Path | None:
    """Return the index that comes with icebear for a model of this name, if it is whole in the cache."""
    path = shipped_path(name)
    return path if path and _is_sound(name, path.parent) else None


def shipped_store(model: Model) -> AbstractContextManager[Store]:
    """Open the index that comes with icebear for a model. The first call makes it, in the cache.

    Parameters
    ----------
    model
        A preset that an index comes with: ``smollm2-135m``.

    Returns
    -------
    context manager of `Store`

    Raises
    ------
    StoreError
        If none comes with the model, or if the model has other weights.
    DownloadError
        If the cache cannot hold it.
    """
    path = shipped_index(model.name, lambda: model)
    if path is None:
        raise StoreError(
            f"No index of {model.name} comes with icebear; make one with: icebear index --model {model.name}"
        )
    return open_store(path)


def shipped_path(name: str) -> Path | None:
    """Return where in the cache the index that comes with icebear for a model of this name is, or will be made."""
    packed = _packed(name)
    if not packed.is_file() or packed.stem != name:  # a folder of this name may hold any model
        return None
    return cache_folder() / f"shipped-{name}-{_version(packed)}-v{VERSION}" / "index.db"


def shipped_facts(name: str) -> dict[str, Any]:
    """Return the facts of the index that comes with icebear for a model of this name; nothing if there is none."""
    return _about(_packed(name))["facts"] if shipped_path(name) else {}


@cache
def _about(packed: Path) -> dict[str, Any]:
    with np.load(packed) as file:
        return json.loads(file["about"].tobytes())


def _is_sound(name: str, folder: Path) -> bool:
    """Return whether the index of a model in a folder is as it was made, except for what people added."""
    if cached(folder):
        return True
    from icebear.actmax.atlas.saved_map import saved_map  # imports SciPy, for which a card does not wait

    has_map = "map" in _about(_packed(name))
    with suppress(StoreError), open_store(folder / "index.db") as store:
        if store.is_sound(store.facts.get("digest")) and (not has_map or saved_map(store)):
            with suppress(OSError):  # where nothing can be written it is read again each time
                write_manifest(folder)
            return True
    return False


def _carry_over(damaged: Path, repaired: Path) -> None:
    """Copy what people added to a damaged index, as far as it can be read."""
    for table in ADDED:
        with suppress(StoreError), open_store(damaged) as store, open_store(repaired) as again:
            again.insert(table, store.database.execute(f"SELECT * FROM {table}").fetchall(), "IGNORE")


@cache
def _version(packed: Path) -> str:
    return hashlib.sha256(packed.read_bytes()).hexdigest()[:8]


def _packed(name: str) -> Path:
    return FOLDER / f"{Path(name).name}.npz"


def unpack_index(packed: Path, model: Model, path: Path) -> None:
    """Make the store of a packed index. Raises `StoreError` if model or corpus are not those that it was made of."""
    from icebear.actmax.atlas.saved_map import save_map
    from icebear.actmax.index.neuron_vectors import ensure_vectors
    from icebear.actmax.shipped import unpacking

    with np.load(packed) as file:
        arrays = dict(file)
    about = json.loads(arrays["about"].tobytes())
    facts: dict[str, Any] = about["facts"]
    if facts["fingerprint"] != model.fingerprint:
        raise OtherWeights(
            f"The index that comes with icebear is of other weights than {model.name}; run icebear index."
        )
    sentences = list(_sentences(arrays, facts))
    if ids_digest(sentences) != arrays["ids"].tobytes():
        raise StoreError("The index that comes with icebear is of other texts; make your own with icebear index.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_store(path, create=True) as store, store.exclusively():
        store.scan.commit({0: [(sentence, b"") for sentence in sentences]}, {}, facts)
        store.scan.finish(_columns(arrays), _examples(arrays, [s.id for s in sentences]), facts)
        store.controls.set({name: about[name] for name in CONTROLS})
        if facts.get("encoder"):
            ids, rows = store.sentences.of_examples(), unpacking.unpacked_vectors(arrays).astype(np.float16)
            of_encoder = [facts["encoder"]["fingerprint"]] * len(ids)
            store.insert("embeddings", list(zip(ids, of_encoder, map(np.ndarray.tobytes, rows), strict=True)))
        if "labels" in about:
            unpacking.add_labels(store, arrays, about["labels"])
        ensure_vectors(model, store)
        store.facts.set({"digest": store.results_digest()})
        if "map" in about:
            save_map(store, unpacking.unpacked_map(arrays, about["map"], store))


def documents_of(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    return read_corpus(facts["corpus"], language=facts["language"], column=facts["column"]).source()


def _sentences(arrays: dict[str, np.ndarray], facts: dict[str, Any]) -> Iterator[Sentence]:
    documents, letters = dict(enumerate(documents_of(facts))), iter(arrays["letters"].tolist())
    spans = (arrays[name].tolist() for name in ("documents", "starts", "lengths", "tokens"))
    for number, start, length, count in zip(*spans, strict=True):
        title, text = documents.get(number, ("", ""))  # the digest tells
        text = text[start : start + length]
        ends = [0, *itertools.accumulate(itertools.islice(letters, count))]
        tokens = tuple(text[begin:end] for begin, end in itertools.pairwise(ends))
        yield Sentence(sentence_id(text), text, title, start, start + length, tokens)


def ids_digest(sentences: list[Sentence]) -> bytes:
    return hashlib.sha256(b"".join(s.id.to_bytes(8, "big") for s in sentences)).digest()


def _columns(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    columns = {
        name: arrays[column].tolist() for name, column in (("layer", "layers"), ("site", "sites"), ("idx", "indices"))
    }
    columns |= zip(STATISTICS, arrays["statistics"].astype(float).tolist(), strict=True)
    histograms = [json.dumps(row, separators=(",", ":")) for row in arrays["histogram"].tolist()]
    return {"id": range(len(histograms)), **columns, "histogram": histograms}


def _examples(arrays: dict[str, np.ndarray], ids: list[int]) -> Iterator[tuple]:
    counts = arrays["example_counts"].astype(int)
    sides = np.repeat(np.arange(len(counts)), counts)
    ranks = np.arange(len(sides)) - np.repeat(counts.cumsum() - counts, counts)
    sentences, values = np.array(ids)[arrays["example_sentences"]], arrays["example_values"].astype(float)
    columns = (sides // 2, sides % 2, ranks, sentences, arrays["example_tokens"], values)
    yield from zip(*(column.tolist() for column in columns), strict=True)
