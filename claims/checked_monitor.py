"""`CheckedMonitor`: how often a monitor flags texts in a plain run and under conditions, with its table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from icebear.concepts.statistics import auroc
from icebear.records import InNotebooks
from icebear.render import literal, page, percent, render
from icebear.result_files import SavedResult
from icebear.steering.monitor.monitor import AS_GOOD, BAG
from icebear.steering.monitor.text_values import interval, threshold_of

COLUMNS_SHOWN = ("", "with the concept", "without it", "AUROC", "threshold that keeps the rate", "flagged there")


@dataclass(frozen=True)
class FlaggedTexts:
    """How many texts a detector flags at a threshold."""

    true_positives: int
    positives: int
    false_positives: int
    negatives: int
    auroc: float
    keeping: float
    """The threshold at which as few of the texts without the concept are flagged as the monitor was set to."""
    true_positives_keeping: int

    @classmethod
    def of(cls, values: np.ndarray, positives: int, threshold: float, fpr: float) -> FlaggedTexts:
        """values (S,): of texts with the concept, then without it."""
        with_it, without = values[:positives], values[positives:]
        keeping, _ = threshold_of(without, fpr)
        flagged, wrongly, kept_flagged = (
            int(each.sum()) for each in (with_it > threshold, without > threshold, with_it > keeping)
        )
        area = auroc(values, np.arange(len(values)) < positives)
        return cls(flagged, len(with_it), wrongly, len(without), area, keeping, kept_flagged)

    @property
    def true_interval(self) -> tuple[float, float]:
        """The exact 95 % interval of the true positive rate."""
        return interval(self.true_positives, self.positives)

    @property
    def false_interval(self) -> tuple[float, float]:
        return interval(self.false_positives, self.negatives)


@dataclass(frozen=True)
class MonitorRun:
    """A monitor under a condition."""

    condition: str
    flagged: FlaggedTexts | None
    """None if it did not run."""
    why: str = ""
    """Why it did not run, or does not hold, in a sentence."""

    @property
    def failed(self) -> bool:
        return self.flagged is not None and bool(self.why)


@dataclass(frozen=True, repr=False)
class CheckedMonitor(SavedResult, InNotebooks):
    """A monitor, measured again in a plain run and under conditions."""

    name: str
    unit: str
    threshold: float
    limit: float
    """The upper limit of its false positive rate, as it was set."""
    runs: tuple[MonitorRun, ...]
    """The first one is the plain run."""
    bag: FlaggedTexts | None
    """A bag of words on the same texts; None if they are too few."""

    @property
    def passed(self) -> bool:
        """Whether the plain run was measured, and holds."""
        return self.runs[0].flagged is not None and not self.runs[0].failed

    @property
    def passed_everywhere(self) -> bool:
        """Whether no run failed."""
        return self.passed and not any(run.failed for run in self.runs)

    def summary(self) -> list[str]:
        """Say in sentences where it holds, and whether a bag of words does as well."""
        failed = [run.condition for run in self.runs if run.failed]
        lacking = [run.condition for run in self.runs if run.flagged is None]
        hold = [run.condition for run in self.runs if run.condition not in (*failed, *lacking)]
        lines = [f"{self.name} (a {self.unit} is flagged above {self.threshold:.2f}) holds in {len(hold)} of "]
        lines[0] += f"{len(self.runs) - len(lacking)} runs."
        for what, names in (("Holds", hold), ("Does not hold", failed), ("Not measured", lacking)):
            lines += [f"{what}: {', '.join(names)}."] if names else []
        plain = self.runs[0].flagged
        if plain and self.bag and self.bag.auroc >= plain.auroc - AS_GOOD:
            lines.append(f"A bag of words does as well (AUROC {self.bag.auroc:.2f}, this monitor {plain.auroc:.2f}).")
        return lines

    def reasons(self) -> list[str]:
        return [f"{run.condition}: {run.why}" for run in self.runs if run.why]

    def lines(self) -> list[list[str]]:
        """Return the rows of the table, with the columns of `COLUMNS_SHOWN`."""
        rows = [[run.condition, *cells(run.flagged)] for run in self.runs]
        return [*rows, [BAG, *cells(self.bag)]]

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        runs = [{"condition": r.condition, "failed": r.failed, "why": r.why, **numbers(r.flagged)} for r in self.runs]
        facts = {"monitor": self.name, "unit": self.unit, "threshold": self.threshold, "limit": self.limit}
        ends = {"passed": self.passed, "passed_everywhere": self.passed_everywhere}
        return {**facts, **ends, "conditions": runs, "bag_of_words": numbers(self.bag)}

    def to_markdown(self) -> str:
        """Return the table in Markdown, with where it holds, and the reasons of where it does not."""
        failed = {run.condition for run in self.runs if run.failed}
        rows = [f"| {' | '.join(COLUMNS_SHOWN)} |", f"| --- |{' ---: |' * (len(COLUMNS_SHOWN) - 1)}"]
        for name, *texts in self.lines():
            label = f"**{literal(name)}**" if name in failed else literal(name)
            rows.append(f"| {' | '.join([label, *texts])} |")
        below = [f"- {literal(line)}" for line in [*self.summary(), *self.reasons()]]
        return "\n".join([*rows, "", *below]) + "\n"

    def to_html(self) -> str:
        """Return the same as a self-contained page."""
        failed = [run.failed for run in self.runs] + [False]
        rows = list(zip(self.lines(), failed, strict=True))
        names: dict[str, Any] = {"headings": COLUMNS_SHOWN, "rows": rows}
        body = render("icebear.claims/monitor.html", **names, lines=self.summary(), reasons=self.reasons())
        return str(page(f"{self.name} under conditions", body))


def cells(flagged: FlaggedTexts | None) -> list[str]:
    """Return the counts with their intervals, AUROC, and the threshold that keeps the rate; - where nothing ran."""
    if flagged is None:
        return ["-"] * (len(COLUMNS_SHOWN) - 1)
    with_it = f"{flagged.true_positives} of {flagged.positives} ({percent(*flagged.true_interval)})"
    without = f"{flagged.false_positives} of {flagged.negatives} ({percent(*flagged.false_interval)})"
    kept_flagged = f"{flagged.true_positives_keeping} of {flagged.positives}"
    return [with_it, without, f"{flagged.auroc:.2f}", f"{flagged.keeping:.2f}", kept_flagged]


def numbers(flagged: FlaggedTexts | None) -> dict[str, Any]:
    """Return the counts and their intervals, JSON-ready; empty where nothing ran."""
    if flagged is None:
        return {}
    limits = {"true_interval": list(flagged.true_interval), "false_interval": list(flagged.false_interval)}
    return {**vars(flagged), **limits}
