"""Long work, with a progress bar on stderr that counts."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from icebear.actmax.index.build import Progress
    from icebear.concepts.corpus import Corpus
    from icebear.concepts.models.model import Model
    from icebear.db.store import Store
    from icebear.records import Neuron


SECONDS = 10.0
"""Between two lines of progress where there is no terminal."""


@contextmanager
def bar(what: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """A function of (done, total) that moves it, and of a note behind it; without a terminal, a line at times."""
    with _drawn(what, total) if sys.stderr.isatty() else _lines(what) as move:
        yield move


@contextmanager
def _drawn(what: str, total: int | None) -> Iterator[Callable[..., None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=Console(stderr=True)) as drawn:
        task = drawn.add_task(what, total=total, note="")

        def move(done: int, total: int | None = total, note: str = "") -> None:
            drawn.update(task, completed=done, total=total, note=note)

        yield move


@contextmanager
def _lines(what: str) -> Iterator[Callable[..., None]]:
    begun, ended, stands = time.monotonic(), threading.Event(), what

    def move(done: int, total: int | None = None, note: str = "") -> None:
        nonlocal stands
        stands = f"{what}: {done:,}{f' of {total:,}' if total else ''}{f', {note}' if note else ''}"

    def tell() -> None:
        while not ended.wait(SECONDS):
            click.echo(f"{stands} ({time.monotonic() - begun:.0f} s)", err=True)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield move
    finally:
        ended.set()
        thread.join()


def indexing(model: Model, corpus: Corpus, store_path: str, **options: Any) -> Counter[str]:
    """`build_index` with its options; its counts. Shown are sentences, tokens per second and the time left."""
    from icebear.actmax.index import build as index
    from icebear.db.store import open_store

    # What is streamed is not read twice, only to know how much it is.
    total = None if corpus.streamed else sum(1 for _ in corpus.sentences())
    with open_store(store_path, create=True) as store, bar("sentences", total) as move:
        shards = store.scan.shards() if store.path.exists() else {}
        done = sum(size for size in shards.values() if size == index.SHARD)

        def show(progress: Progress) -> None:
            speed = f"{progress.tokens / max(progress.seconds, 1e-9):.0f} tokens/s"
            move(done + progress.sentences, note=speed)

        return index.build_index(model, corpus, store, on_progress=show, **options)


def annotating(model: Model, store: Store, neurons: Sequence[Neuron], k: int) -> int:
    """Attribute examples; how many."""
    from icebear.actmax.index.annotation import annotate

    with bar("examples") as move:
        return annotate(model, store, neurons, k, on_progress=move)
