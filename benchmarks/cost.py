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

from icebear.concepts.methods.method import Method
from icebear.concepts.models.model import Model
from icebear.concepts.models.plan import Plan, plan
from icebear.concepts.selftest import seconds

WATTS = 65.0
"""Assumed of a busy CPU, for the estimate of energy; give the machine's own with `watts`."""


def table(
    model: Model,
    methods: Mapping[str, Method],
    lengths: Sequence[int],
    rounds: int = 3,
    watts: float = WATTS,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """A row for each method and length: seconds (median), times a forward pass, peak bytes above before, joules."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    total = len(lengths) * len(methods)
    for length in lengths:
        ids = torch.randint(model.config.vocab_size, (length,), generator=generator).tolist()
        asked = plan(model, [ids]).resolved(model)
        forward = statistics.median(_timed(model, partial(_forward, model, asked))[0] for _ in range(rounds + 1))
        for name, method in methods.items():
            taken = [_timed(model, partial(method.scores, model, asked)) for _ in range(rounds)]
            middle = statistics.median(part[0] for part in taken)
            rows.append(
                {
                    "method": name,
                    "tokens": length,
                    "seconds": middle,
                    "forward passes": middle / forward,
                    "peak MB": max(part[1] for part in taken) / 1e6,
                    "joules (estimate)": middle * watts,
                }
            )
            if on_progress:
                on_progress(len(rows), total)
    return rows


@torch.no_grad()
def _forward(model: Model, plan: Plan) -> None:
    model.logits(plan.batch, list(plan.positions[0]))


def _timed(model: Model, work: Callable[[], Any]) -> tuple[float, int]:
    """Seconds, and the most bytes above before: on CUDA what torch allocates, else what the process has, looked at
    every 5 ms."""
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(model.device)
        had = torch.cuda.memory_allocated(model.device)
        return seconds(work, model.device), torch.cuda.max_memory_allocated(model.device) - had
    before, most, running = _resident(), [0], [True]

    def watch() -> None:
        while running[0]:
            most[0] = max(most[0], _resident() - before)
            time.sleep(0.005)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    taken = seconds(work, model.device)
    running[0] = False
    watcher.join()
    return taken, most[0]


def _resident() -> int:
    """Bytes in memory now; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0
