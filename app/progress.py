"""Long work with a progress bar on stderr."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from actmax import index
from actmax.annotation import annotate
from actmax.corpus import Corpus
from concepts.models.model import Model
from db.store import Store, open_store
from icebear.records import Neuron


def indexing(model: Model, corpus: Corpus, store_path: str, **options: Any) -> None:
    """`build_index` with its options, showing sentences, tokens per second and the time left."""
    console = Console(stderr=True, highlight=False)
    # What is streamed is not read twice, only to know how much it is.
    total = None if corpus.streamed else sum(1 for _ in corpus.sentences())
    of = "" if total is None else f"/{total}"
    columns = (TextColumn(f"{{task.completed}}{of} sentences"), BarColumn(), TextColumn("{task.fields[speed]}"))
    with open_store(store_path) as store, Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        done = sum(size for size in store.scanned().values() if size == index.SHARD)
        task = bar.add_task("", total=total, completed=done, speed="")

        def show(progress: index.Progress) -> None:
            speed = f"{progress.tokens / max(progress.seconds, 1e-9):.0f} tokens/s"
            bar.update(task, completed=done + progress.sentences, speed=speed)

        try:
            counts = index.build_index(model, corpus, store, on_progress=show, **options)
            bar.update(task, total=counts["sentences"], completed=counts["sentences"])
        except KeyboardInterrupt:
            console.print("Interrupted; the same command goes on from the last commit.")
            raise SystemExit(130) from None
    summary = ", ".join(f"{count:,} {what}" for what, count in counts.items())
    console.print(f"{store_path}: {summary}", highlight=False)


def annotating(model: Model, store: Store, neurons: Sequence[Neuron], k: int) -> None:
    """Attribute examples, showing how many are done."""
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.completed}/{task.total} examples"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=None)
        annotate(
            model, store, neurons, k, on_progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
