"""`icebear check`: are claims about a model still true?"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import click

import icebear
from icebear.app.cli.options import ModelOptions, argument, is_given, option, read_lines, record, verb
from icebear.app.cli.output import show, write_page
from icebear.app.cli.progress import bar
from icebear.errors import InputError, need
from icebear.paths import check_model_path
from icebear.values import shown

if TYPE_CHECKING:
    from icebear.claims.checked import CheckedClaims
    from icebear.claims.checked_monitor import CheckedMonitor
    from icebear.claims.claim import Claim
    from icebear.claims.conditions import Condition

LEDGER = b'{"icebear_ledger"'
"""How a ledger of `icebear mcp` begins, without white space."""
MONITOR = b'{"icebear_monitor"'
BEGINNING = 64
"""Bytes that are read to know which file it is."""


@record
class Options:
    file: str = argument(type="file")
    with_: str | None
    without: str | None
    under: tuple[str, ...] = option(
        "Measure all claims once more under this condition: dtype=bfloat16, bits=8, attention=eager, model=OTHER, "
        "threads=1, seed=1, paraphrases=auto or paraphrases=FILE (JSON lines). Repeatable; those of FILE come first.",
        multiple=True,
    )
    strict: bool = option("Exit with 1 also if a claim fails under a condition.")
    json: bool
    html: str | None
    markdown: str | None = option("Write the table in Markdown to this file, as for an appendix.", type="output")
    model: ModelOptions


@verb(Options)
def check(options: Options) -> None:
    """Measure the claims of FILE again, and print each number then and now. The exit code is 1 if one is broken.

    FILE is made by --claim of explain, rank, circuit, flip, label and concept find. Without --model, each claim is
    checked in the model that it names, or in the default model if it names none. With --model, all claims are checked
    in that model. With --under, the table has a column for each condition, and says which claims hold everywhere.

    FILE may also be a monitor of icebear concept monitor: the table has the texts of --with and --without (or its
    held-out texts) that it flags under each condition, at the threshold as it was set. Or a ledger of icebear mcp: its
    calls are made again, and their numbers compared.

    Example:
      icebear explain "The ice bear lives in the" --claim claims.yaml
      icebear check claims.yaml
      icebear check claims.yaml --under seed=1 --under attention=eager
      icebear check music.monitor.json --under paraphrases=auto
    """
    from icebear.app.cli.tables.evaluations import claims_table, conditions_table
    from icebear.claims.claims_files import read_claims_file
    from icebear.claims.conditions import conditions_of

    begins = _beginning(options.file)
    if begins.startswith(MONITOR):
        return _check_monitor(options)
    if options.with_ or options.without:
        raise click.UsageError("--with and --without are only for a monitor; leave them out for claims and ledgers.")
    if begins.startswith(LEDGER):
        if options.under:
            raise click.UsageError("--under does not apply to a ledger; leave it out.")
        _check_used(options, ())
        return _check_ledger(options)
    claims, written = read_claims_file(options.file)
    conditions = conditions_of([*written, *options.under])
    if not claims:
        raise InputError(f"{options.file} has no claim; write one with --claim (docs/claims.md).")
    _check_used(options, conditions)
    result = _checked(options.model, claims, conditions)
    document = {"file": options.file, **result.to_dict()}
    if conditions:
        below = [*result.notes(), "", *result.summary()[1:], "", *result.reasons()]
        show(options.json, document, conditions_table(result), *below)
    else:
        show(options.json, document, claims_table(result))
    _end(options, result)


def _beginning(path: str) -> bytes:
    """Return the beginning of a file without white space; empty if it cannot be read, which its reader explains."""
    with suppress(OSError), open(path, "rb") as file:
        return b"".join(file.read(BEGINNING).split())
    return b""


def _end(options: Options, result: CheckedClaims | CheckedMonitor) -> None:
    """Write the files, and exit with 1 if what was checked does not hold."""
    write_page(options.html, result.to_html)
    write_page(options.markdown, result.to_markdown)
    if not (result.passed_everywhere if options.strict else result.passed):
        raise SystemExit(1)


def _check_monitor(options: Options) -> None:
    """Measure a monitor again, in the model that it names or that of --model."""
    from icebear.app.cli.tables.evaluations import monitor_table
    from icebear.claims.conditions import conditions_of
    from icebear.claims.monitor_conditions import checked_texts, monitor_under

    monitor = icebear.Monitor.load(options.file)
    conditions = conditions_of(options.under)
    read = [read_lines(path) if path else [] for path in (options.with_, options.without)]
    texts = checked_texts(monitor, *read)
    name = options.model.model if is_given("model") else monitor.model_name
    model = options.model.load(name)
    with bar("runs") as move:
        result = monitor_under(model, partial(_reload_model, options.model, name), monitor, texts, conditions, move)
    document = {"file": options.file, **result.to_dict()}
    show(options.json, document, monitor_table(result), *result.summary()[1:], "", *result.reasons())
    _end(options, result)


def _check_used(options: Options, conditions: Sequence[Condition]) -> None:
    """Refuse options that only a table of conditions has."""
    names = ("strict", "html", "markdown")
    unused = [f"--{name}" for name in names if getattr(options, name)]
    if unused and not conditions:
        raise click.UsageError(f"{', '.join(unused)} needs conditions; add --under CONDITION.")


def _checked(options: ModelOptions, claims: Sequence[Claim], conditions: Sequence[Condition]) -> CheckedClaims:
    """Check claims, those of each model that they name together."""
    from icebear.claims.checked import CheckedClaims
    from icebear.claims.checked_claim import ConditionRun
    from icebear.claims.under_conditions import check_under

    groups: dict[str, list[Claim]] = {}
    for claim in claims:
        name = options.model if is_given("model") or not claim.provenance else claim.provenance.model
        groups.setdefault(name, []).append(claim)
    results = []
    for name, group in groups.items():
        model = options.load(name)
        with bar("claims") as move:
            results.append(check_under(model, partial(_reload_model, options, name), group, conditions, move))
    rows = tuple(row for result in results for row in result.rows)
    runs = zip(*(result.under for result in results), strict=True)
    under = tuple(ConditionRun(parts[0].condition, tuple(row for run in parts for row in run.rows)) for parts in runs)
    return CheckedClaims(rows, under)


def _reload_model(options: ModelOptions, plain: str, name: str | None = None, **changes: Any) -> icebear.Model:
    """Load a model with other arguments. It is not kept: a condition is measured once."""
    name = plain if name is None else name
    check_model_path(name)
    return icebear.load_model(name, **{**options.arguments, **changes})


def _check_ledger(options: Options) -> None:
    """Make the calls of a ledger again."""
    need("mcp")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}  # a ledger may name any model
    from icebear.app.cli.tables.evaluations import listing_table
    from icebear.app.mcp.ledger import MEASURED, plan_summary, read_ledger, repeated
    from icebear.app.mcp.server import server
    from icebear.app.session import Session

    calls = read_ledger(options.file)
    measured = [call for call in calls if call.tool in MEASURED and call.answer is not None]
    if not measured:
        raise InputError(f"{options.file} has no call whose numbers can be measured again ({', '.join(MEASURED)}).")
    rows: list[dict[str, Any]] = []
    for name, store in dict.fromkeys((call.model, call.store) for call in measured):
        session = Session(options.model.model if is_given("model") else name, options.model.arguments, store)
        rows += repeated(server(session), [call for call in measured if (call.model, call.store) == (name, store)])
    passed = [row for row in rows if row["verdict"] == "passed"]
    title = f"{len(passed)} of {len(rows)} calls passed ({len(calls) - len(rows)} have no numbers to measure)"
    failed = len(passed) < len(rows)
    table = listing_table([{**row, "arguments": str(row["arguments"])} for row in rows], title)
    plan = plan_summary(calls)
    document = {"file": options.file, "passed": not failed, "calls": rows, "plan": plan}
    show(options.json, document, table, *_plan_lines(plan))
    if failed:
        raise SystemExit(1)


def _plan_lines(plan: dict[str, Any] | None) -> list[str]:
    """Return a line for each approved plan of a ledger, and for each departure."""
    if plan is None:
        return ["The calls had no approved plan."]
    lines = [
        f"Approved plan ({shown(row['question'])}): {row['planned']} calls; {row['made']} had an answer, "
        f"{row['not_made']} had none."
        for row in plan["plans"]
    ]
    departures = [f"  {row['tool']} {json.dumps(row['arguments'], ensure_ascii=False)}" for row in plan["departures"]]
    return [*lines, f"Departures, calls that were in no plan: {len(departures)}", *departures]
