"""`icebear check`: are claims about a model still true?"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from icebear.app.cli.options import ModelOptions, argument, named, record, verb
from icebear.app.cli.output import show
from icebear.app.cli.progress import bar
from icebear.errors import InputError, need

LEDGER = b'{"icebear_ledger"'
"""How a ledger of `icebear mcp` begins."""


@record
class Options:
    file: str = argument(type="file")
    json: bool
    model: ModelOptions


@verb(Options)
def check(options: Options) -> None:
    """Measure the claims of FILE again, and print each number then and now. The exit code is 1 if one is broken.

    FILE is made by --claim of explain, rank, circuit, flip, label and concept find. Without --model, each claim is
    checked in the model that it names, or in the default model if it names none. With --model, all claims are checked
    in that model. FILE may also be a ledger of icebear mcp: its calls are made again, and their numbers compared.

    Example:
      icebear explain "The ice bear lives in the" --claim claims.yaml
      icebear check claims.yaml
    """
    from icebear.app.cli.tables.evaluations import claims_table
    from icebear.claims.check import CheckedClaim, CheckedClaims, check
    from icebear.claims.claim import Claim
    from icebear.claims.claims_files import read_claims

    with suppress(OSError), open(options.file, "rb") as file:
        if file.read(len(LEDGER)) == LEDGER:
            return _check_ledger(options)
    claims = read_claims(options.file)
    if not claims:
        raise InputError(f"{options.file} has no claim; write one with --claim (docs/claims.md).")
    groups: dict[str, list[Claim]] = {}
    for claim in claims:
        name = options.model.model if named("model") or not claim.provenance else claim.provenance.model
        groups.setdefault(name, []).append(claim)
    rows: list[CheckedClaim] = []
    for name, group in groups.items():
        model = options.model.load(name)
        with bar("claims") as move:
            rows += check(model, group, move).rows
    result = CheckedClaims(tuple(rows))
    show(options.json, {"file": options.file, **result.to_dict()}, claims_table(result))
    if not result.passed:
        raise SystemExit(1)


def _check_ledger(options: Options) -> None:
    """Make the calls of a ledger again."""
    need("mcp")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}  # a ledger may name any model
    from icebear.app.cli.tables.evaluations import listing_table
    from icebear.app.mcp.ledger import MEASURED, plan_summary, read_ledger, repeated
    from icebear.app.mcp.server import server
    from icebear.app.mcp.session import Session

    calls = read_ledger(options.file)
    measured = [call for call in calls if call.tool in MEASURED and call.answer is not None]
    if not measured:
        raise InputError(f"{options.file} has no call whose numbers can be measured again ({', '.join(MEASURED)}).")
    rows: list[dict[str, Any]] = []
    for name, store in dict.fromkeys((call.model, call.store) for call in measured):
        session = Session(options.model.model if named("model") else name, options.model.arguments, store)
        rows += repeated(server(session), [call for call in measured if (call.model, call.store) == (name, store)])
    passed = [row for row in rows if row["verdict"] == "passed"]
    title = f"{len(passed)} of {len(rows)} calls passed ({len(calls) - len(rows)} have no numbers to measure)"
    failed = len(passed) < len(rows)
    table = listing_table([{**row, "arguments": str(row["arguments"])} for row in rows], title)
    plan = plan_summary(calls)
    line = (
        f"The approved plan has {plan['planned']} calls; {plan['made']} were made, {plan['not_made']} were not, and "
        f"{len(plan['departures'])} others were."
        if plan
        else "The calls had no approved plan."
    )
    show(options.json, {"file": options.file, "passed": not failed, "calls": rows, "plan": plan}, table, line)
    if failed:
        raise SystemExit(1)
