"""Progress on stderr: a bar in a terminal, otherwise a line every ten seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import click

import icebear
from icebear.app.cli.streams import unfiltered
from icebear.records import Neuron

if TYPE_CHECKING:
    from icebear.actmax.index.build import Progress
    from icebear.actmax.index.corpus import Corpus

SECONDS = 10.0
"""The time between two lines of progress without a terminal."""


def bar(what: str, total: int | None = None) -> AbstractContextManager[Callable[..., None]]:
    """Show progress in a block, which gets a function of (done, total, note) that moves it."""
    return _drawn(what, total) if sys.stderr.isatty() else _lines(what)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Say at once, in a terminal, that a block without steps runs; otherwise every ten seconds."""
    if sys.stderr.isatty():
        click.echo(f"{what} ...", err=True)
        yield
    else:
        with _lines(what):
            yield


@contextmanager
def _drawn(what: str, total: int | None) -> Iterator[Callable[..., None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from icebear.app.cli.console import SafeConsole

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, TextColumn("{task.fields[note]}"), console=SafeConsole(file=unfiltered(sys.stderr))
    ) as drawn:
        task = drawn.add_task(what, total=total, note="")

        def move(done: int, total: int | None = total, note: str = "") -> None:
            drawn.update(task, completed=done, total=total, note=note)

        yield move


@contextmanager
def _lines(what: str) -> Iterator[Callable[..., None]]:
    begun, ended, line = time.monotonic(), threading.Event(), what

    def move(done: int, total: int | None = None, note: str = "") -> None:
        nonlocal line
        line = f"{what}: {done:,}{f' of {total:,}' if total else ''}{f', {note}' if note else ''}"

    def report() -> None:
        while not ended.wait(SECONDS):
            click.echo(f"{line} ({time.monotonic() - begun:.0f} s)", err=True)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield move
    finally:
        ended.set()
        thread.join()


def indexing(model: icebear.Model, corpus: Corpus, store_path: str, **options: Any) -> Counter[str]:
    """Call `build_index` with its options, show sentences, tokens per second and the time left; return its counts."""
    from icebear.actmax.index.build import SHARD, build_index

    # A streamed corpus is not read twice, only to count it.
    total = None if corpus.streamed else sum(1 for _ in corpus.sentences())
    with icebear.open_store(store_path, create=True) as store, bar("sentences", total) as move:
        shards = store.scan.shards() if store.path.exists() else {}
        done = sum(size for size in shards.values() if size == SHARD)

        def on_progress(progress: Progress) -> None:
            speed = f"{progress.tokens / max(progress.seconds, 1e-9):.0f} tokens/s"
            move(done + progress.sentences, note=speed)

        return build_index(model, corpus, store, on_progress=on_progress, **options)


def annotating(model: icebear.Model, store: icebear.Store, neurons: Sequence[Neuron], k: int) -> int:
    """Call `annotate` with progress; return how many examples it attributed."""
    with bar("examples") as move:
        return icebear.annotate(model, store, neurons, k, on_progress=move)
