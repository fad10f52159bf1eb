"""Judge methods on models whose mechanism is known: compiled programs, with decoys and with LayerNorm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from typing import Annotated, Any, ClassVar

import torch

from icebear.concepts.methods.method import Method
from icebear.errors import InputError, UnknownName
from icebear.evaluation.protocol import Line, MethodEvaluation, Part, Setting, Table
from icebear.evaluation.truth.judge import edges
from icebear.evaluation.truth.judge.judging import (
    COLUMNS,
    CONTROLS,
    SITES,
    Judge,
    candidates_of,
    decoys_of,
    relevances,
    scores_of,
    sites_of,
)
from icebear.evaluation.truth.judge.own import read_pairs
from icebear.evaluation.truth.judge.pairs import Pair, pairs_of
from icebear.evaluation.truth.judge.search import truth_of
from icebear.evaluation.truth.judge.tables import by_program, listings, notes, notes_on_pairs, tables
from icebear.evaluation.truth.programs.compiler import Compiled, compiled
from icebear.evaluation.truth.programs.decoys import with_decoys
from icebear.evaluation.truth.programs.program import Program
from icebear.evaluation.truth.programs.programs import PROGRAMS
from icebear.evaluation.truth.programs.trained_programs import names, trained
from icebear.models.loading.loading import load_model

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
TRAINED = "trained"


@dataclass(frozen=True)
class TruthFromOutside(MethodEvaluation):
    """The parts that rank nodes and edges; `icebear.evaluation.truth.judge.evaluation` adds the others."""

    name: ClassVar = "truth"
    needs_model: ClassVar = False
    usual: ClassVar = METHODS
    controls: ClassVar = CONTROLS
    samples: Annotated[int, Setting("Number of pairs of prompts for each model.", least=1)] = 20
    programs: Annotated[str, Setting(f"Separated by commas: {', '.join(PROGRAMS)}.")] = "all"
    own_model: Annotated[
        str | None, Setting("Your own small model in TransformerLens' format, instead of programs.")
    ] = None
    pairs: Annotated[
        str | None, Setting("Pairs of prompts for --own-model: JSON lines (docs/truth.md).", is_file=True)
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        programs_of(self.programs)
        if (self.own_model is None) is not (self.pairs is None):
            raise InputError(
                "Your own model needs pairs of prompts, and pairs need a model; give both --own-model and --pairs."
            )

    def parts(self, model: Any = None) -> Iterator[Part]:
        methods = self.chosen()
        if self.own_model is not None and self.pairs is not None:
            yield self._own(self.own_model, self.pairs, methods)
            return
        programs = programs_of(self.programs)
        yield Part(
            COLUMNS,
            list(product(programs, VARIANTS)),
            partial(measure, methods=methods, count=self.samples, seed=self.seed),
            name="compiled",
            methods={name: name for name in methods},
            tables=tables,
            notes=notes,
            listings=listings,
        )
        if samples := [(name, TRAINED) for name in programs if name in names()]:
            yield Part(
                COLUMNS,
                samples,
                partial(measure, methods=methods, count=self.samples, seed=self.seed),
                name="trained",
                methods={name: name for name in methods},
                tables=tables,
                notes=notes,
                listings=listings,
            )
        yield Part(
            edges.COLUMNS,
            list(product(programs, VARIANTS)),
            partial(measure_edges, seed=self.seed),
            name="edges",
            settings={"pairs of a model": edges.PAIRS, "nodes": edges.NODES},
            tables=lambda lines: {"": Table(edges.COLUMNS, by_program(lines))},
        )

    def _own(self, source: str, file: str, methods: Mapping[str, Method | str]) -> Part:
        model = load_model(source, device="cpu")
        own = dict(enumerate(read_pairs(model, file)))
        return Part(
            COLUMNS,
            list(own),
            lambda number: measured(str(number), "own", Compiled(model), [own[number]], methods, self.seed),
            name="own",
            methods={name: name for name in methods},
            tables=tables,
            notes=notes_on_pairs,
        )


def programs_of(names: str) -> list[str]:
    """Return the programs of a comma-separated list. Raises `UnknownName`."""
    wanted = list(PROGRAMS) if names == "all" else [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in PROGRAMS:
            raise UnknownName("program", name, PROGRAMS, f"The programs are {', '.join(PROGRAMS)}.")
    return wanted


def measure(sample: tuple[str, str], methods: Mapping[str, Method | str], count: int, seed: int = 0) -> Line:
    """Compile or load a model and return its numbers by pair; JSON-ready."""
    name, variant = sample
    chosen = islice(pairs_of(PROGRAMS[name], seed), count)
    return measured(name, variant, made_of(name, variant, seed), chosen, methods, seed)


def made_of(name: str, variant: str, seed: int) -> Compiled:
    """Compile a program in a variant, or load its trained model."""
    return trained(PROGRAMS[name]) if variant == TRAINED else VARIANTS[variant](PROGRAMS[name], seed)


def measured(
    name: str, variant: str, made: Compiled, chosen: Iterable[Pair], methods: Mapping[str, Method | str], seed: int
) -> Line:
    generator = torch.Generator().manual_seed(seed)
    rows = [row for pair in chosen for row in judged(made, pair, methods, generator)]
    return {"program": name, "variant": variant, "counts": bool(rows), "pairs": rows, "methods": {}}


def measure_edges(sample: tuple[str, str], seed: int = 0) -> Line:
    """Compile a model and return the numbers of its edges; JSON-ready."""
    name, variant = sample
    methods = edges.measured(PROGRAMS[name], made_of(name, variant, seed), seed)
    return {"program": name, "variant": variant, "methods": methods}


def judged(
    made: Compiled, pair: Pair, methods: Mapping[str, Method | str], generator: torch.Generator
) -> Iterator[dict[str, Any]]:
    """Yield the truth about a pair and each method's numbers, for the neurons and for neurons and heads."""
    by_method = relevances(made.model, pair, methods)
    for name in sites_of(made.model):
        candidates = candidates_of(made.model, pair, SITES[name])
        if candidates is None:
            continue
        truth = truth_of(candidates)
        judge = Judge(candidates, truth, decoys_of(candidates, made))
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
