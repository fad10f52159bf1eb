"""Engines scan shards in this process or on a Ray cluster, and yield finished shards in any order."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, chdir, contextmanager
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from icebear.actmax.index.activation_statistics import ScanSummary
from icebear.actmax.index.scan import Settings, scan_shard, sums_up
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.records import Sentence

Shards = Iterable[tuple[int, list[Sentence]]]
Scanned = Iterator[tuple[int, list[Sentence], ScanSummary, Tensor]]
"""The number of a shard, its sentences, their summary and their vectors."""
Engine = Callable[[Model, Settings, Shards, Callable[[], Tensor]], Scanned]
"""The last argument returns the values (2, N) that an example must reach."""


RETRIES = 3
"""The number of retries of a shard whose Ray worker died, and of the worker."""


def in_process(
    model: Model,
    settings: Settings,
    shards: Shards,
    threshold: Callable[[], Tensor],
    on_batch: Callable[[Sequence[Sentence]], None] = lambda sentences: None,
    batch_size: int | None = None,
) -> Scanned:
    """Scan one shard after the other in this process.

    on_batch: called with the sentences of each batch. batch_size: of small batches other threads wait less.
    """
    for number, shard in shards:
        sums = sums_up(number, settings.seed)
        options: dict[str, Any] = {"sums": sums, "on_batch": on_batch, "batch_size": batch_size}
        yield number, shard, *scan_shard(model, shard, settings, threshold(), **options)


def on_ray(workers: int = 2, address: str | None = None) -> Engine:
    """Return an engine that scans shards on Ray workers, each with its own copy of the model.

    The shard of a dead worker is scanned again; after `RETRIES` failures the engine raises `InputError`.

    address: the address of a running cluster; None starts a cluster on this machine for the duration of the scan. If
    this process has already started Ray, that cluster is used and left running. Each worker uses OMP_NUM_THREADS
    threads, by default the number of cores divided by the number of workers. The same number of threads gives the same
    numbers, bit for bit.
    """
    if workers < 1:
        raise InputError(f"A Ray scan needs at least 1 worker, not {workers}.")

    def run(model: Model, settings: Settings, shards: Shards, threshold: Callable[[], Tensor]) -> Scanned:
        with _connected(address) as ray:
            threads = int(os.environ.get("OMP_NUM_THREADS", 0)) or max(1, (os.cpu_count() or 1) // workers)
            have = ray.cluster_resources().get("CPU", 0)
            if address and workers * threads > have:
                raise InputError(
                    f"{workers} workers of {threads} threads need more than the cluster's {have:.0f} cores; ask for "
                    "fewer --workers, or set OMP_NUM_THREADS."
                )
            worker = ray.remote(
                num_cpus=0 if address is None else threads,
                num_gpus=(1 if address else 1 / workers) if model.device.type == "cuda" else 0,
                max_restarts=RETRIES,
                max_task_retries=RETRIES,
            )(_Worker)
            shared = ray.put(model)  # for workers that restart
            actors = [worker.remote([shared], settings, threads) for _ in range(workers)]
            try:
                yield from _scattered(ray, actors, shards, threshold)
            finally:
                for actor in actors:
                    ray.kill(actor)

    return run


def _scattered(ray: Any, actors: list[Any], shards: Shards, threshold: Callable[[], Tensor]) -> Scanned:
    """Give a shard to each idle worker, and yield shards as they finish."""
    idle = list(actors)
    running: dict[Any, tuple[int, list[Sentence], Any]] = {}

    def finished() -> tuple[int, list[Sentence], ScanSummary, Tensor]:
        (task,), _ = ray.wait(list(running))
        number, shard, actor = running.pop(task)
        idle.append(actor)
        return number, shard, *ray.get(task)

    for number, shard in shards:
        while not idle:
            yield finished()
        actor = idle.pop()
        running[actor.scan.remote(number, shard, threshold())] = (number, shard, actor)
    while running:
        yield finished()


class _Worker:
    """A process of the cluster."""

    def __init__(self, model: list[Any], settings: Settings, threads: int):
        import ray
        import torch

        torch.set_num_threads(threads)
        self.model, self.settings = ray.get(model[0]), settings

    def scan(self, number: int, shard: list[Sentence], threshold: Tensor) -> tuple[ScanSummary, Tensor]:
        return scan_shard(self.model, shard, self.settings, threshold, sums=sums_up(number, self.settings.seed))


@contextmanager
def _connected(address: str | None) -> Iterator[Any]:
    """Yield the module ray; stop a cluster that is started here, and explain the death of a worker."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise InputError("The engine ray needs Ray; pip install ray.") from None
    with ExitStack() as undo:
        if not ray.is_initialized():
            empty = undo.enter_context(TemporaryDirectory())
            try:
                with chdir(
                    empty
                ):  # first on the path of Ray's workers, which would run a regex.py of the user's folder
                    ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, ValueError) as error:
                reason = str(error).splitlines()[0]
                raise InputError(f"No Ray cluster at {address} ({reason}); check --address, or leave it out.") from None
            undo.callback(ray.shutdown)
        try:
            yield ray
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
            reason = (str(error).splitlines() or [""])[-1].strip()[:160]
            raise InputError(
                f"A Ray worker died and could not be brought back ({reason}); try fewer --workers if "
                "memory was short, or --engine local."
            ) from None
