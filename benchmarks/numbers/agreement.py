"""Subject-verb agreement of Marks et al. (simple, nounpp, within_rc; test part) by few FFN neurons.

python -m benchmarks.numbers.agreement --samples 30 --out sva

Sufficiency and necessity of the FFN neurons at a token that a score ranks first, by their number; other neurons (for
necessity: these) take their values in the other prompt of the pair. Pairs on which the model is right by half a logit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from benchmarks.ablation import CONTROLS, MATCHED, SIZES, ablate
from benchmarks.numbers import common
from benchmarks.task_pairs import Pair, is_usable
from icebear.app.cli.verbs.evaluate import command
from icebear.concepts.methods.registry import method_of
from icebear.evaluation.protocol import Evaluation, Part, Seed
from icebear.models.model import Model

SETS = ("simple", "nounpp", "within_rc")
METHODS = ("difference", "cp-lrp@prompt", "gxi@prompt", "gxi@midpoint", "ig@path", "change", MATCHED)
"""RelP is cp-lrp@prompt, attribution patching gxi@prompt; change and matched are controls (`ablation`)."""
SHOWN = (10, 30, 100, 300, 1000)
COLUMNS = {
    **{f"sufficiency {size}": f"share of the difference by {size} neurons alone" for size in SHOWN},
    **{f"necessity {size}": f"share lost without {size} neurons" for size in SHOWN},
}


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


def usable(model: Model, every: Sequence[Pair], count: int) -> tuple[list[Pair], int]:
    """Return the first `count` pairs on which the model is right, and how many were tried."""
    chosen: list[Pair] = []
    tried = 0
    for pair in every:
        if len(chosen) == count:
            break
        tried += 1
        chosen += [pair] if is_usable(model, pair) else []
    return chosen, tried


def is_first(model: Model, pair: Pair) -> bool:
    """Return whether both answers are the most probable next tokens, without which `stages` shows no shares."""
    answers = [answer.strip() for answer in (pair.answer, pair.counterfactual_answer)]
    return all(common.are_right(model, (pair.prompt, pair.counterfactual), answers))


def measured(model: Model, pair: Pair, methods: Mapping[str, Any]) -> dict[str, Any]:
    row = ablate(model, pair, methods)
    for name, of in row["methods"].items():
        shares = {size: SIZES.index(size) for size in SHOWN}
        sufficiency = {f"sufficiency {size}": of["curve_sufficiency"][at] for size, at in shares.items()}
        necessity = {f"necessity {size}": 1 - of["curve_remaining"][at] for size, at in shares.items()}
        row["methods"][name] = sufficiency | necessity
    return row


@dataclass(frozen=True)
class Agreement(Evaluation):
    """Sufficiency and necessity by number of neurons on subject-verb agreement."""

    name: ClassVar = "sva"
    samples: common.Samples = 30
    seed: Seed = 0

    def parts(self, model: Model) -> Iterator[Part]:
        methods = {name: name if name in CONTROLS else method_of(name) for name in METHODS}
        for name in SETS:
            chosen, tried = usable(model, pairs(name, self.seed), self.samples)
            first = sum(is_first(model, pair) for pair in chosen)
            note = f"the model is right on {len(chosen)} of {tried} pairs; both answers are first words in {first}"
            measure = partial(measured, model, methods=methods)
            yield Part(COLUMNS, chosen, measure, name=name, notes=lambda lines, note=note: [note])


if __name__ == "__main__":
    command(Agreement)()
