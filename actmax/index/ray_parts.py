"""The parts of a scan on the workers of a Ray cluster, each part a task that is tried again where a worker dies."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from icebear.actmax.index.corpus import Corpus
from icebear.actmax.index.part_files import parts_in
from icebear.actmax.index.parts import scan_part, shared_head_means
from icebear.actmax.index.scan import INDEXED, indexed_sites
from icebear.errors import InputError, need
from icebear.models.model import Model
from icebear.steps import OnProgress, counting, unwatched
from icebear.values import check_int, typed

PARTS_PER_WORKER = 4
"""So that a worker that is slower, or dies, is not waited for long."""
RETRIES = 3
"""How often a part is retried after its worker died."""


@typed
def scan_on_ray(
    model: Model,
    corpus: Corpus,
    folder: str | Path,
    workers: int,
    address: str | None = None,
    on_progress: OnProgress = unwatched,
    **settings: Any,
) -> int:
    """Scan all parts of a corpus on Ray workers, each with a copy of the model; `merge_parts` merges them.

    Parameters
    ----------
    model, corpus, settings
        As of `scan_part`.
    folder : str or Path
        One that all workers have. Parts that are complete are not scanned again.
    workers : int
        How many parts are scanned at a time. There are four parts for each, or as many as the folder has already.
    address : str, optional
        That of a running cluster, or ``auto``; by default a cluster on this machine for the duration of the scan. A
        worker has the threads of OMP_NUM_THREADS, by default the cores of this machine divided by the workers.
    on_progress : callable
        Called with the number of complete parts, and of all.

    Returns
    -------
    int
        The number of parts.

    Raises
    ------
    InputError
        If there is no cluster, or a worker dies again and again.
    """
    need("ray")
    check_int(workers, "The number of workers")
    count = next(iter(parts_in(Path(folder))), PARTS_PER_WORKER * workers)  # of a scan that was stopped
    threads = int(os.environ.get("OMP_NUM_THREADS", 0)) or max(1, (os.cpu_count() or 1) // workers)
    gpus = (1 if address else 1 / workers) if model.device.type == "cuda" else 0
    if "head" in indexed_sites(model, settings.get("sites", INDEXED)):
        shared_head_means(model, folder)
    with _connected(address, workers * threads) as ray:
        task = ray.remote(num_cpus=threads, num_gpus=gpus, max_retries=RETRIES)(_scanned)
        shared, path = ray.put(model), str(Path(folder).absolute())
        advance = counting(on_progress, count)
        running: list[Any] = []
        for part in range(1, count + 1):
            if len(running) == workers:
                running = _waited(ray, running, advance)
            running.append(task.remote([shared], corpus, path, part, count, threads, settings))
        while running:
            running = _waited(ray, running, advance)
    return count


def _waited(ray: Any, running: list[Any], advance: Callable[[int], None]) -> list[Any]:
    """Wait for a part, and return those that are still scanned."""
    done, running = ray.wait(running)
    ray.get(done)
    advance(len(done))
    return running  # type: ignore[no-any-return]


def _scanned(
    model: list[Any], corpus: Corpus, folder: str, part: int, parts: int, threads: int, settings: dict[str, Any]
) -> None:
    """Scan a part in a worker. model: in a list, because Ray would load it anew for each task."""
    import ray
    import torch

    torch.set_num_threads(threads)
    scan_part(ray.get(model[0]), corpus, folder, part, parts, **settings)


@contextmanager
def _connected(address: str | None, threads: int) -> Iterator[Any]:
    """Yield the module ray; stop a cluster that is started here, and explain the death of a worker."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    with ExitStack() as undo:
        if not ray.is_initialized():
            # The first on the path of Ray's workers, which would run a regex.py of the user's folder.
            with chdir(undo.enter_context(TemporaryDirectory())):
                quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
                try:
                    ray.init(address, **quiet, **({} if address else {"num_cpus": threads}))
                except (ConnectionError, ValueError) as error:
                    reason = str(error).splitlines()[0]
                    raise InputError(f"No Ray cluster at {address} ({reason}); check --address.") from None
            undo.callback(ray.shutdown)
        try:
            yield ray
        except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError) as error:
            reason = (str(error).splitlines() or [""])[-1].strip()[:160]
            raise InputError(
                f"A Ray worker died {RETRIES + 1} times ({reason}); its part is kept. Run the same command again, with "
                "fewer --workers if memory was short."
            ) from None
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from None
