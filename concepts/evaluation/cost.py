"""What a method costs: time, memory and an estimate of energy by the length of the prompt (AttnLRP's Figure 8)."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from concepts import tasks
from concepts.baselines.common import resolved
from concepts.evaluation.methods import token_scores
from concepts.models import Model

WATTS = 65.0
"""Assumed of a busy CPU, for the estimate of energy; give the machine's own with `watts`."""


def table(
    model: Model, methods: Mapping[str, Any], lengths: Sequence[int], rounds: int = 3, watts: float = WATTS,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each method and length: seconds (median), times a forward pass, peak bytes above before, joules."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    total = len(lengths) * len(methods)
    for length in lengths:
        ids = torch.randint(model.config.vocab_size, (length,), generator=generator).tolist()
        plan = resolved(model, tasks.plan(model, [ids]))
        forward = statistics.median(_timed(partial(_forward, model, plan))[0] for _ in range(rounds + 1))
        for name, method in methods.items():
            taken = [_timed(partial(token_scores, model, plan, method)) for _ in range(rounds)]
            seconds = statistics.median(part[0] for part in taken)
            rows.append(
                {"method": name, "tokens": length, "seconds": seconds, "forward passes": seconds / forward,
                 "peak MB": max(part[1] for part in taken) / 1e6, "joules (estimate)": seconds * watts}
            )  # fmt: skip
            if on_progress:
                on_progress(len(rows), total)
    return rows


@torch.no_grad()
def _forward(model: Model, plan: tasks.Plan) -> None:
    tasks.logits(model, plan.batch, list(plan.positions[0]))


def _timed(work: Callable[[], Any]) -> tuple[float, int]:
    """Seconds, and the most memory of the process above what it had, looked at every 5 ms (on a GPU: allocated)."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    before, most, running = _resident(), [0], [True]

    def watch() -> None:
        while running[0]:
            most[0] = max(most[0], _resident() - before)
            time.sleep(0.005)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    running[0] = False
    watcher.join()
    return seconds, torch.cuda.max_memory_allocated() if torch.cuda.is_available() else most[0]


def _resident() -> int:
    """Bytes in memory now; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0
