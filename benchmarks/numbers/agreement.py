"""Subject-verb agreement of Marks et al. (simple, nounpp, within_rc; test part): few neurons, and the stages of nounpp.

python -m benchmarks.numbers.agreement --samples 30 --out sva

Sufficiency and necessity of the FFN neurons at a token that a score ranks first, by their number; other neurons (for
necessity: these) take their values in the other prompt of the pair. Pairs on which the model is right by half a logit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from benchmarks.numbers import common
from icebear.app.cli.verbs.evaluate import command
from icebear.concepts.methods.registry import method_of
from icebear.concepts.stages.explained_task import explain_task
from icebear.evaluation.data.task_pairs import Pair, is_usable
from icebear.evaluation.explanations.ablation import CONTROLS, MATCHED, SIZES, ablate
from icebear.evaluation.protocol import Evaluation, Lines, Part, Seed
from icebear.models.model import Model

SETS = ("simple", "nounpp", "within_rc")
METHODS = ("difference", "cp-lrp@prompt", "gxi@prompt", "gxi@midpoint", "ig@path", "change", MATCHED)
"""RelP is cp-lrp@prompt, attribution patching gxi@prompt; change and matched are controls (`ablation`)."""
SHOWN = (10, 30, 100, 300, 1000)
COLUMNS = {
    **{f"sufficiency {size}": f"share of the difference by {size} neurons alone" for size in SHOWN},
    **{f"necessity {size}": f"share lost without {size} neurons" for size in SHOWN},
}
STAGES = {
    "share": "of the shared set, on pairs that did not choose it",
    "without": "lost without it",
    "random": "as many",
}
STAGED = 12
"""Pairs of nounpp whose stages are computed."""


def pairs(name: str, seed: int) -> list[Pair]:
    """Return the test pairs, each prompt in one pair only."""
    seen: set[str] = set()
    chosen = []
    for row in common.shuffled(common.read(f"sva/{name}_test.json"), seed):
        pair = Pair(*(row[key] for key in ("clean_prefix", "patch_prefix", "clean_answer", "patch_answer")))
        if not seen & {pair.prompt, pair.counterfactual}:
            chosen.append(pair)
            seen |= {pair.prompt, pair.counterfactual}
    return chosen


def usable(
    model: Model, every: Sequence[Pair], count: int, fits: Callable[[Model, Pair], bool] = is_usable
) -> tuple[list[Pair], int]:
    """Return the first `count` pairs on which the model is right, and how many were tried."""
    chosen: list[Pair] = []
    tried = 0
    for pair in every:
        if len(chosen) == count:
            break
        tried += 1
        chosen += [pair] if fits(model, pair) else []
    return chosen, tried


def is_first(model: Model, pair: Pair) -> bool:
    """Return whether both answers are the most probable next tokens, of prompts of equal length."""
    prompts, answers = (pair.prompt, pair.counterfactual), (pair.answer, pair.counterfactual_answer)
    lengths = {len(model.token_ids(prompt)) for prompt in prompts}
    return len(lengths) == 1 and all(common.are_right(model, prompts, [answer.strip() for answer in answers]))


def measured(model: Model, pair: Pair, methods: Mapping[str, Any]) -> dict[str, Any]:
    row = ablate(model, pair, methods)
    for name, of in row["methods"].items():
        shares = {size: SIZES.index(size) for size in SHOWN}
        sufficiency = {f"sufficiency {size}": of["curve_sufficiency"][at] for size, at in shares.items()}
        necessity = {f"necessity {size}": 1 - of["curve_remaining"][at] for size, at in shares.items()}
        row["methods"][name] = sufficiency | necessity
    return row


def staged(model: Model, chosen: Sequence[Pair], seed: int) -> dict[str, Any]:
    """Return what the pairs of nounpp share: chosen on half of them, measured on the others."""
    rows = [{"prompt": pair.prompt, "counterfactual": pair.counterfactual} for pair in chosen]
    task = explain_task(model, rows, seed)
    numbers = {"share": task.share, "without": task.without, "random": task.random}
    sets = {"heads": [str(head) for head in task.heads], "neurons": [str(neuron) for neuron in task.neurons]}
    return {**sets, "low": task.low, "high": task.high, "pairs": len(task.compared), "methods": {"shared set": numbers}}


def of_stages(tried: int, lines: Lines) -> list[str]:
    (line,) = lines
    sets = f"{', '.join(line['heads'])} and {len(line['neurons'])} neurons"
    first = f"of {tried} pairs {line['pairs']} have both answers as first words"
    return [f"{first} and share {sets}; 95 % of the share {line['low']:.2f} to {line['high']:.2f}"]


@dataclass(frozen=True)
class Agreement(Evaluation):
    """Sufficiency and necessity by number of neurons on subject-verb agreement, and the stages of nounpp."""

    name: ClassVar = "sva"
    samples: common.Samples = 30
    seed: Seed = 0

    def parts(self, model: Model) -> Iterator[Part]:
        methods = {name: name if name in CONTROLS else method_of(name) for name in METHODS}
        for name in SETS:
            chosen, tried = usable(model, pairs(name, self.seed), self.samples)
            note = f"the model is right on {len(chosen)} of {tried} pairs"
            measure = partial(measured, model, methods=methods)
            yield Part(COLUMNS, chosen, measure, name=name, notes=lambda lines, note=note: [note])
        chosen, tried = usable(model, pairs("nounpp", self.seed), STAGED, is_first)
        yield Part(
            STAGES, [chosen], partial(staged, model, seed=self.seed), name="stages", notes=partial(of_stages, tried)
        )


if __name__ == "__main__":
    command(Agreement)()
