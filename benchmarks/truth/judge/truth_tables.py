"""Tables and listings of measurements on models whose mechanism is known."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.truth.judge.judging import METRICS, SITES
from benchmarks.truth.programs.decoys import KINDS
from icebear.concepts.statistics import holm, paired_p
from icebear.evaluation.protocol import Lines, Table

RESAMPLES = 2000


def sites_in(lines: Lines) -> list[str]:
    """Return the names of the sites that were judged."""
    judged = {row["sites"] for line in lines for row in line["pairs"]}
    return [sites for sites in SITES if sites in judged]


def rows_of(lines: Lines, sites: str, only_hard: bool) -> dict[str, list[dict[str, Any]]]:
    """Return program -> its pairs in all variants."""
    result: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        rows = [row for row in line["pairs"] if row["sites"] == sites and (row["hard"] or not only_hard)]
        if rows:
            result.setdefault(line["program"], []).extend(rows)
    return result


def means(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return method -> column -> mean over the ``methods`` of rows."""
    each = [row["methods"] for row in rows]
    return {
        method: {column: fmean(methods[method][column] for methods in each) for column in columns}
        for method, columns in each[0].items()
    }


def tables(lines: Lines) -> dict[str, Table]:
    """Return a table of hard pairs and one of all pairs, of neurons and of neurons and heads; a line is a program."""
    return {
        f"{sites}, {'hard' if only_hard else 'all'} pairs": Table(
            METRICS,
            [{"program": name, "methods": means(rows)} for name, rows in rows_of(lines, sites, only_hard).items()],
        )
        for sites in sites_in(lines)
        for only_hard in (True, False)
    }


def by_program(lines: Lines) -> list[dict[str, Any]]:
    """Return the means of lines with the same columns over the variants of each program."""
    result: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        result.setdefault(line["program"], []).append(line)
    return [{"program": name, "methods": means(rows)} for name, rows in result.items()]


def notes(lines: Lines) -> list[str]:
    rows = [row for line in lines for row in line["pairs"]]
    hard, proved = (sum(row[name] for row in rows) for name in ("hard", "proved"))
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
    """Return the first method's mean numbers minus those of each other method, with a bootstrap interval, and p of a
    sign-flip test, corrected for the methods (Holm)."""
    generator, result = np.random.default_rng(0), []
    for sites in sites_in(lines):
        programs = [means(rows) for rows in rows_of(lines, sites, True).values()]
        best, *others = programs[0] if programs else [""]
        rows: list[dict[str, Any]] = [{"sites": sites, "method": method} for method in others]
        for column in ("at_2k", "area") if others else ():
            gains = np.array([[row[best][column] - row[method][column] for row in programs] for method in others])
            drawn = gains[:, generator.integers(len(programs), size=(RESAMPLES, len(programs)))].mean(-1)
            low, high = np.quantile(drawn, (0.025, 0.975), axis=1).tolist()
            numbers = zip(gains.mean(1).tolist(), low, high, holm(paired_p(gains)), strict=True)
            for row, values in zip(rows, numbers, strict=True):
                row |= dict(zip((column, f"{column} low", f"{column} high", f"{column} p"), values, strict=True))
        result += rows
    return result


def by_model(lines: Lines) -> list[dict[str, Any]]:
    """Return a row for each model with its truth and the first method's numbers."""
    result = []
    for line, sites in product(lines, sites_in(lines)):
        rows = [row for row in line["pairs"] if row["sites"] == sites and row["hard"]]
        if rows:
            method, numbers = next(iter(means(rows).items()))
            facts = {name: fmean(row[name] for row in rows) for name in ("differ", "k", "proved")}
            row = {"program": line["program"], "variant": line["variant"], "sites": sites, "pairs": len(rows), **facts}
            result.append({**row, "method": method, **{name: numbers[name] for name in ("at_k", "at_2k", "area")}})
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
