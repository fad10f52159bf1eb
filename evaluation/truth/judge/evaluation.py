"""The whole `icebear evaluate truth`: methods, edges, flips and concepts on models whose mechanism is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from icebear.evaluation.protocol import Line, Lines, Part, Table
from icebear.evaluation.truth.judge import flips as truth_flips
from icebear.evaluation.truth.judge import nodes as truth
from icebear.evaluation.truth.judge import variables as truth_variables
from icebear.evaluation.truth.judge.tables import by_program
from icebear.evaluation.truth.programs.compiler import Compiled
from icebear.evaluation.truth.programs.program import Program
from icebear.evaluation.truth.programs.programs import PROGRAMS
from icebear.evaluation.truth.programs.trained_programs import names

Measure = Callable[[Program, Compiled, int], Line]


@dataclass(frozen=True)
class KnownMechanisms(truth.TruthFromOutside):
    """Judge methods on small models whose mechanism is known, compiled from programs or trained to them.

    It needs no model: ten programs are compiled, alone, with decoys, and with decoys and LayerNorm; trained ones come
    with icebear. Interventions find the true nodes of each pair of prompts; the tables show how well each method ranks
    them, how well circuits rank edges, how small flips are, and whether concepts are the right neurons. With
    --own-model and --pairs it judges methods on your own small model.

    Example:
      icebear evaluate truth --programs conditional --samples 2 --methods difference,gxi@midpoint --out truth
    """

    def parts(self, model: Any = None) -> Iterator[Part]:
        yield from super().parts(model)
        if self.own_model is not None:
            return
        programs = truth.programs_of(self.programs)
        able = [name for name in programs if truth_flips.can_flip(PROGRAMS[name])]
        yield Part(
            truth_flips.COLUMNS,
            [*product(able, truth.VARIANTS), *((name, truth.TRAINED) for name in able if name in names())],
            self._by(truth_flips.measured),
            name="flips",
            settings={"pairs of a model": truth_flips.PAIRS},
            tables=flip_tables,
            listings=lambda lines: {"by program and variant": truth_flips.by_model(lines)},
        )
        yield Part(
            truth_variables.COLUMNS,
            list(product(programs, truth.VARIANTS)),
            self._by(truth_variables.measured),
            name="variables",
            settings={"texts of a kind": truth_variables.TEXTS},
            tables=lambda lines: {"": Table(truth_variables.COLUMNS, by_program(lines))},
            listings=lambda lines: {"by program and variant": truth_variables.by_model(lines)},
        )

    def _by(self, measured: Measure) -> Callable[[tuple[str, str]], Line]:
        def measure(sample: tuple[str, str]) -> Line:
            name, variant = sample
            made = truth.made_of(name, variant, self.seed)
            return {"program": name, "variant": variant, **measured(PROGRAMS[name], made, self.seed)}

        return measure


def flip_tables(lines: Lines) -> Mapping[str, Table]:
    """Return a table of compiled and one of trained models; a line is a program."""
    is_trained = {"compiled": False, "trained": True}
    return {
        name: Table(
            truth_flips.COLUMNS, by_program([line for line in lines if (line["variant"] == truth.TRAINED) is some])
        )
        for name, some in is_trained.items()
    }
