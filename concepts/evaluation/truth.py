"""Judge methods on models whose mechanism is known: compiled programs, with decoys and with LayerNorm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from statistics import fmean
from typing import Annotated, Any, ClassVar

import numpy as np
import torch

from icebear.concepts.evaluation.protocol import Line, Lines, MethodEvaluation, Part, Setting, Table
from icebear.concepts.methods.method import Method
from icebear.concepts.truth.compiler import Compiled, compiled
from icebear.concepts.truth.decoys import KINDS, with_decoys
from icebear.concepts.truth.judging import (
    COLUMNS,
    CONTROLS,
    SITES,
    Judge,
    candidates_of,
    decoys_of,
    relevances,
    scores_of,
)
from icebear.concepts.truth.pairs import Pair, pairs_of
from icebear.concepts.truth.program import Program
from icebear.concepts.truth.programs import PROGRAMS
from icebear.concepts.truth.search import truth_of
from icebear.errors import UnknownName

METHODS = (
    *(
        "difference",
        "difference-constant",
        "attnlrp",
        "attnlrp@prompt",
        "attnlrp@midpoint",
        "cp-lrp",
        "cp-lrp@midpoint",
    ),
    *("gxi", "gxi@prompt", "gxi@midpoint", "ig@path", *CONTROLS),
)
NORM_PROMPTS = 64
"""Prompts that LayerNorm's divisor is measured on."""
RESAMPLES = 2000
Variant = Callable[[Program, int], Compiled]


def plain(program: Program, seed: int) -> Compiled:
    return compiled(program.circuitry(), program.name)


def decoys(program: Program, seed: int) -> Compiled:
    return compiled(with_decoys(program.circuitry(), seed), program.name)


def normed(program: Program, seed: int) -> Compiled:
    prompts = islice(pairs_of(program, seed), NORM_PROMPTS)
    return compiled(with_decoys(program.circuitry(), seed), program.name, [pair.prompt for pair in prompts], seed)


VARIANTS: dict[str, Variant] = {"plain": plain, "decoys": decoys, "decoys, LayerNorm": normed}
"""The program alone; with decoys; with decoys, rotated, and read through LayerNorm."""


@dataclass(frozen=True)
class TruthFromOutside(MethodEvaluation):
    """Judge methods on small models whose mechanism is known, compiled from programs.

    It needs no model: ten programs are compiled, alone, with decoys, and with decoys and LayerNorm. Interventions find
    the true nodes of each pair of prompts; the table shows how well each method ranks them.

    Example:
      icebear evaluate truth --programs conditional --samples 2 --methods difference,gxi@midpoint --out truth
    """

    name: ClassVar = "truth"
    needs_model: ClassVar = False
    usual: ClassVar = METHODS
    controls: ClassVar = CONTROLS
    samples: Annotated[int, Setting("Number of pairs of prompts for each model.", least=1)] = 20
    programs: Annotated[str, Setting(f"Separated by commas: {', '.join(PROGRAMS)}.")] = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        programs_of(self.programs)

    def parts(self, model: Any = None) -> Iterator[Part]:
        methods = self.chosen()
        yield Part(
            COLUMNS,
            list(product(programs_of(self.programs), VARIANTS)),
            partial(measure, methods=methods, count=self.samples, seed=self.seed),
            name="compiled",
            methods={name: name for name in methods},
            tables=tables,
            notes=notes,
            listings=listings,
        )


def programs_of(names: str) -> list[str]:
    """Return the programs of a comma-separated list. Raises `UnknownName`."""
    wanted = list(PROGRAMS) if names == "all" else [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in PROGRAMS:
            raise UnknownName("program", name, PROGRAMS, f"The programs are {', '.join(PROGRAMS)}.")
    return wanted


def measure(sample: tuple[str, str], methods: Mapping[str, Method | str], count: int, seed: int = 0) -> Line:
    """Compile a model and return its numbers by pair; JSON-ready."""
    name, variant = sample
    program = PROGRAMS[name]
    made = VARIANTS[variant](program, seed)
    generator = torch.Generator().manual_seed(seed)
    chosen = islice(pairs_of(program, seed), count)
    rows = [row for pair in chosen for row in judged(made, pair, methods, generator)]
    return {"program": name, "variant": variant, "counts": bool(rows), "pairs": rows, "methods": {}}


def judged(
    made: Compiled, pair: Pair, methods: Mapping[str, Method | str], generator: torch.Generator
) -> Iterator[dict[str, Any]]:
    """Yield the truth about a pair and each method's numbers, for the neurons and for neurons and heads."""
    by_method = relevances(made.model, pair, methods)
    for name, sites in SITES.items():
        candidates = candidates_of(made.model, pair, sites)
        if candidates is None:
            continue
        truth = truth_of(candidates)
        judge = Judge(candidates, truth, decoys_of(candidates, made))
        scores = scores_of(candidates, methods, by_method, generator.initial_seed())
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


# --- reports --------------------------------------------------------------------------------------------


def rows_of(lines: Lines, sites: str, only_hard: bool) -> dict[str, list[dict[str, Any]]]:
    """Return program -> its pairs in all variants."""
    result: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        some = [row for row in line["pairs"] if row["sites"] == sites and (row["hard"] or not only_hard)]
        if some:
            result.setdefault(line["program"], []).extend(some)
    return result


def means(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return method -> column -> mean over pairs."""
    return {
        method: {column: fmean(row["methods"][method][column] for row in rows) for column in COLUMNS}
        for method in rows[0]["methods"]
    }


def tables(lines: Lines) -> dict[str, Table]:
    """Return a table of hard pairs and one of all pairs, of neurons and of neurons and heads; a line is a program."""
    return {
        f"{sites}, {'hard' if only_hard else 'all'} pairs": Table(
            COLUMNS,
            [{"program": name, "methods": means(rows)} for name, rows in rows_of(lines, sites, only_hard).items()],
        )
        for sites in SITES
        for only_hard in (True, False)
    }


def notes(lines: Lines) -> list[str]:
    rows = [row for line in lines for row in line["pairs"]]
    hard = sum(row["hard"] for row in rows)
    proved = sum(row["proved"] for row in rows)
    return [
        "A sample of a table is a program: the mean over its models and pairs, so that p is over programs.",
        f"{len(lines)} models; of {len(rows)} searches {hard} are hard, and {proved} smallest sets are proved.",
    ]


def listings(lines: Lines) -> dict[str, list[dict[str, Any]]]:
    return {
        "difference rules minus another method, 95 % by bootstrap over programs, hard pairs": intervals(lines),
        "by program and variant, hard pairs": by_model(lines),
        "rank of the first decoy over k": first_decoys(lines),
    }


def intervals(lines: Lines) -> list[dict[str, Any]]:
    """Return the first method's mean numbers minus those of each other method, with a bootstrap interval."""
    generator, result = np.random.default_rng(0), []
    for sites in SITES:
        programs = [means(rows) for rows in rows_of(lines, sites, True).values()]
        first, *others = programs[0] if programs else [""]
        for method in others:
            row: dict[str, Any] = {"sites": sites, "method": method}
            for column in ("at_2k", "area"):
                gains = np.array([row[first][column] - row[method][column] for row in programs])
                drawn = gains[generator.integers(len(gains), size=(RESAMPLES, len(gains)))].mean(1)
                low, high = np.quantile(drawn, (0.025, 0.975)).tolist()
                row |= {column: float(gains.mean()), f"{column} low": low, f"{column} high": high}
            result.append(row)
    return result


def by_model(lines: Lines) -> list[dict[str, Any]]:
    """Return a row for each model with its truth and the first method's numbers."""
    result = []
    for line, sites in product(lines, SITES):
        rows = [row for row in line["pairs"] if row["sites"] == sites and row["hard"]]
        if rows:
            first, numbers = next(iter(means(rows).items()))
            facts = {name: fmean(row[name] for row in rows) for name in ("differ", "k", "proved")}
            row = {"program": line["program"], "variant": line["variant"], "sites": sites, "pairs": len(rows), **facts}
            result.append({**row, "method": first, **{name: numbers[name] for name in ("at_k", "at_2k", "area")}})
    return result


def first_decoys(lines: Lines) -> list[dict[str, Any]]:
    """Return the median over pairs of the rank of the first decoy of each kind, over k."""
    ranks: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in (row for line in lines for row in line["pairs"]):
        for method, kinds in row["decoys"].items():
            for kind, rank in kinds.items():
                ranks.setdefault((row["sites"], method), {}).setdefault(kind, []).append(rank)
    return [
        {"sites": sites, "method": method, **{kind: float(np.median(kinds[kind])) for kind in KINDS if kind in kinds}}
        for (sites, method), kinds in sorted(ranks.items())
    ]
