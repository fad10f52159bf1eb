"""The table of claims and conditions, what holds everywhere in sentences, and both as Markdown and HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from icebear.claims.checked_claim import CheckedClaim, ConditionRun
from icebear.claims.conditions import AUTO, TEMPLATES
from icebear.render import literal, page, render
from icebear.values import plural

SHORT = {"broken": " broken", "control passes too": " control"}
"""What a cell says after its number."""
PLAIN = "the plain run"
LEGEND = (
    "Each cell has the number that was measured, or in how many paraphrases the claim holds; broken: below its "
    "threshold; control: its control passes too; -: not measured."
)


def cell(row: CheckedClaim) -> str:
    """Return the number of a claim with its verdict, as short as a column."""
    if row.measured is None:
        return "-"
    number = f"{row.repeats.passed} of {row.repeats.measured}" if row.repeats else f"{row.measured.value:.3f}"
    return number + SHORT.get(row.verdict, "")


@dataclass(frozen=True, repr=False)
class ConditionTable:
    """Claims in the plain run, and under conditions."""

    rows: tuple[CheckedClaim, ...]
    """Of the plain run."""
    under: tuple[ConditionRun, ...] = ()

    def by_claim(self) -> Iterator[tuple[CheckedClaim, dict[str, CheckedClaim]]]:
        """Yield each claim of the plain run, and the same claim by condition."""
        for number, row in enumerate(self.rows):
            yield row, {str(run.condition): run.rows[number] for run in self.under}

    def headings(self) -> list[str]:
        return ["then", "now", *(run.condition.label for run in self.under)]

    def lines(self) -> Iterator[tuple[str, str, str, list[CheckedClaim]]]:
        """Yield the number of each claim, its text, its value then, and what the other columns of `headings` show."""
        for number, (plain, by_condition) in enumerate(self.by_claim(), 1):
            then = "-" if plain.claim.value is None else f"{plain.claim.value:.3f}"
            yield str(number), str(plain.claim), then, [plain, *by_condition.values()]

    def summary(self) -> list[str]:
        """Say in sentences which claims hold everywhere, which fail under which conditions, and what was not
        measured."""
        hold, fail, lacking = [], [], []
        for number, (plain, by_condition) in enumerate(self.by_claim(), 1):
            by_name = {PLAIN: plain, **by_condition}
            failed = [name for name, row in by_name.items() if row.failed]
            unmeasured = [name for name, row in by_name.items() if row.measured is None]
            if failed:
                fail.append(f"{number} ({', '.join(failed)})")
            elif len(unmeasured) < len(by_name):
                hold.append(str(number))
            if unmeasured:
                lacking.append(f"{number} ({', '.join(unmeasured)})")
        conditions = plural(len(self.under), "condition")
        count = f"{len(self.rows)} claims, in the plain run and under {conditions}"
        lines = [f"{count}: {len(hold)} hold wherever they were measured, {len(fail)} do not."]
        for what, numbers in (("Hold", hold), ("Do not hold", fail), ("Not measured", lacking)):
            lines += [f"{what}: {', '.join(numbers)}."] if numbers else []
        return lines

    def reasons(self) -> list[str]:
        """Return a sentence for each cell that did not pass, and for each count of paraphrases; equal ones together."""
        numbers: dict[tuple[str, str], list[str]] = {}
        for number, (plain, by_condition) in enumerate(self.by_claim(), 1):
            names: dict[str, list[str]] = {}
            for name, row in {PLAIN: plain, **by_condition}.items():
                if row.why:
                    names.setdefault(f"{row.verdict}. {row.why}", []).append(name)
            for why, where in names.items():
                numbers.setdefault((", ".join(where), why), []).append(str(number))
        return [f"{', '.join(claims)}, {where}: {why}" for (where, why), claims in numbers.items()]

    def notes(self) -> list[str]:
        """Say what the cells are, and by which templates prompts were paraphrased."""
        if not any(str(run.condition) == f"paraphrases={AUTO}" for run in self.under):
            return [LEGEND]
        templates = ", ".join(f"{name} {template!r}" for name, template in TEMPLATES.items())
        return [LEGEND, f"paraphrases={AUTO}: {templates}."]

    def to_markdown(self) -> str:
        """Return the table in Markdown, with what holds, and the reasons of what does not."""
        columns = ["", "claim", *self.headings()]
        rows = [f"| {' | '.join(columns)} |", f"| --- | --- |{' ---: |' * (len(columns) - 2)}"]
        for number, claim, then, checked in self.lines():
            texts = [f"**{cell(row)}**" if row.failed else cell(row) for row in checked]
            rows.append(f"| {' | '.join([number, literal(claim), then, *texts])} |")
        below = [*_items([*self.summary(), *self.notes()]), "", *_items(self.reasons())]
        return "\n".join([*rows, "", *below]).rstrip() + "\n"

    def to_html(self) -> str:
        """Return the same as a self-contained page."""
        rows = [(*texts, [(cell(row), row.failed, row.why) for row in checked]) for *texts, checked in self.lines()]
        names: dict[str, Any] = {"headings": self.headings(), "rows": rows, "notes": self.notes()}
        body = render("icebear.claims/conditions.html", **names, lines=self.summary(), reasons=self.reasons())
        return str(page("Claims under conditions", body))


def _items(lines: Sequence[str]) -> list[str]:
    return [f"- {literal(line)}" for line in lines]
