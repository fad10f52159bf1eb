"""The verbs around the machine: demo, models, app, mcp, doctor."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from icebear.app.cli.options import FILE, FOLDER, MODEL, load, options, print_json, stdout, store_if_any
from icebear.extras import need


@click.command()
@options("--json")
def demo(as_json: bool) -> None:
    """The ice bear, end to end, in a terminal.

    \b
    Example:
      icebear demo
    """
    from rich.console import Console

    from icebear.app.cli.demo import run

    need("index")
    found = run(Console(stderr=True, highlight=False) if as_json else stdout())
    if as_json:
        print_json(found)


@click.command()
@options("--json")
def models(as_json: bool) -> None:
    """List presets, families and what is cached.

    \b
    Example:
      icebear models
    """
    from icebear.cache import cache_folder, cached
    from icebear.concepts.models.families import FAMILIES
    from icebear.concepts.models.presets import PRESETS

    presets = [
        {"name": p.name, "about": p.about, "download_mb": p.download // 1_000_000, "cached": cached(p.folder)}
        for p in PRESETS.values()
    ]
    if as_json:
        print_json({"presets": presets, "families": list(FAMILIES), "cache": str(cache_folder())})
        return
    for preset in presets:
        state = "cached" if preset["cached"] else f"{preset['download_mb']} MB to fetch"
        click.echo(f"{preset['name']:<19} {preset['about']} [{state}]")
    click.echo(f"families: {', '.join(FAMILIES)}")
    click.echo(f"cache: {cache_folder()}")


@click.command()
@click.option("--port", default=8501, show_default=True, type=click.IntRange(1, 65535))
@options("--store", *MODEL)
def app(port: int, store_path: str, model_name: str, **given: Any) -> None:
    """Look around in the browser: explain, cards, search, steer, compare. On this machine only.

    \b
    Example:
      icebear app --store wiki.db
    """
    from icebear.app.cli.launch import launch

    need("app")
    told = {"store": store_path, "model": model_name, **given}
    launch(port, {f"ICEBEAR_APP_{name.upper()}": _as_text(value) for name, value in told.items()})


def _as_text(value: Any) -> str:
    """For a variable of the environment: nothing is empty, a flag is 0 or 1."""
    return "" if value is None else str(int(value)) if isinstance(value, bool) else str(value)


@click.command()
@click.option("--folder", type=FOLDER, help="Where an agent may read and write files.  [default: nowhere]")
@options("--store", *MODEL)
def mcp(folder: str | None, store_path: str, model_name: str, **given: Any) -> None:
    """Serve an agent over stdio (MCP): predict, attribute, rank, circuit, steer, flip, ..., each with its control.

    It uses no network: fetch the model before, by any other verb. In an agent's settings the command is icebear mcp.

    \b
    Example:
      icebear mcp --model smollm2-135m --folder results
    """
    need("mcp")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}  # before they are imported
    if folder and not Path(folder).is_dir():
        raise click.UsageError(f"There is no folder {folder}; make it.")
    from icebear.app.mcp.server import server
    from icebear.app.mcp.session import Session

    server(Session(model_name, given, store_path, Path(folder) if folder else None)).run("stdio")


@click.command()
@click.option("--checksum", type=FILE, help="Print the checksum of this store's results only.")
@options("--store", "--json", *MODEL)
def doctor(checksum: str | None, store_path: str, as_json: bool, **given: Any) -> None:
    """Versions, import roots, cache, a self-test of the model, and whether a store fits it.

    \b
    Example:
      icebear doctor --model smollm2-135m
    """
    from icebear.app.cli.doctor import examine
    from icebear.db.store import open_store

    if checksum:
        with open_store(checksum) as store:
            value = store.checksum()
        click.echo(json.dumps({"checksum": value}) if as_json else value)
        return
    facts = examine(lambda: load(**given), lambda model: store_if_any(store_path, model))
    if as_json:
        print_json(facts)
    else:
        for name, value in facts.items():
            click.echo(f"{name:<12} {value}")
    if "error" in facts:
        sys.exit(1)
