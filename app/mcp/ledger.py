"""The ledger of a server: each call and its answer as a line of JSON, whose numbers can be measured again."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
from mcp import Client
from mcp.server import MCPServer

from icebear.app.session import Session
from icebear.converters import check_version, checked
from icebear.errors import InputError
from icebear.paths import append, read_text

FORMAT = 1
KEY = "icebear_ledger"
MEASURED = ("predict", "explain", "sources", "attribute", "rank", "circuit", "steer", "flip", "concept_find")
"""Tools whose answers are numbers about the model, and depend on no earlier call and no file."""
TOLERANCE = 1e-4
"""The share by which numbers may differ; answers have five digits."""
APPROVAL = "approval"
"""In place of a tool, where a person approved a plan. No tool has this name, so a call of it has no answer."""
SMALLEST = 1e-6
"""What differs by less is equal, too."""


@dataclass(frozen=True)
class Call:
    """A call of a tool."""

    model: str
    store: str
    """The path that was named, if one was."""
    tool: str
    arguments: dict[str, Any]
    answer: dict[str, Any] | None
    """None for an error."""
    planned: int | None = None
    """The number, from 1, of this call in the plan."""
    departs: bool = False
    """Whether there was a plan, and this call is not in it."""


def note(path: Path, session: Session, tool: str, arguments: dict[str, Any], **answer: Any) -> None:
    """Append a call to a ledger. answer: its `answer`, or its `error`, and `planned`, its number in the plan. Raises
    `InputError`."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    about = {KEY: FORMAT, "date": date, "model": session.model_name, "store": session.store_path or ""}
    append(path, json.dumps({**about, "tool": tool, "arguments": arguments, **answer}).encode() + b"\n")


def read_ledger(path: str | Path) -> list[Call]:
    """Return the calls of a ledger. Raises `InputError`."""
    calls = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        try:
            row = json.loads(line)
            check_version(row[KEY], FORMAT, str(path), InputError)
            planned = checked(row.get("planned"), row.get("planned") is None or type(row["planned"]) is int, int)
            departs = "planned" in row and planned is None
            call = Call(row["model"], row["store"], row["tool"], row["arguments"], row.get("answer"), planned, departs)
            texts, objects = (call.model, call.store, call.tool), (call.arguments, call.answer or {})
            if not all(isinstance(x, str) for x in texts) or not all(isinstance(x, dict) for x in objects):
                raise TypeError
            list(_values(call.answer))  # a number may be too large for one
            calls.append(call)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            raise InputError(f"Line {number} of {path} is no call of a ledger; remove the line.") from None
    return calls


def note_approval(path: Path, session: Session, plan: dict[str, Any]) -> None:
    """Append to a ledger that a person approved a plan. Raises `InputError`."""
    note(path, session, APPROVAL, plan, answer={"approved": True})


def plan_summary(calls: Sequence[Call]) -> dict[str, Any] | None:
    """Return how a ledger's calls compare with its approved plans: of each, how many of its calls had an answer; of
    all, the departures. None without a plan."""
    plans: list[tuple[dict[str, Any], set[int]]] = []
    for call in calls:
        if call.tool == APPROVAL and call.answer is not None:
            if not plans or plans[-1][0] != call.arguments:  # a server that starts again notes its plan again
                plans.append((call.arguments, set()))
        elif plans and call.planned is not None and call.answer is not None:
            plans[-1][1].add(call.planned)
    if not plans:
        return None
    departures = [{"tool": call.tool, "arguments": call.arguments} for call in calls if call.departs]
    return {"plans": [_plan_row(plan, answered) for plan, answered in plans], "departures": departures}


def _plan_row(plan: dict[str, Any], answered: set[int]) -> dict[str, Any]:
    planned, count = len(plan["calls"]) if isinstance(plan.get("calls"), list) else 0, len(answered)
    return {"question": plan.get("question"), "planned": planned, "made": count, "not_made": planned - count}


def repeated(server: MCPServer, calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Make calls again, and return a row for each: its verdict, and the first number that differs."""

    async def run() -> list[dict[str, Any]]:
        async with Client(server) as client:
            return [_row(call, await client.call_tool(call.tool, call.arguments)) for call in calls]

    return anyio.run(run)


def _row(call: Call, result: Any) -> dict[str, Any]:
    about = {"tool": call.tool, "arguments": call.arguments}
    if result.is_error:
        return {**about, "numbers": 0, "verdict": "cannot be measured here", "why": result.content[0].text}
    then, now = (dict(_values(answer)) for answer in (call.answer, result.structured_content))
    numbers = sum(isinstance(value, float) for value in then.values())
    if not numbers:
        return {**about, "numbers": 0, "verdict": "cannot be measured here", "why": "The answer has no number."}
    wrong = [name for name in dict.fromkeys([*then, *now]) if not _equal(then.get(name), now.get(name))]
    why = f"{wrong[0]} was {then.get(wrong[0])}, and is {now.get(wrong[0])}." if wrong else ""
    return {**about, "numbers": numbers, "verdict": "broken" if wrong else "passed", "why": why}


def _equal(then: float | str | None, now: float | str | None) -> bool:
    if isinstance(then, float) and isinstance(now, float):
        return math.isclose(then, now, rel_tol=TOLERANCE, abs_tol=SMALLEST)
    return then == now


def _values(value: Any, name: str = "") -> Iterator[tuple[str, float | str]]:
    """Yield the numbers and texts of an answer, but for its handle, with where they are."""
    if isinstance(value, bool | int | float):
        yield name, float(value)
    elif isinstance(value, str) and name != "handle":
        yield name, value
    rows = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in rows:
        yield from _values(part, f"{name}.{key}".removeprefix("."))
