"""`icebear mcp`: tools for an agent."""

from __future__ import annotations

import os
from pathlib import Path

import click

from icebear.app.cli.options import ModelOptions, is_given, option, record, verb
from icebear.errors import need
from icebear.paths import local


@record
class Options:
    base_model: str | None
    folder: str | None = option(
        "Folder in which the agent may read and write files.", type="folder", show_default="none"
    )
    ledger: str | None = option("Append each call and its answer to this file, as a line of JSON.", type="output")
    plan: str | None = option(
        "With --ledger: the agent first writes its planned calls to this file. No call runs until a person approves "
        "the plan there.",
        type="output",
    )
    store: str
    model: ModelOptions


@verb(Options)
def mcp(options: Options) -> None:
    """Serve tools to an agent over stdio (MCP): predict, attribute, rank, circuit, steer, flip, ..., with controls.

    The server uses no network, so first download the model with another command, such as icebear explain. Set
    `icebear mcp` as the command in the agent's settings. With --ledger FILE, the command "icebear check FILE" measures
    the numbers of its answers again.

    Example:
      icebear mcp --model smollm2-135m --folder results
      icebear mcp --ledger ledger.jsonl --plan plan.json
    """
    need("mcp")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}  # before they are imported
    if options.folder and not Path(options.folder).is_dir():
        raise click.UsageError(f"There is no folder {options.folder}; create it.")
    if options.plan and not options.ledger:
        raise click.UsageError("--plan needs --ledger, which has the plan and each departure from it; add it.")
    if options.plan and options.ledger and local(options.plan).resolve() == local(options.ledger).resolve():
        raise click.UsageError("--plan and --ledger name the same file; give two.")
    from icebear.app.mcp.server import server
    from icebear.app.session import Session

    files = (options.folder, options.ledger, options.plan)
    folder, ledger, plan = (Path(path) if path else None for path in files)
    model, store = options.model, options.store if is_given("store") else None
    server(Session(model.model, model.arguments, store, folder, options.base_model, ledger, plan)).run("stdio")
