"""Judge methods and stages on small models whose mechanism is known (docs/truth.md).

python -m benchmarks.truth.judge.evaluation --programs previous --samples 1 --methods difference,random --out truth
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from typing import Annotated, Any, ClassVar

import torch

from benchmarks.baselines import ControlledEvaluation
from benchmarks.task_pairs import named
from benchmarks.truth.judge import true_stages
from benchmarks.truth.judge.judged_pairs import Pair, pairs_of
from benchmarks.truth.judge.judging import (
    CONTROLS,
    METRICS,
    SITES,
    Judge,
    candidates_of,
    decoys_of,
    relevances,
    scores_of,
    sites_of,
    truth_of,
)
from benchmarks.truth.judge.truth_tables import by_program, listings, notes, tables
from benchmarks.truth.programs.compiler import Compiled, compiled, names, trained
from benchmarks.truth.programs.decoys import with_decoys
from benchmarks.truth.programs.program import Program
from benchmarks.truth.programs.programs import PROGRAMS
from icebear.app.cli.verbs.evaluate import command
from icebear.concepts.methods.method import Method
from icebear.evaluation.protocol import Line, Lines, Part, Setting, Table

METHODS = (
    *("difference", "difference-constant", "attnlrp", "attnlrp@prompt", "attnlrp@midpoint", "cp-lrp"),
    *("cp-lrp@midpoint", "gxi", "gxi@prompt", "gxi@midpoint", "ig@path", *CONTROLS),
)
NORM_PROMPTS = 64
"""Prompts that LayerNorm's divisor is measured on."""
Sample = tuple[str, str]
"""A program and a variant."""
TRAINED = "trained"


def plain(program: Program, seed: int) -> Compiled:
    return compiled(program.circuitry(), program.name)


def decoys(program: Program, seed: int) -> Compiled:
    return compiled(with_decoys(program.circuitry(), seed), program.name)


def normed(program: Program, seed: int) -> Compiled:
    prompts = islice(pairs_of(program, seed), NORM_PROMPTS)
    return compiled(with_decoys(program.circuitry(), seed), program.name, [pair.prompt for pair in prompts], seed)


VARIANTS: dict[str, Callable[[Program, int], Compiled]] = {
    "plain": plain,
    "decoys": decoys,
    "decoys, LayerNorm": normed,
}
"""The program alone; with decoys; with decoys, rotated, and read through LayerNorm."""


@dataclass(frozen=True)
class KnownMechanisms(ControlledEvaluation):
    """Judge methods on small models whose mechanism is known, compiled from programs or trained to them.

    It needs no model: ten programs are compiled, alone, with decoys, and with decoys and LayerNorm; others are
    trained. Interventions find the true nodes of each pair of prompts; the tables show how well each method ranks
    them, and whether stages name the true heads.
    """

    name: ClassVar = "truth"
    needs_model: ClassVar = False
    usual: ClassVar = METHODS
    controls: ClassVar = CONTROLS
    samples: Annotated[int, Setting("Number of pairs of prompts for each model.", least=1)] = 20
    programs: Annotated[str, Setting(f"Separated by commas: {', '.join(PROGRAMS)}.")] = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        named(self.programs, "program", PROGRAMS)

    def parts(self, model: Any = None) -> Iterator[Part]:
        methods = self.chosen()
        programs = named(self.programs, "program", PROGRAMS)
        known, learnt = list(product(programs, VARIANTS)), [(name, TRAINED) for name in programs if name in names()]
        for part, samples in (("compiled", known), ("trained", learnt)):
            if samples:
                yield Part(
                    METRICS,
                    samples,
                    partial(measure, methods=methods, count=self.samples, seed=self.seed),
                    name=part,
                    methods={name: name for name in methods},
                    tables=tables,
                    notes=notes,
                    listings=listings,
                )
        yield Part(
            true_stages.METRICS,
            [*known, *learnt],
            partial(measure_model, measured=true_stages.measured, seed=self.seed),
            name="stages",
            settings={"pairs of a model": true_stages.PAIRS},
            tables=partial(by_origin, true_stages.METRICS),
            listings=lambda lines: {"by variant and kind of decoys": true_stages.by_kind(lines)},
        )


def by_origin(metrics: Mapping[str, str], lines: Lines) -> Mapping[str, Table]:
    """Return a table of compiled and one of trained models; a line is a program."""
    origins: dict[str, list[Line]] = {"compiled": [], TRAINED: []}
    for line in lines:
        if line.get("counts", True):
            origins[TRAINED if line["variant"] == TRAINED else "compiled"].append(line)
    return {origin: Table(metrics, by_program(rows)) for origin, rows in origins.items()}


def measure(sample: Sample, methods: Mapping[str, Method | str], count: int, seed: int = 0) -> Line:
    """Compile or load a model and return its numbers by pair; JSON-ready."""
    name, variant = sample
    chosen = islice(pairs_of(PROGRAMS[name], seed), count)
    return measured(name, variant, model_of(name, variant, seed), chosen, methods, seed)


def measure_model(sample: Sample, measured: Callable[[Program, Compiled, int], Line], seed: int) -> Line:
    """Compile or load a model and return what is measured of it; JSON-ready."""
    name, variant = sample
    return {"program": name, "variant": variant, **measured(PROGRAMS[name], model_of(name, variant, seed), seed)}


def model_of(name: str, variant: str, seed: int) -> Compiled:
    """Compile a program in a variant, or load its trained model."""
    return trained(PROGRAMS[name]) if variant == TRAINED else VARIANTS[variant](PROGRAMS[name], seed)


def measured(
    name: str, variant: str, compiled: Compiled, chosen: Iterable[Pair], methods: Mapping[str, Method | str], seed: int
) -> Line:
    generator = torch.Generator().manual_seed(seed)
    rows = [row for pair in chosen for row in judged(compiled, pair, methods, generator)]
    return {"program": name, "variant": variant, "counts": bool(rows), "pairs": rows, "methods": {}}


def judged(
    compiled: Compiled, pair: Pair, methods: Mapping[str, Method | str], generator: torch.Generator
) -> Iterator[dict[str, Any]]:
    """Yield the truth about a pair and each method's numbers, for the neurons and for neurons and heads."""
    by_method = relevances(compiled.model, pair, methods)
    for name in sites_of(compiled.model):
        candidates = candidates_of(compiled.model, pair, SITES[name])
        if candidates is None:
            continue
        truth = truth_of(candidates)
        judge = Judge(candidates, truth, decoys_of(candidates, compiled))
        scores = scores_of(candidates, methods, by_method, generator)
        yield {
            "sites": name,
            "hard": judge.is_hard,
            "differ": len(candidates),
            "k": judge.k,
            "proved": truth.proved,
            "alone": truth.alone.abs().gt(0.1).float().mean().item(),
            "methods": {method: judge.numbers(x, generator) for method, x in scores.items()},
            "decoys": {method: judge.first_decoys(x, generator) for method, x in scores.items()},
        }


if __name__ == "__main__":
    command(KnownMechanisms)()
