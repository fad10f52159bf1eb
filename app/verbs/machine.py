"""The verbs around the machine: demo, models, app, doctor."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from app.options import json_option, load, model_options, print_json, stdout, store_option


@click.command()
def demo() -> None:
    """The ice bear, end to end, in a terminal.

    \b
    Example:
      icebear demo
    """
    from app.demo import run

    run(stdout())


@click.command()
@json_option
def models(as_json: bool) -> None:
    """List presets, families and what is cached.

    \b
    Example:
      icebear models
    """
    from concepts.models.families import FAMILIES
    from concepts.models.presets import PRESETS
    from icebear.cache import cache_folder, cached

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
@store_option
@model_options
def app(
    port: int, store_path: str, model_name: str, device: str, dtype: str | None, accept_terms: bool
) -> None:  # fmt: skip
    """Look around in the browser: explain, cards, search, steer, compare. On this machine only.

    \b
    Example:
      icebear app --store wiki.db
    """
    from app.launch import launch

    launch(port, {
        "ICEBEAR_APP_STORE": store_path, "ICEBEAR_APP_MODEL": model_name, "ICEBEAR_APP_DEVICE": device,
        "ICEBEAR_APP_DTYPE": dtype or "", "ICEBEAR_APP_ACCEPT_TERMS": str(int(accept_terms)),
    })  # fmt: skip


@click.command()
@json_option
@model_options
@click.option("--checksum", type=click.Path(dir_okay=False), help="Print the checksum of this store's results only.")
@click.option("--store", "store_path", help="Say whether this index fits the model.")
def doctor(as_json: bool, checksum: str | None, store_path: str | None, **options: Any) -> None:
    """Versions, import roots, cache, a self-test of the model, and whether a store fits it.

    \b
    Example:
      icebear doctor --model smollm2-135m
    """
    from app.doctor import examine
    from db.store import open_store

    if checksum:
        with open_store(checksum, create=False) as store:
            value = store.checksum()
        click.echo(json.dumps({"checksum": value}) if as_json else value)
        return
    facts = examine(lambda: load(**options), store_path)
    if as_json:
        print_json(facts)
    else:
        for name, value in facts.items():
            click.echo(f"{name:<12} {value}")
    if "error" in facts:
        sys.exit(1)
