"""Pack an index of `wiki-summaries` for the index that comes with icebear: the strongest sentences, their vectors by a
sentence encoder, labels with their scores, and the map.

icebear index --store wiki.db   # with its sentence encoder
icebear label --auto --all --store wiki.db
icebear atlas --store wiki.db
python benchmarks/pack_index.py wiki.db actmax/shipped/smollm2-135m.npz
python benchmarks/pack_index.py wiki.db actmax/shipped/smollm2-135m.npz --check
"""

from __future__ import annotations

import argparse
import json
import tempfile
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np

from icebear.actmax.atlas.neighbor_map import PAGE_STEPS, on_page
from icebear.actmax.atlas.saved_map import saved_map
from icebear.actmax.labels.auto import control_name
from icebear.actmax.labels.sample import topics_name
from icebear.actmax.shipped.shipped_index import CONTROLS, STATISTICS, documents_of, ids_digest, unpack_index
from icebear.actmax.shipped.unpacking import KINDS, NOT_LABELED, SCORES, UNITS, Arrays
from icebear.convert import CONVERTER
from icebear.db.store import Store, open_store
from icebear.db.vectors import unit
from icebear.errors import StoreError
from icebear.models.loading.loading import load_model
from icebear.paths import written
from icebear.records import POLARITIES

EXAMPLES = 18
"""The number of sentences of each side of a neuron; heads, which are few, have all."""
VECTOR_BYTES = 48
"""The size of the vector of a sentence."""
COMPONENTS = 192
"""The principal components of the vectors that are quantized; they have 90 % of the variance."""
OF_VECTORS = ("center", "spread", "ceilings", "typical")
"""Facts that are made with the vectors."""


def pack(store: Store, path: Path) -> None:
    """Write the strongest sentences of a finished index of `wiki-summaries`, and all statistics."""
    facts = {name: fact for name, fact in store.facts.all().items() if name not in OF_VECTORS}
    documents = {title: number for number, (title, _) in enumerate(documents_of(facts))}
    sentences = list(store.sentences.starting_at(0))  # in order of id
    columns = store.neurons.columns()
    examples = store.example_tables.columns()
    examples = examples[(examples.rank < EXAMPLES) | (examples.key >= 2 * store.neurons.count_without_heads())]
    if any("".join(s.tokens) != s.text[: sum(map(len, s.tokens))] for s in sentences):
        raise StoreError("The tokens of this index are not parts of its texts, so that they cannot be packed.")
    about: dict[str, Any] = {
        "facts": {**facts, "k": EXAMPLES, "shipped": True},
        **{name: store.controls.get(name) for name in CONTROLS},
    }
    parts: Arrays = {}
    if encoder := facts.get("encoder"):
        about["facts"]["encoder"] = {name: encoder[name] for name in ("name", "fingerprint")}
        parts |= packed_vectors(store, np.unique(examples.sentence))
    for name, packed in (("labels", packed_labels(store)), ("map", packed_map(store, examples))):
        if packed:
            arrays, about[name] = packed
            parts |= arrays
    with written(path, StoreError) as part, part.open("wb") as file:
        _save(
            file,
            about=np.frombuffer(json.dumps(about).encode(), np.uint8),
            ids=np.frombuffer(ids_digest(sentences), np.uint8),
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
            **parts,
        )


def packed_vectors(store: Store, ids: np.ndarray) -> Arrays:
    """Return the vectors of the sentences with these ids: as many principal components as `COMPONENTS` says, in groups
    of about the same variance, each of which FAISS's product quantizer writes as a byte (Ge et al. 2013)."""
    import faiss

    known, rows = store.sentences.vectors(None, "embeddings")
    rows = rows[np.argsort(known)][np.searchsorted(np.sort(known), ids)].astype(np.float32)
    center = rows.mean(0)
    rows = rows - center
    variance, directions = (part[..., ::-1][..., :COMPONENTS] for part in np.linalg.eigh(rows.T @ rows))
    rotation = directions[:, _groups(variance, VECTOR_BYTES)]  # (D, C)
    rotated = np.ascontiguousarray(rows @ rotation)
    quantizer = faiss.ProductQuantizer(rotated.shape[1], VECTOR_BYTES, 8)
    quantizer.train(rotated)
    centroids = faiss.vector_to_array(quantizer.centroids).reshape(VECTOR_BYTES, 256, -1)
    return {
        "vector_codes": quantizer.compute_codes(rotated),
        "vector_centroids": centroids.astype(np.float16),
        "vector_rotation": rotation.T.astype(np.float16),
        "vector_center": center,
    }


def _groups(variance: np.ndarray, count: int) -> list[int]:
    """Return components in order of their group. In turn, the largest one goes to the group whose product of variances
    is smallest."""
    groups: list[list[int]] = [[] for _ in range(count)]
    size = len(variance) // count
    for component in range(size * count):
        able = (group for group in groups if len(group) < size)
        min(able, key=lambda group: np.log(variance[group] / variance[-1]).sum()).append(component)
    return [component for group in groups for component in group]


def packed_map(store: Store, examples: np.recarray) -> tuple[Arrays, dict[str, Any]] | None:
    """Return the map that was drawn of the index; None if there is none."""
    drawn = saved_map(store)
    if drawn is None:
        return None
    if drawn.sides.tolist() != np.unique(examples.key[examples.key < 2 * store.neurons.count_without_heads()]).tolist():
        raise StoreError("The map lacks sides of neurons that have examples; draw it again.")
    arrays = {
        "map_points": on_page(drawn.points).astype(np.uint16),
        "map_cluster": drawn.cluster.astype(np.int16),
        "map_clarity": to_steps(drawn.clarity),
    }
    about = CONVERTER.unstructure({"clusters": drawn.clusters, "layers": drawn.layers})
    return arrays, {**about, "seed": drawn.made_with["seed"]}


def packed_labels(store: Store) -> tuple[Arrays, dict[str, Any]] | None:
    """Return the automatic labels, without their examples; None if there are none."""
    neurons = store.neurons.all_with_heads()
    meanings = store.labels.automatic(neurons)
    if not meanings:
        return None
    topics = store.controls.get(topics_name(store))
    nulls = [store.controls.get(control_name(store, heads=heads)) for heads in (False, True)]
    numbered = {tuple(words): number for number, words in enumerate(topics["words"])}
    tokens: dict[str, int] = {}
    kinds, units, significant, items, numbers, scores, strongest = [], [], [], [], [], [], []
    sentences: dict[str, int] = {}
    for side in ((neuron, polarity) for neuron in neurons for polarity in POLARITIES):
        meaning = meanings.get(side)
        kinds.append(KINDS.index(meaning.kind) if meaning else NOT_LABELED)
        units.append(UNITS.index(meaning.by) if meaning else 0)
        significant.append(bool(meaning and meaning.significant))
        if meaning is None:
            continue
        numbers.append((meaning.score, meaning.p))
        if not meaning.kind:
            continue
        record, label = meaning.record, meaning.record["label"]["items"]
        sentences = record["sentences"]
        if meaning.kind == "topic":
            items.append(numbered[tuple(label)])
        else:
            items += [len(label), *(tokens.setdefault(token, len(tokens)) for token in label)]
        if meaning.significant:
            by_token, other = record["auroc"]["token"], record["other_neuron"] or 0.0
            scores.append([*(record[name] for name in SCORES[:3]), by_token, other])
            strongest.append(record["strongest"])
    arrays = {
        "label_kinds": np.array(kinds, np.uint8),
        "label_units": np.array(units, np.uint8),
        "label_significant": np.array(significant, np.uint8),
        "label_items": np.array(items, np.uint16),
        "label_numbers": to_steps(np.array(numbers)),
        "label_scores": to_steps(np.array(scores).reshape(-1, len(SCORES))),
        "label_strongest": np.array(strongest, np.uint8).reshape(-1, 2),
    }
    about = {"topics": topics, "nulls": list(filter(None, nulls)), "tokens": list(tokens), "sentences": sentences}
    return arrays, about


def to_steps(x: np.ndarray) -> np.ndarray:
    return np.round(x.clip(0, 1) * PAGE_STEPS).astype(np.uint16)


def _save(file: IO[bytes], **arrays: np.ndarray[Any, Any]) -> None:
    """Write an .npz file that bzip2 makes an eighth smaller than numpy does."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_BZIP2) as packed:
        for name, array in arrays.items():
            with packed.open(f"{name}.npy", "w") as part:
                np.lib.format.write_array(part, array)


def check(store: Store, again: Store) -> dict[str, float]:
    """Compare a store with what is unpacked of it. Return the largest differences, and which share of the ten nearest
    neighbors is the same. Raises `AssertionError` for a part that must be equal."""
    columns, columns_again = store.neurons.columns(), again.neurons.columns()
    both = [s.example_tables.columns() for s in (store, again)]
    heads = [rows.key >= 2 * store.neurons.count_without_heads() for rows in both]
    strongest, unpacked = (rows[(rows["rank"] < EXAMPLES) | of] for rows, of in zip(both, heads, strict=True))
    labels, labels_again = (s.labels.automatic(s.neurons.all_with_heads()) for s in (store, again))
    drawn, drawn_again = saved_map(store), saved_map(again)
    assert drawn
    assert drawn_again
    for name in ("key", "rank", "sentence", "token"):
        assert np.array_equal(strongest[name], unpacked[name]), name
    assert columns["histogram"] == columns_again["histogram"]
    assert {key: (m.text, m.by, m.significant) for key, m in labels.items()} == {
        key: (m.text, m.by, m.significant) for key, m in labels_again.items()
    }
    assert (drawn.clusters, drawn.layers) == (drawn_again.clusters, drawn_again.layers)
    assert np.array_equal(on_page(drawn.points), on_page(drawn_again.points))
    return {
        "activations, relative": float(np.abs(strongest.activation / unpacked.activation - 1).max()),
        "scores of labels": max(abs(m.score - labels_again[key].score) for key, m in labels.items()),
        "ten nearest sentences": _overlap(*(s.sentence_vectors() for s in (store, again))),
        "ten nearest sides": _overlap(*map(_sides, (store, again))),
    }


def _sides(store: Store) -> tuple[np.ndarray, np.ndarray]:
    rows = store.example_tables.columns()
    sides = np.unique(rows.key[rows.key < 2 * store.neurons.count_without_heads()])
    return sides, store.vectors.get("examples").reconstruct_n(0, 2 * store.neurons.count_without_heads())[sides]


def _overlap(before: tuple[np.ndarray, np.ndarray], after: tuple[np.ndarray, np.ndarray]) -> float:
    """Return the share of the ten nearest rows, by cosine less the mean, that are the same; of 1,000 random rows. Of
    sentences, a packed index has those that are examples."""
    shared, *numbers = np.intersect1d(before[0], after[0], assume_unique=True, return_indices=True)
    drawn = np.random.default_rng(0).choice(len(shared), min(1000, len(shared)), replace=False)
    nearest = []
    for (_, vectors), of_shared in zip((before, after), numbers, strict=True):
        rows = vectors[of_shared].astype(np.float32)
        rows = unit(rows - rows.mean(0))
        cosines = rows[drawn] @ rows.T
        cosines[np.arange(len(drawn)), drawn] = -1
        nearest.append(np.argpartition(-cosines, 10, axis=1)[:, :10])
    return float(np.mean([len({*a} & {*b}) / 10 for a, b in zip(*nearest, strict=True)]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("out", type=Path)
    parser.add_argument("--check", action="store_true", help="unpack OUT again, and compare it with the store")
    options = parser.parse_args()
    with open_store(options.store) as store, tempfile.TemporaryDirectory() as folder:
        if not options.check:
            pack(store, options.out)
        else:
            unpack_index(options.out, load_model(options.out.stem), Path(folder) / "again.db")
            with open_store(Path(folder) / "again.db") as again:
                print(json.dumps(check(store, again), indent=1))
