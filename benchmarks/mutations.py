"""Which small faults in the product do its tests see? 60 mutants of rules, methods, stages and steering.

The operators are cosmic-ray's, with one replacement each for arithmetic and comparisons, as in mutmut. Without these,
eleven replacements of each `+` would be drawn most often, and most raise a TypeError in every test. Mutants of
annotations, which Python does not evaluate, are not drawn.

Each mutant runs the fast tests that execute its statement, the quickest first, of the files of tests that import a
module of these folders. With `--survivors`, those that survived run all fast tests that execute any line of their file,
or with `--tests` the tests or files that are named. The folder of `--out` keeps which test executes which line, and the
table; a second run resumes.

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
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from importlib import import_module
from itertools import islice
from multiprocessing import get_context
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
IMPORTS = re.compile(r"icebear\.(?:lrp|concepts\.methods|concepts\.stages|steering)\b")
WIDE = re.compile("app|cases|docs|house|mcp|notebooks|options|promises|index")
"""Only files of tests that import a module of the folders are run, and not those of pages, faces and the index."""
PRELOADED = (
    "torch transformers transformers.models.llama.modeling_llama sklearn.linear_model scipy.stats pandas hypothesis"
)
PRELOADED += " tokenizers rich.console click.testing"
"""What processes need not import again."""
REPLACED = "Add Sub, Sub Add, Mul Div, Div Mul, FloorDiv Div, Mod Div, Pow Mul, BitOr BitAnd, BitAnd BitOr, Eq NotEq, "
REPLACED += "NotEq Eq, Lt LtE, LtE Lt, Gt GtE, GtE Gt, Is IsNot, IsNot Is, Delete Not, Delete USub, Delete Invert"
PAIRS = {tuple(pair.split()) for pair in REPLACED.split(", ")}
SIGNATURES = {"parameters", "lambdef", "dictorsetmaker"}
"""Where `*` and `**` are no operators."""
START_SECONDS = 120
"""What a process needs at most to import and to collect the tests of many files, beside other work."""


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
        line = range(self.line, self.line + 1)  # of a decorator, `except` or `case`
        return min((span for span in statements(self.code) if self.line in span), key=len, default=line)


@dataclass
class Row:
    """A line of the table. `tests` is how many were chosen at first, `killed_by` the one that failed, `outcome` whether
    one did: `killed`, `killed later` by those of `--survivors`, `survived`, or `timeout`."""

    mutant: str
    operator: str
    before: str
    after: str
    tests: int = 0
    outcome: str = ""
    killed_by: str = ""


@lru_cache(1)
def statements(code: str) -> list[range]:
    """The lines of each statement; of a compound one, those above its body."""
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.stmt)]
    return [range(node.lineno, header_end(node) + 1) for node in nodes]


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
    return sorted(
        sampled(everything, count, seed), key=lambda mutant: (mutant.file, mutant.line, mutant.column, mutant.operator)
    )


def sampled(everything: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    shuffled = random.Random(seed).sample(everything, len(everything))
    return list(islice((mutant for mutant in shuffled if compiles(mutant.mutated)), count))


def row_of(mutant: Mutant) -> Row:
    """A mutant as a line of the table, with the lines that it changes."""
    changes = list(difflib.ndiff(mutant.code.splitlines(), mutant.mutated.splitlines()))
    lines = [[line[2:].strip() for line in changes if line[0] == sign and line[2:].strip()] for sign in "-+"]
    before, after = (" ".join(f"`{line}`" for line in part) for part in lines)
    return Row(f"{mutant.file}:{mutant.line}:{mutant.column}", mutant.operator, before, after)


# --- which tests execute which lines --------------------------------------------------------------------


class Recorder:
    """A plugin of pytest: each test is a context of the coverage, and its seconds are added up."""

    def __init__(self, folder: Path) -> None:
        sources = [str(ROOT / name) for name in FOLDERS]
        self.measured = coverage.Coverage(str(folder / "coverage"), source=sources, config_file=False)
        self.path, self.seconds, self.file = folder / "seconds.json", defaultdict(float), ""

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        if self.file != nodeid.partition("::")[0]:
            self.file = nodeid.partition("::")[0]
            self.save()
        self.measured.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration if not report.failed else float("inf")

    def save(self) -> None:
        self.measured.save()
        self.path.write_text(json.dumps(self.seconds, indent=1))


def record(folder: Path) -> None:
    """Run the fast tests once, and write the lines that each executes and the seconds that it takes."""
    files = [
        str(path)
        for path in sorted((ROOT / "tests").glob("test_*.py"))
        if IMPORTS.search(path.read_text()) and not WIDE.search(path.name)
    ]
    recorder = Recorder(folder)
    recorder.measured.start()
    pytest.main(["-q", "-o", "addopts=--strict-markers", "--tb=line", "-m", FAST, *files], [recorder])
    recorder.measured.stop()
    recorder.save()


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


class FirstFailure:
    """A plugin of pytest: the test or the file that fails first."""

    name = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.name = self.name or (report.nodeid if report.failed else "")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.name = self.name or (report.nodeid if report.failed else "")


def run_tests(names: Sequence[str], folder: Path) -> None:
    """In a process of its own: run tests until one fails, and write how it ended."""
    log = (folder / "pytest.log").open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    failure = FirstFailure()
    code = pytest.main(["-q", "-o", "addopts=--strict-markers", "-x", "--tb=short", *names], [failure])
    (folder / "ended.json").write_text(json.dumps([int(code), failure.name]))


def run(mutant: Mutant, names: Sequence[str], folder: Path, limit: float) -> tuple[str, str]:
    """Whether a test fails, and the first that does."""
    if not names:
        return "survived", ""
    (folder / "ended.json").unlink(missing_ok=True)
    with applied(mutant):
        process = get_context("fork").Process(target=run_tests, args=(names, folder))
        process.start()
        process.join(limit)
        if process.is_alive():
            process.kill()
            process.join()
            return "timeout", ""
    code, name = json.loads((folder / "ended.json").read_text())
    return ("killed", name or "tests/conftest.py") if code else ("survived", "")


def measure(row: Row, mutant: Mutant, names: Sequence[str], folder: Path, limit: float) -> None:
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
    sys.dont_write_bytecode = True  # of mutants
    for name in PRELOADED.split():
        import_module(name)
    table, listed = chosen.out / "mutations.csv", drawn(chosen.count, chosen.seed)
    rows = read_rows(table, [row_of(mutant) for mutant in listed])
    write_rows(table, rows)
    tests = Tests.read(chosen.out)
    for row, mutant in zip(rows, listed, strict=True):
        if chosen.survivors and row.outcome in ("survived", "timeout"):
            names = chosen.tests or tests.of(mutant, whole_file=True)
            measure(row, mutant, names, chosen.out, 1800)
            row.outcome = row.outcome.replace("killed", "killed later")
        elif not row.outcome:
            names = tests.within(tests.of(mutant), chosen.seconds)
            row.tests = len(names)
            measure(row, mutant, names, chosen.out, chosen.seconds)
        write_rows(table, rows)
    killed = sum(row.outcome.startswith("killed") for row in rows)
    print(f"{killed} of {len(rows)} killed ({killed / len(rows):.0%})")


if __name__ == "__main__":
    main()
