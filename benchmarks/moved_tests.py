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
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import coverage
import pytest

from benchmarks.mutations import (
    PRELOADED,
    ROOT,
    START_SECONDS,
    Mutant,
    Row,
    Tests,
    mutants,
    read_rows,
    row_of,
    run,
    sampled,
    write_rows,
)

FOLDERS = "actmax app claims concepts db evaluation explanation lrp models steering".split()
LIMITS = {False: 60, True: 300}
"""Seconds of tests that a mutant runs: of those that stay, and of those that moved."""


# --- which tests execute which lines: a plugin of the processes that pytest-xdist starts -------------------

RECORDED = {"MOVED", "PYTEST_XDIST_WORKER"} <= os.environ.keys()
if RECORDED:
    folder = Path(os.environ["MOVED"])
    folder.mkdir(parents=True, exist_ok=True)
    sources = [str(ROOT / name) for name in FOLDERS]
    measured = coverage.Coverage(str(folder / f"coverage-{os.getpid()}"), source=sources, config_file=False)
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
        (folder / f"seconds-{os.getpid()}.txt").write_text("".join(lasted))


def collected(marks: str) -> set[str]:
    """The tests that there are."""
    options = ["-o", "addopts=--strict-markers", "-q", "--collect-only", "-m", marks]
    command = [sys.executable, "-m", "pytest", *options]
    return {*subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()}


def read_recorded(folder: Path) -> tuple[Tests, set[str]]:
    """Return what was recorded of the tests that there are, and the moved ones."""
    data, seconds = coverage.CoverageData(no_disk=True), defaultdict[str, float](float)
    for path in folder.glob("coverage-*"):
        part = coverage.CoverageData(str(path))
        part.read()
        data.update(part)
    for path in folder.glob("seconds-*.txt"):
        for line in path.read_text().splitlines():
            number, name = line.split("\t", 1)
            seconds[name] += float(number)
    there = collected("release or not release") & seconds.keys()
    return Tests(data, {name: seconds[name] for name in there}), collected("release") & there


# --- the mutants ----------------------------------------------------------------------------------------


def candidates(tests: Tests, moved: set[str]) -> Iterator[Mutant]:
    """The mutants of all statements that a moved test executes."""
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        by_line = tests.data.contexts_by_lineno(str(path))
        lines = {line for line, names in by_line.items() if not moved.isdisjoint(names)}
        if lines:
            yield from (mutant for mutant in mutants(path) if not lines.isdisjoint(mutant.statement))


def measure(row: Row, mutant: Mutant, tests: Tests, moved: set[str], folder: Path) -> None:
    """First by the tests that stay, then by those that moved."""
    names = tests.of(mutant)
    for is_moved, limit in LIMITS.items():
        chosen = tests.within([name for name in names if (name in moved) is is_moved], limit)
        row.tests += len(chosen)
        row.outcome, row.killed_by = run(mutant, chosen, folder, limit + START_SECONDS)
        if row.outcome != "survived":
            row.outcome = "lost" if is_moved and row.outcome == "killed" else row.outcome
            break
    print(f"{row.mutant} {row.operator}: {row.outcome} {row.killed_by}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    sys.dont_write_bytecode = True  # of mutants
    tests, moved = read_recorded(chosen.out)
    everything = list(candidates(tests, moved))
    print(f"{len(everything)} mutants of statements that tests of make dist execute", flush=True)
    listed = sampled(everything, chosen.count, chosen.seed)
    for name in PRELOADED.split():
        import_module(name)
    table = chosen.out / "moved_tests.csv"
    rows = read_rows(table, [row_of(mutant) for mutant in listed])
    for row, mutant in zip(rows, listed, strict=True):
        if not row.outcome:
            measure(row, mutant, tests, moved, chosen.out)
            write_rows(table, rows)
    for outcome in ("killed", "lost", "survived", "timeout"):
        print(f"{outcome}: {sum(row.outcome == outcome for row in rows)} of {len(rows)}")


if __name__ == "__main__":
    main()
