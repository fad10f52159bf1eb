"""What a method costs: time, memory and an estimate of energy by the length of the prompt (AttnLRP's Figure 8).

python -m benchmarks.cost --methods attnlrp,gxi --lengths 16,32 --out cost
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch

from benchmarks.baselines import OTHERS
from icebear.app.cli.verbs.evaluate import command
from icebear.concepts.methods.method import Method
from icebear.concepts.passes.timing import seconds
from icebear.evaluation.baselines import BASELINES, able_and_unable, methods_of
from icebear.evaluation.protocol import Evaluation, Methods, Part, Setting
from icebear.models.model import Model
from icebear.models.objective import Objective, objective_of

COLUMNS = {
    "seconds": "median [quartiles] over rounds, lower is better",
    "forward passes": "median of the same, as a multiple of a forward pass, lower is better",
    "peak MB": "median of the memory above before, lower is better",
    "joules": "median of an estimate of the energy, lower is better",
}


@dataclass(frozen=True)
class Cost(Evaluation):
    """Time, memory and an estimate of energy of each method, by the length of the prompt, a folder each."""

    name: ClassVar = "cost"
    methods: Methods = "all"
    lengths: Annotated[str, Setting("Of prompts, in tokens.", decides=False)] = "32,128"
    watts: Annotated[float, Setting("Of the machine while busy, for the energy.")] = 65.0
    rounds: Annotated[int, Setting("How often each is measured.", least=1)] = 3

    def parts(self, model: Model) -> Iterator[Part]:
        generator = torch.Generator().manual_seed(0)
        methods, unable = able_and_unable(model, list(range(10, 20)), methods_of(self.methods))
        for length in map(int, self.lengths.split(",")):
            ids = torch.randint(model.config.vocab_size, (length,), generator=generator).tolist()
            yield Part(
                COLUMNS,
                range(self.rounds),
                partial(self.round, model, objective_of(model, [ids]).resolved(model), methods),
                name=f"{length} tokens",
                methods=methods,
                unable=unable,
            )

    def round(self, model: Model, objective: Objective, methods: Mapping[str, Method], _: int) -> dict[str, Any]:
        forward = min(_timed(model, partial(_forward, model, objective))[0] for _ in range(2))
        rows = {}
        for name, method in methods.items():
            taken, memory = _timed(model, partial(method.scores, model, objective))
            numbers = (taken, taken / forward, memory / 1e6, taken * self.watts)
            rows[name] = dict(zip(COLUMNS, numbers, strict=True))
        return {"forward": forward, "methods": rows}


@torch.no_grad()
def _forward(model: Model, plan: Objective) -> None:
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


if __name__ == "__main__":
    BASELINES.update(OTHERS)
    command(Cost)()
