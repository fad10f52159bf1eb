"""A scan over several machines: parts, each a store of its own in a shared folder, and their merge.

1. `scan_part` scans every N-th shard of the corpus, as one run cuts it. Its file has the ending ``.partial`` until it
   is complete; an interrupted part is resumed.
2. `merge_parts` adds the parts up in any order: sums are in fixed point, so that the index equals that of one run.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from icebear.actmax.index.build import (
    Part,
    check_has_results,
    facts_of,
    finish,
    indexed_counts,
    pack,
    scan,
    unpack,
)
from icebear.actmax.index.corpus import Corpus
from icebear.actmax.index.head_norms import head_means
from icebear.actmax.index.neuron_vectors import ensure_vectors
from icebear.actmax.index.part_files import HEAD_MEANS, parts_in
from icebear.actmax.index.scan import INDEXED, Settings, head_count, index_size, indexed_sites
from icebear.actmax.index.top_activations import ScanSummary, empty_summary, merge
from icebear.actmax.measure_heads import ensure_heads
from icebear.db.store import Store, open_store
from icebear.errors import InputError, StoreError, need
from icebear.models.model import Model
from icebear.paths import local, locked, write_file
from icebear.steps import OnProgress, unwatched
from icebear.values import check_int, several, typed

SHORT = "short."
"""Before the names of the summary of a last shard that is shorter."""
OF_PART = ("part", "counts", "documents")
"""Facts that differ between parts, or that one run writes at its end."""
NOT_COMPARED = {"model", "corpus"}
"""Facts that may be written in other ways; a fingerprint and a digest of the content stand for them."""
PATIENCE = 600
"""Seconds to wait for another part that measures the means of head outputs."""
COPIED = 16
"""Shards that are copied at once."""


@typed
def scan_part(
    model: Model,
    corpus: Corpus,
    folder: str | Path,
    part: int,
    parts: int,
    k: int = 32,
    sites: Sequence[str] = INDEXED,
    max_tokens: int = 256,
    seed: int = 0,
    on_progress: OnProgress = unwatched,
) -> Path:
    """Scan one of several parts of a corpus, on this machine or another one that has the folder.

    Parameters
    ----------
    model, corpus, k, sites, max_tokens, seed, on_progress
        As of `build_index`; the same for all parts.
    folder : str or Path
        Where the parts are. A part that is complete is not scanned again; an interrupted one is resumed.
    part, parts : int
        The number of this part, from 1, and of all parts.

    Returns
    -------
    Path
        The file of the part.

    Raises
    ------
    StoreError
        If another process scans the part, or the part was made with another model, corpus or setting.
    InputError
        If an argument is out of range.
    """
    need("index")
    check_int(parts, "The number of parts")
    chosen = Part(check_int(part, "The number of a part", 1, parts), parts)
    settings = Settings(k, indexed_sites(model, several(sites)), max_tokens, seed)
    facts = {**facts_of(model, corpus, settings), "part": str(chosen)}
    path = _folder(folder) / f"part-{chosen.index}-of-{chosen.count}.db"
    if others := sorted(parts_in(path.parent).keys() - {parts}):
        raise InputError(f"{folder} has the parts of a scan in {others[0]}; give this number, or another folder.")
    with locked(path, StoreError):
        if path.exists():
            with open_store(path) as store:
                _check_same(path, store.facts.all(), facts)
        else:
            _scan_to(path, model, corpus, settings, facts, chosen, on_progress)
    return path


def _scan_to(
    path: Path,
    model: Model,
    corpus: Corpus,
    settings: Settings,
    facts: dict[str, Any],
    part: Part,
    on_progress: OnProgress,
) -> None:
    if "head" in settings.sites:
        settings = dataclasses.replace(settings, head_means=shared_head_means(model, path.parent))
    partial = path.with_suffix(".partial")
    with open_store(partial, create=True) as store, store.exclusively():
        begun = store.facts.all()
        _check_same(partial, begun, facts)
        if "counts" not in begun:  # else it was stopped before its file was renamed
            full, short, counts = scan(model, corpus, store, settings, facts, on_progress, part=part)
            shorter = {f"{SHORT}{name}": x for name, x in pack(short).items()}
            summaries = {**pack(full, settings.head_means), **shorter}
            store.scan.commit({}, summaries, {**facts, "counts": dict(counts), "documents": corpus.size()})
        if not store.scan.close_log():
            raise StoreError(f"Another program has {partial} open; close it there, and run the same command again.")
    partial.replace(path)


@typed
def merge_parts(model: Model, folder: str | Path, store: Store) -> Counter[str]:
    """Merge the parts of a scan into an index that equals that of one run, bit for bit.

    Parameters
    ----------
    model : Model
        That of the parts.
    folder : str or Path
    store : Store
        A new one, opened with create=True, or one that an interrupted merge of these parts began.

    Returns
    -------
    Counter
        The counts of the corpus, as of `build_index`.

    Raises
    ------
    StoreError
        If a part is missing, unfinished, damaged, or of another scan, or if the store has an index already.
    """
    need("index")
    with ExitStack() as stack:
        parts = [stack.enter_context(open_store(path)) for path in _complete(local(folder))]
        facts = _common_facts(parts)
        _check_same(parts[0].path, {**facts, "fingerprint": model.fingerprint}, facts)
        stack.enter_context(store.exclusively())
        if not store.scan.finished_with(facts):
            _merge(model, parts, store, facts)
        ensure_vectors(model, store)
        ensure_heads(model, store)
        return indexed_counts(store)


def _merge(model: Model, parts: Sequence[Store], store: Store, facts: dict[str, Any]) -> None:
    settings = Settings(facts["k"], tuple(facts["sites"]), facts["max_tokens"], facts["seed"])
    full = short = none = empty_summary(
        index_size(model, settings.sites), settings.k, head_count(model, settings.sites)
    )
    for part in parts:
        packed = part.scan.progress()
        if "head_means" in packed:
            means = _loaded(part.path, packed["head_means"])
            if settings.head_means is not None and not torch.equal(settings.head_means, means):
                raise _not_one_scan(parts)
            settings = dataclasses.replace(settings, head_means=means)
        try:
            summaries = _summary(packed, ""), _summary(packed, SHORT)
        except (SafetensorError, KeyError, TypeError):
            raise StoreError(f"{part.path} is damaged; delete it, and scan it again.") from None
        full, short = (merge(x, more or none) for x, more in zip((full, short), summaries, strict=True))
    counts = Counter(parts[0].facts.get("counts"))
    check_has_results(merge(full, short), counts, facts)
    for part in parts:
        _copy(part, store, facts)
    store.scan.commit({}, pack(full, settings.head_means), facts)
    finish(model, store, settings, merge(full, short), counts, parts[0].facts.get("documents"))


def _folder(path: str | Path) -> Path:
    try:
        local(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"The folder {path} cannot be made ({error.strerror}); choose another one.") from None
    return local(path)


def _complete(folder: Path) -> list[Path]:
    """Return the files of all parts. Raises `StoreError` unless all of one number of parts are there."""
    known = parts_in(folder)
    if len(known) != 1:
        counts = f"parts of {' and of '.join(map(str, known))}" if known else "no parts"
        raise StoreError(f"{folder} has {counts}; give a folder with the parts of one scan.")
    [(count, has)] = known.items()
    lacking = [part for part in range(1, count + 1) if not has.get(part)]
    if lacking:
        names = ", ".join(map(str, lacking[:10])) + (" ..." if len(lacking) > 10 else "")
        raise StoreError(
            f"{len(lacking)} of {count} parts are missing or unfinished ({names}); run icebear index --part "
            f"{lacking[0]}/{count} --parts {folder}, with the options of the others."
        )
    return [folder / f"part-{part}-of-{count}.db" for part in range(1, count + 1)]


def _common_facts(parts: Sequence[Store]) -> dict[str, Any]:
    """Return the facts of the scan. Raises `StoreError` unless these are all parts of one scan, whole."""
    each = [part.facts.all() for part in parts]
    for number, (part, facts) in enumerate(zip(parts, each, strict=True), 1):
        if facts.get("part") != f"{number}/{len(parts)}" or "counts" not in facts:
            raise StoreError(f"{part.path} is not this part, or not all of it; delete it, and scan it again.")
        _check_same(part.path, facts, {**each[0], "part": facts["part"]})
    sizes = [size for part in parts for size in part.scan.shards().items()]
    is_whole = sorted(number for number, _ in sizes) == list(range(len(sizes)))
    if not is_whole or sum(size for _, size in sizes) != each[0]["counts"].get("sentences", 0):
        raise _not_one_scan(parts)
    return {name: value for name, value in each[0].items() if name not in OF_PART}


def _not_one_scan(parts: Sequence[Store]) -> StoreError:
    folder = parts[0].path.parent
    return StoreError(f"The parts in {folder} are not of one scan; delete them, and scan them again.")


def _check_same(path: Path, have: dict[str, Any], facts: dict[str, Any]) -> None:
    """Raise `StoreError` if a part that was begun has other facts."""
    for name in sorted(facts.keys() - NOT_COMPARED) if have else ():
        if have.get(name) != facts[name]:
            raise StoreError(
                f"{path} was scanned with {name.removeprefix('claimed_')} {have.get(name)!r}, not {facts[name]!r}; use "
                "the same model, corpus and options for all parts, or delete the file to scan it again."
            )


def _summary(packed: dict[str, bytes], prefix: str) -> ScanSummary | None:
    """Return the summary whose names have a prefix, `SHORT` or none; None if it has no sentences."""
    names = [name for name in packed if name.startswith(SHORT) is bool(prefix) and name != "head_means"]
    return unpack({name.removeprefix(prefix): packed[name] for name in names}) if names else None


def _copy(part: Store, store: Store, facts: dict[str, Any]) -> None:
    """Copy the sentences and vectors of a part. Which of its shards a sentence is in is not kept."""
    sizes = iter(sorted(part.scan.shards().items()))
    rows = part.scan.sentences.with_vectors()
    while chunk := list(islice(sizes, COPIED)):
        store.scan.commit({number: list(islice(rows, size)) for number, size in chunk}, {}, facts)


def shared_head_means(model: Model, folder: str | Path) -> Tensor:
    """Return the means of the head outputs that the first part measured, or measure them for the other parts."""
    path = _folder(folder) / f"{HEAD_MEANS}-{model.fingerprint}-{model.dtype_name}.safetensors"
    with locked(path, StoreError, seconds=PATIENCE):
        if not path.exists():
            write_file(path, save({"head_means": head_means(model)}), StoreError)
    return _loaded(path, path.read_bytes())


def _loaded(path: Path, data: bytes) -> Tensor:
    try:
        return load(data)["head_means"]
    except (SafetensorError, KeyError):
        raise StoreError(f"{path} is damaged; delete it, and the parts that were scanned with it.") from None
