"""A plan: the calls that an agent means to make, in a file that a person approves before they run."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from icebear.converters import checked
from icebear.errors import InputError
from icebear.paths import read_text, write_file
from icebear.values import one_of

FREE = ("plan", "more", "save")
"""Tools that need no approval: the plan itself, and what only reads or saves an earlier answer."""


@dataclass(frozen=True)
class PlannedCall:
    """A call of a tool, and why it is made."""

    tool: str
    arguments: dict[str, Any]
    why: str


@dataclass(frozen=True)
class Plan:
    """What is asked, and the calls that answer it. A person sets `approved` in the file."""

    question: str
    calls: tuple[PlannedCall, ...]
    approved: bool = False

    @classmethod
    def of(cls, question: str, calls: list[dict[str, Any]], tools: Collection[str]) -> Plan:
        """Return the plan of an agent, which nobody has approved. Raises `InputError` for a call without its parts, of
        an unknown tool, or that is in it twice."""
        try:
            plan = cls(question, tuple(_call(row) for row in calls))
        except (TypeError, KeyError):
            raise InputError("Each call of a plan has a tool, its arguments, and why; give these three.") from None
        for number, call in enumerate(plan.calls, 1):
            one_of(call.tool, "tool of a plan", [tool for tool in tools if tool != "plan"])
            if plan.number(call.tool, call.arguments) != number:
                raise InputError(f"Call {number} of the plan, of {call.tool}, is in it before; leave it out.")
        return plan

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Read the file of a plan. Raises `InputError`."""
        try:
            row = json.loads(read_text(path))
            question = checked(row["question"], isinstance(row["question"], str), str)
            approved = checked(row["approved"], isinstance(row["approved"], bool), bool)
            return cls(question, tuple(_call(part) for part in row["calls"]), approved)
        except (ValueError, TypeError, KeyError, RecursionError):
            raise InputError(f"{path} is not a plan as icebear writes it; correct it, or remove it.") from None

    def write(self, path: Path) -> None:
        """Write the file, which a person reads. Raises `InputError`."""
        document = {"approved": self.approved, **self.to_dict()}  # the first line is what the person changes
        write_file(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    def number(self, tool: str, arguments: dict[str, Any]) -> int | None:
        """Return the number, from 1, of a planned call; None for a departure from the plan."""
        rows = enumerate(self.calls, 1)
        return next((n for n, call in rows if (call.tool, call.arguments) == (tool, arguments)), None)


def approved_plan(path: Path) -> Plan:
    """Return the plan of a file if a person has approved it. Raises `InputError` with what to do."""
    if not path.exists():
        raise InputError("This server runs no call without a plan; call plan first, and let the user approve it.")
    plan = Plan.read(path)
    if not plan.approved:
        raise InputError(f"The plan waits for approval: {approval_request(path)}.")
    return plan


def approval_request(path: Path) -> str:
    return f'ask the user to read {path.name}, and to change "approved" to true there'


def propose(path: Path, plan: Plan) -> bool:
    """Write a plan, which then waits for approval, and return False; return True if the file has it, and a person
    approved it.

    Raises `InputError` where another plan is approved, which a person may have edited."""
    known = Plan.read(path) if path.exists() else None
    if known and known.approved:
        if replace(known, approved=False) == plan:
            return True
        raise InputError(f"The user has approved another plan in {path.name}; ask the user to remove it for a new one.")
    plan.write(path)
    return False


def _call(row: Any) -> PlannedCall:
    """Raises `TypeError` or `KeyError` for what is no planned call."""
    row = checked(row, isinstance(row, dict) and set(row) <= {"tool", "arguments", "why"}, dict)
    tool, why = (checked(row[name], isinstance(row[name], str), str) for name in ("tool", "why"))
    return PlannedCall(tool, checked(row["arguments"], isinstance(row["arguments"], dict), dict), why)
