"""`CheckedClaims`: claims that were measured again, in a plain run and under conditions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from icebear.claims.condition_table import ConditionTable
from icebear.records import InNotebooks
from icebear.result_files import SavedResult


@dataclass(frozen=True, repr=False)
class CheckedClaims(ConditionTable, SavedResult, InNotebooks):
    """The claims of a file, measured again: in a plain run, and under conditions."""

    @property
    def passed(self) -> bool:
        """Whether at least one claim passed in the plain run, and none failed. Claims that cannot be measured here do
        not count."""
        return any(row.verdict == "passed" for row in self.rows) and not any(row.failed for row in self.rows)

    @property
    def passed_everywhere(self) -> bool:
        """Whether the plain run passed, and no claim failed under a condition."""
        return self.passed and not any(row.failed for run in self.under for row in run.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        runs = [{"condition": str(run.condition), "claims": [row.to_dict() for row in run.rows]} for run in self.under]
        document = {"passed": self.passed, "claims": [row.to_dict() for row in self.rows]}
        return {**document, "passed_everywhere": self.passed_everywhere, "conditions": runs} if runs else document
