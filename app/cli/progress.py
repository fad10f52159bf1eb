"""Progress on stderr: a bar in a terminal, otherwise a line every ten seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import click

import icebear
from icebear.app.cli.streams import unfiltered
from icebear.records import Neuron
from icebear.steps import OnProgress

if TYPE_CHECKING:
    from icebear.actmax.index.corpus import Corpus

SECONDS = 10.0
"""The time between two lines of progress without a terminal."""


def bar(what: str) -> AbstractContextManager[OnProgress]:
    """Show progress in a block, which gets the function that moves it."""
    return _drawn(what) if sys.stderr.isatty() else _lines(what)


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
def _drawn(what: str) -> Iterator[OnProgress]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from icebear.app.cli.console import SafeConsole

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=SafeConsole(file=unfiltered(sys.stderr))) as drawn:
        task = drawn.add_task(what, total=None)
        yield lambda done, total: drawn.update(task, completed=done, total=total or None)


@contextmanager
def _lines(what: str) -> Iterator[OnProgress]:
    begun, ended, line = time.monotonic(), threading.Event(), what

    def move(done: int, total: int) -> None:
        nonlocal line
        line = f"{what}: {done:,}{f' of {total:,}' if total else ''}"

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


def indexing(
    model: icebear.Model, corpus: Corpus, store_path: str, encoder: icebear.Encoder | None, **options: Any
) -> Counter[str]:
    """Call `build_index` with its options and progress, then `embed_examples`; return the counts of the index."""
    with icebear.open_store(store_path, create=True) as store:
        with bar(corpus.facts.get("input", "sentences")) as move:
            counts = icebear.build_index(model, corpus, store, on_progress=move, **options)
        _embed(store, encoder)
    return counts


def merging(model: icebear.Model, folder: str, store_path: str, encoder: icebear.Encoder | None) -> Counter[str]:
    """Call `merge_parts`, then `embed_examples`; return the counts of the index."""
    with icebear.open_store(store_path, create=True) as store:
        with waiting("Merging the parts"):
            counts = icebear.merge_parts(model, folder, store)
        _embed(store, encoder)
    return counts


def _embed(store: icebear.Store, encoder: icebear.Encoder | None) -> None:
    if encoder and not store.is_of_images:
        with bar("sentences encoded") as move:
            icebear.embed_examples(store, encoder, move)


def annotating(model: icebear.Model, store: icebear.Store, neurons: Sequence[Neuron], k: int) -> int:
    """Call `annotate` with progress; return how many examples it attributed."""
    with bar("examples") as move:
        return icebear.annotate(model, store, neurons, k, on_progress=move)
