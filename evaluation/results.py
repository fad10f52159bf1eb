"""The numbers of an evaluation: each method's cells, and its samples."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import pandas

from icebear.concepts.statistics import SIGN_FLIPS, Cell, Cells, table
from icebear.convert import Tabled

TEST = (
    f"p (in table.csv): of the paired difference to the best method of the column, by {SIGN_FLIPS:,} random changes of "
    "sign; corrected for the methods of the column (Holm), not for several columns, nor for the best being chosen on "
    "the same samples."
)


@dataclass(frozen=True, repr=False)
class Results(Tabled):
    """A table of an evaluation with its samples, as results.json keeps it."""

    settings: dict[str, Any]
    """With the name of the evaluation, the model, and ``methods``, the rows of the table."""
    columns: dict[str, str]
    notes: list[str]
    unable: dict[str, str]
    """Methods that cannot run on the model, and why."""
    samples: list[dict[str, Any]]

    @property
    def made_with(self) -> dict[str, Any]:  # type: ignore[override]
        return self.settings

    @cached_property
    def cells(self) -> Cells:
        return table(self.samples, self.columns, list(self.settings["methods"]))

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each method; JSON-ready, None where there is no number."""
        names, rows = [part.name for part in fields(Cell)], []
        for method, row in self.cells.items():
            numbers = {f"{column} {name}": getattr(x, name, None) for column, x in row.items() for name in names}
            rows.append({"method": method, **numbers})
        return rows

    def texts(self) -> dict[str, list[str]]:
        """Return the cells of each method as text."""
        return {
            name: ["—" if (cell := row[column]) is None else cell.text(about) for column, about in self.columns.items()]
            for name, row in self.cells.items()
        }

    def legend(self) -> list[str]:
        """Return what the numbers and columns are, and why methods are missing."""
        basis = f"{len(self.samples)} samples; mean ± standard error; * is the best of its column."
        columns = [f"{name}: {about}" for name, about in self.columns.items()]
        return [basis, TEST, *self.notes, *columns, *(f"{name} cannot run: {why}" for name, why in self.unable.items())]

    def to_frame(self) -> pandas.DataFrame:
        """Return the columns' numbers as a row for each sample and method. `to_arrow` gives them as an Arrow table."""
        rows = [
            {"sample": number, "method": name, **{column: numbers[column] for column in self.columns}}
            for number, sample in enumerate(self.samples)
            for name, numbers in sample["methods"].items()
        ]
        return pandas.DataFrame(rows)
