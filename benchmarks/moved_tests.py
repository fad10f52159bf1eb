"""Does `make test` see the faults that the tests of `make dist` see? Mutants of the code that these execute.

It draws mutants (operators: mutations.py) of the statements that tests of `make dist` execute, in all folders but
icebear/. Each runs the tests of `make test` that execute its statement, the quickest first, for at most 60 s. If it
survives, it runs the tests of `make dist` that do, for at most 300 s; `lost` are those that only these kill, at most,
because more tests of `make test` may. Statements that run in other processes (servers, commands that are started) are
not recorded.

    pip install cosmic-ray==8.7.0 coverage==7.17.5
    OMP_NUM_THREADS=1 MOVED=moved python -m pytest -p benchmarks.moved_tests -n 3 --dist worksteal
    OMP_NUM_THREADS=1 python -m benchmarks.moved_tests --out moved

The first command writes into the folder which test executes which line: for a choice of tests that move, before they
do. The second one resumes.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import coverage
import pytest

from benchmarks import mutations
from benchmarks.mutations import ROOT, Mutant, Row, compiles, mutants, read_rows, row_of, run, write_rows

FOLDERS = "actmax app claims concepts db evaluation explanation lrp models steering".split()
LIMITS = {"stays": 60, "moved": 300}
"""Seconds of tests that a mutant runs."""


# --- which tests execute which lines: a plugin of the processes that pytest-xdist starts -------------------

FOLDER = os.environ.get("MOVED", "")
RECORDED = FOLDER if "PYTEST_XDIST_WORKER" in os.environ else ""
if RECORDED:
    Path(FOLDER).mkdir(parents=True, exist_ok=True)
    sources = [str(ROOT / name) for name in FOLDERS]
    measured = coverage.Coverage(f"{FOLDER}/coverage-{os.getpid()}", source=sources, config_file=False)
    measured.start()
    lasted: list[str] = []


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    if RECORDED:
        measured.switch_context(nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if RECORDED:
        lasted.append(f"{'inf' if report.failed else report.duration}\t{report.nodeid}\n")


def pytest_unconfigure(config: pytest.Config) -> None:
    if RECORDED:
        measured.stop()
        measured.save()
        (Path(FOLDER) / f"seconds-{os.getpid()}.txt").write_text("".join(lasted))


def collected(marks: str) -> set[str]:
    """The tests that there are."""
    options = ["-o", "addopts=--strict-markers", "-q", "--collect-only", "-m", marks]
    command = [sys.executable, "-m", "pytest", *options]
    return {*subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()}


@dataclass
class Recorded:
    """What was recorded: the seconds of each test, and the tests of each line of a file."""

    folder: Path
    seconds: dict[str, float]
    moved: set[str]

    @classmethod
    def read(cls, folder: Path) -> Recorded:
        seconds: dict[str, float] = defaultdict(float)
        for path in folder.glob("seconds-*.txt"):
            for line in path.read_text().splitlines():
                number, name = line.split("\t", 1)
                seconds[name] += float(number)
        there = {name: seconds[name] for name in collected("release or not release") & seconds.keys()}
        return cls(folder, there, collected("release") & there.keys())

    def tests_by_line(self, file: str) -> dict[int, set[str]]:
        lines: dict[int, set[str]] = defaultdict(set)
        for path in self.folder.glob("coverage-*"):
            data = coverage.CoverageData(str(path))
            data.read()
            for line, names in data.contexts_by_lineno(str(ROOT / file)).items():
                lines[line].update(name for name in names if self.seconds.get(name, float("inf")) < float("inf"))
        return lines


# --- the mutants ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    mutant: Mutant
    stays: list[str]
    moved: list[str]
    """The tests that execute its statement, the quickest first."""


def candidates(recorded: Recorded) -> Iterator[Drawn]:
    """The mutants of all statements that a moved test executes."""
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        by_line = recorded.tests_by_line(str(path.relative_to(ROOT)))
        lines = {line for line, names in by_line.items() if names & recorded.moved}
        for mutant in mutants(path) if lines else ():
            names = {name for line in mutant.statement for name in by_line.get(line, ())}
            if names & recorded.moved:
                order = sorted(names, key=lambda name: (recorded.seconds[name], name))
                stays, moved = (
                    [name for name in order if (name in recorded.moved) is which] for which in (False, True)
                )
                yield Drawn(mutant, stays, moved)


def drawn(recorded: Recorded, count: int, seed: int) -> list[Drawn]:
    everything = list(candidates(recorded))
    print(f"{len(everything)} mutants of statements that tests of make dist execute", flush=True)
    shuffled = random.Random(seed).sample(everything, len(everything))
    return list(islice((one for one in shuffled if compiles(one.mutant.mutated)), count))


def measure(row: Row, one: Drawn, recorded: Recorded, folder: Path) -> None:
    """First by the tests that stay, then by those that moved."""
    tests = mutations.Tests(coverage.CoverageData(no_disk=True), recorded.seconds)
    for part, names in (("stays", one.stays), ("moved", one.moved)):
        chosen = tests.within(names, LIMITS[part])
        row.tests += len(chosen)
        row.outcome, row.killed_by = run(one.mutant, chosen, folder, LIMITS[part] + mutations.START_SECONDS)
        if row.outcome != "survived":
            row.outcome = "lost" if (part, row.outcome) == ("moved", "killed") else row.outcome
            break
    print(f"{row.mutant} {row.operator}: {row.outcome} {row.killed_by}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    sys.dont_write_bytecode = True  # of mutants
    recorded = Recorded.read(chosen.out)
    listed = drawn(recorded, chosen.count, chosen.seed)
    for name in mutations.PRELOADED.split():
        import_module(name)
    table = chosen.out / "moved_tests.csv"
    rows = read_rows(table, [row_of(one.mutant) for one in listed])
    for row, one in zip(rows, listed, strict=True):
        if not row.outcome:
            measure(row, one, recorded, chosen.out)
            write_rows(table, rows)
    for outcome in ("killed", "lost", "survived", "timeout"):
        print(f"{outcome}: {sum(row.outcome == outcome for row in rows)} of {len(rows)}")


if __name__ == "__main__":
    main()
