"""A scan over several machines: parts, each a store of its own in a shared folder, and their merge.

1. `scan_part` scans every N-th shard of the corpus, as one run cuts it. Its file has the ending ``.partial`` until it
   is complete; an interrupted part is resumed.
2. `merge_parts` adds the parts up in any order: sums are in fixed point, so that the index equals that of one run.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from safetensors.torch import load, load_file, save

from icebear.actmax.heads import ensure_heads
from icebear.actmax.index.build import (
    Part,
    check_table,
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
from icebear.actmax.index.scan import INDEXED, Settings, head_count, index_size, indexed_sites
from icebear.actmax.index.top_activations import ScanSummary, empty_summary, merge
from icebear.db.store import Store, open_store
from icebear.errors import InputError, StoreError, need
from icebear.models.model import Model
from icebear.paths import local
from icebear.steps import OnProgress, unwatched
from icebear.values import check_int, several, typed

SHORT = "short."
"""Before the names of the summary of a last shard that is shorter."""
NAME = re.compile(r"part-(\d+)-of-(\d+)\.(db|partial)")
OF_PART = ("part", "counts", "documents")
"""Facts in which parts differ, or that one run writes at its end."""
HEAD_MEANS = "head-means.safetensors"
"""Measured once, because processors differ in the last digits."""
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
    chosen = Part(check_int(part, "The number of a part", 1, parts), check_int(parts, "The number of parts"))
    settings = Settings(k, indexed_sites(model, several(sites)), max_tokens, seed)
    facts = {**facts_of(model, corpus, settings), "part": str(chosen)}
    path = _folder(folder) / f"part-{chosen.index}-of-{chosen.count}.db"
    if path.exists():
        with open_store(path) as store:
            store.scan.finished_with(facts)  # raises for another one
        return path
    if "head" in settings.sites:
        settings = dataclasses.replace(settings, head_means=shared_head_means(model, path.parent))
    partial = path.with_suffix(".partial")
    with open_store(partial, create=True) as store, store.exclusively():
        store.check(model.fingerprint, model.name)
        store.scan.finished_with(facts)
        if "counts" not in store.facts.all():  # else it was stopped before its file was renamed
            full, short, counts = scan(model, corpus, store, settings, facts, on_progress, part=chosen)
            shorter = {f"{SHORT}{name}": x for name, x in pack(short, Settings()).items()}
            summaries = {**pack(full, settings), **shorter}
            store.scan.commit({}, summaries, {**facts, "counts": dict(counts), "documents": corpus.size()})
        store.scan.close_log()
    os.replace(partial, path)
    return path


@typed
def merge_parts(model: Model, folder: str | Path, store: Store) -> Counter[str]:
    """Merge the parts of a scan into an index that equals that of one run, bit for bit.

    Parameters
    ----------
    model : Model
        That of the parts.
    folder : str or Path
    store : Store
        A new one, opened with create=True.

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
        stack.enter_context(store.exclusively())
        if store.facts.all():
            raise StoreError(f"{store.path} has an index already; name a new --store.")
        if model.fingerprint != facts["fingerprint"]:
            raise StoreError(f"The parts are of {facts['model']} ({facts['fingerprint']}), not of {model.name}.")
        settings = Settings(facts["k"], tuple(facts["sites"]), facts["max_tokens"], facts["seed"])
        full = short = none = empty_summary(
            index_size(model, settings.sites), settings.k, head_count(model, settings.sites)
        )
        for part in parts:
            packed = part.scan.progress()
            if means := packed.get("head_means"):
                settings = dataclasses.replace(settings, head_means=load(means)["head_means"])
            full, short = merge(full, _summary(packed, "") or none), merge(short, _summary(packed, SHORT) or none)
        counts = Counter(parts[0].facts.get("counts"))
        check_table(merge(full, short), counts)
        for part in parts:
            _copy(part, store, facts)
        store.scan.commit({}, pack(full, settings), facts)
        finish(model, store, settings, merge(full, short), counts, parts[0].facts.get("documents"))
        ensure_vectors(model, store)
        ensure_heads(model, store)
        return indexed_counts(store)


def parts_in(folder: Path) -> dict[int, dict[int, bool]]:
    """Return for each number of parts the parts that a folder has, and whether each is complete."""
    result: dict[int, dict[int, bool]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if match := NAME.fullmatch(path.name):
            part, count, ending = int(match[1]), int(match[2]), match[3]
            has = result.setdefault(count, {})
            has[part] = ending == "db" or has.get(part, False)
    return result


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
    """Return the facts of the scan. Raises `StoreError` if parts are of different scans."""
    each = [{name: x for name, x in part.facts.all().items() if name not in OF_PART} for part in parts]
    for part, facts in zip(parts, each, strict=True):
        for name in sorted({*facts, *each[0]}):
            if facts.get(name) != each[0].get(name):
                raise StoreError(
                    f"{part.path} has {name} {facts.get(name)!r}, and {parts[0].path} {each[0].get(name)!r}; scan one "
                    "of them again."
                )
    return each[0]


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


def shared_head_means(model: Model, folder: str | Path) -> Any:
    """Return the means of the head outputs that the first part measured, or measure them for the other parts."""
    folder = _folder(folder)
    path = folder / HEAD_MEANS
    if not path.exists():
        with NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(save({"head_means": head_means(model)}))
        with suppress(FileExistsError):
            os.link(file.name, path)  # whole, and only if no other part was faster
        os.unlink(file.name)
    return load_file(path)["head_means"]
