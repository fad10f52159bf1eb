"""Which small faults in the product do its tests see? 60 mutants of rules, methods, stages and steering.

The operators are cosmic-ray's, with one replacement each for arithmetic and comparisons, as in mutmut. Without these,
eleven replacements of each `+` would be drawn most often, and most raise a TypeError in every test. Mutants of
annotations, which Python does not evaluate, are not drawn.

Each mutant runs the fast tests that execute its statement, the quickest first. With `--survivors`, those that survived
run all fast tests of its file instead, or with `--tests` these tests. The folder of `--out` keeps which test executes
which line, and the table; a second run resumes.

    pip install cosmic-ray==8.7.0 coverage==7.17.5
    OMP_NUM_THREADS=1 python -m benchmarks.mutations --out mutations
    OMP_NUM_THREADS=1 python -m benchmarks.mutations --out mutations --survivors
"""

from __future__ import annotations

import argparse
import ast
import csv
import difflib
import json
import os
import random
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

import coverage
import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("lrp", "concepts/methods", "concepts/stages", "steering")
FAST = "not (real or network or browser or release)"
REPLACED = "Add Sub, Sub Add, Mul Div, Div Mul, FloorDiv Div, Mod Div, Pow Mul, BitOr BitAnd, BitAnd BitOr, Eq NotEq, "
REPLACED += "NotEq Eq, Lt LtE, LtE Lt, Gt GtE, GtE Gt, Is IsNot, IsNot Is, Delete Not, Delete USub, Delete Invert"
PAIRS = {tuple(pair.split()) for pair in REPLACED.split(", ")}
SIGNATURES = {"parameters", "lambdef", "dictorsetmaker"}
"""Where `*` and `**` are no operators."""
START_SECONDS = 60
"""What a process needs at most to import and to collect the tests of many files."""


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    column: int
    operator: str
    occurrence: int

    @property
    def code(self) -> str:
        return (ROOT / self.file).read_text()

    @property
    def mutated(self) -> str:
        return mutate_code(self.code, get_operator(f"core/{self.operator}")(), self.occurrence)

    @property
    def statement(self) -> range:
        """The lines of the smallest statement around it; of a compound statement, those above its body."""
        nodes = [node for node in ast.walk(ast.parse(self.code)) if isinstance(node, ast.stmt)]
        spans = [range(node.lineno, header_end(node) + 1) for node in nodes]
        line = range(self.line, self.line + 1)  # of a decorator, `except` or `case`
        return min((span for span in spans if self.line in span), key=len, default=line)


@dataclass
class Row:
    """A line of the table. `tests` is how many were chosen, `killed_by` the first that failed."""

    mutant: str
    operator: str
    before: str
    after: str
    tests: int = 0
    outcome: str = ""
    killed_by: str = ""


def header_end(node: ast.stmt) -> int:
    body = getattr(node, "body", None)
    return max(node.lineno, body[0].lineno - 1) if body else node.end_lineno


# --- the mutants ----------------------------------------------------------------------------------------


def mutants(path: Path) -> Iterator[Mutant]:
    """All mutants of a file."""
    code = path.read_text()
    tree, unevaluated = get_ast(code), annotations(code)
    for name in sorted(operator_names()):
        operator = name.removeprefix("core/")
        if not get_operator(name).arguments() and is_drawn(operator):
            nodes = ((node, at) for node in ast_nodes(tree) for at, _ in get_operator(name)().mutation_positions(node))
            for occurrence, (node, at) in enumerate(nodes):
                mutant = Mutant(str(path.relative_to(ROOT)), *at, operator, occurrence)
                if at not in unevaluated and node.parent.type not in SIGNATURES:
                    yield mutant


def is_drawn(operator: str) -> bool:
    kind, *pair = operator.split("_")
    return not kind.endswith(("OperatorReplacement", "Operator")) or tuple(pair) in PAIRS


def annotations(code: str) -> set[tuple[int, int]]:
    """The positions inside of annotations."""
    nodes = [getattr(node, name, None) for node in ast.walk(ast.parse(code)) for name in ("annotation", "returns")]
    return {
        (line, column)
        for node in nodes
        if node is not None
        for line in range(node.lineno, node.end_lineno + 1)
        for column in range(node.col_offset, node.end_col_offset)
    }


def compiles(code: str) -> bool:
    try:
        compile(code, "a mutant", "exec")
    except SyntaxError:
        return False
    return True


def drawn(count: int, seed: int) -> list[Mutant]:
    files = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    everything = [mutant for path in files for mutant in mutants(path)]
    print(f"{len(everything)} mutants in {len(files)} files")
    shuffled = random.Random(seed).sample(everything, len(everything))
    chosen = islice((mutant for mutant in shuffled if compiles(mutant.mutated)), count)
    return sorted(chosen, key=lambda mutant: (mutant.file, mutant.line, mutant.column, mutant.operator))


def row_of(mutant: Mutant) -> Row:
    """A mutant as a line of the table, with the lines that it changes."""
    changes = list(difflib.ndiff(mutant.code.splitlines(), mutant.mutated.splitlines()))
    before, after = (" ".join(" ".join(line[2:].split()) for line in changes if line[0] == sign) for sign in "-+")
    name = f"{mutant.file}:{mutant.line}:{mutant.column}"
    return Row(name, mutant.operator, before.strip(), after.strip())


# --- which tests execute which lines --------------------------------------------------------------------


class Recorder:
    """A plugin of pytest: each test is a context of the coverage, and its seconds are added up."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self.measured, self.seconds = measured, defaultdict(float)

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.measured.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.seconds[report.nodeid] = float("inf")


def record(folder: Path) -> None:
    """Run all fast tests once, and write the lines that each executes and the seconds that it takes."""
    measured = coverage.Coverage(
        str(folder / "coverage"), source=[str(ROOT / name) for name in FOLDERS], config_file=False
    )
    recorder = Recorder(measured)
    measured.start()
    pytest.main(["-q", "-o", "addopts=--strict-markers", "--tb=line", "-m", FAST, str(ROOT / "tests")], [recorder])
    measured.stop()
    measured.save()
    (folder / "seconds.json").write_text(json.dumps(recorder.seconds, indent=1))


@dataclass
class Tests:
    """The tests that passed, by the lines that they execute."""

    data: coverage.CoverageData
    seconds: dict[str, float]

    @classmethod
    def read(cls, folder: Path) -> Tests:
        if not (folder / "seconds.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            record(folder)
        data = coverage.CoverageData(str(folder / "coverage"))
        data.read()
        return cls(data, json.loads((folder / "seconds.json").read_text()))

    def of(self, mutant: Mutant, whole_file: bool = False) -> list[str]:
        """Tests that execute the statement of a mutant, the quickest first. Those of its file where only an import
        executes it."""
        by_line = self.data.contexts_by_lineno(str(ROOT / mutant.file))
        lines = by_line if whole_file else mutant.statement
        names = {name for line in lines for name in by_line.get(line, ()) if name in self.seconds}
        if not names and not whole_file:
            return self.of(mutant, whole_file=True)
        passed = [name for name in names if self.seconds[name] < float("inf")]
        return sorted(passed, key=lambda name: (self.seconds[name], name))

    def within(self, names: Sequence[str], limit: float) -> list[str]:
        """As many of the quickest as take this many seconds, at least one."""
        chosen, total = [], 0.0
        for name in names:
            total += self.seconds[name]
            if chosen and total > limit:
                break
            chosen.append(name)
        return chosen


# --- running them ---------------------------------------------------------------------------------------


@contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """The file with its fault. Its time of change is put back too, by which Python knows its bytecode."""
    path = ROOT / mutant.file
    before, times = path.read_bytes(), path.stat()
    try:
        path.write_text(mutant.mutated)
        yield
    finally:
        path.write_bytes(before)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def run(mutant: Mutant, names: Sequence[str], folder: Path, limit: float) -> tuple[str, str]:
    """Whether a test fails, and the first that does."""
    if not names:
        return "survived", ""
    (folder / "tests.txt").write_text("\n".join(names))
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=--strict-markers", "-x", "--tb=no", "-rfE"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    with applied(mutant):
        try:
            done = subprocess.run(
                [*command, f"@{(folder / 'tests.txt').resolve()}"],
                cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return "timeout", ""
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode == 0:
        return "survived", ""
    return ("killed", failed[1]) if failed else ("error", done.stdout[-300:] + done.stderr[-300:])


def measure(row: Row, mutant: Mutant, names: Sequence[str], folder: Path, limit: float) -> None:
    row.tests = len(names)
    row.outcome, row.killed_by = run(mutant, names, folder, limit + START_SECONDS)
    print(f"{row.mutant} {row.operator}: {row.outcome} {row.killed_by}", flush=True)


def read_rows(path: Path, drawn_rows: Sequence[Row]) -> list[Row]:
    """The table, with the outcomes of an earlier run."""
    if not path.exists():
        return list(drawn_rows)
    with path.open(newline="") as file:
        rows = [Row(**{**row, "tests": int(row["tests"])}) for row in csv.DictReader(file)]
    keys = [[(row.mutant, row.operator, row.after) for row in table] for table in (rows, drawn_rows)]
    if keys[0] != keys[1]:
        raise SystemExit(f"{path} has other mutants than this version of the code. Choose another folder.")
    return rows


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--survivors", action="store_true")
    parser.add_argument("--tests", nargs="+", default=(), help="for --survivors: tests or files instead")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    table, listed = chosen.out / "mutations.csv", drawn(chosen.count, chosen.seed)
    rows = read_rows(table, [row_of(mutant) for mutant in listed])
    write_rows(table, rows)
    tests = Tests.read(chosen.out)
    for row, mutant in zip(rows, listed, strict=True):
        if chosen.survivors and row.outcome in ("survived", "timeout"):
            names = chosen.tests or tests.of(mutant, whole_file=True)
            measure(row, mutant, names, chosen.out, 1800)
        elif not row.outcome:
            measure(row, mutant, tests.within(tests.of(mutant), chosen.seconds), chosen.out, chosen.seconds)
        write_rows(table, rows)
    killed = sum(row.outcome == "killed" for row in rows)
    print(f"{killed} of {len(rows)} killed ({killed / len(rows):.0%})")


if __name__ == "__main__":
    main()
