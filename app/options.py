"""What the verbs share: options, the model, and printing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from icebear.errors import InputError, NumericalError

if TYPE_CHECKING:
    from rich.console import Console

    from concepts.models.model import Model


json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
html_option = click.option("--html", type=click.Path(dir_okay=False), help="Write a self-contained page.")
store_option = click.option("--store", "store_path", default="icebear.db", show_default=True, help="The SQLite file.")


def model_options(command: Callable) -> Callable:
    for option in (
        click.option("--accept-terms", is_flag=True, help="Accept the terms of a preset that has them."),
        click.option("--dtype", help="float32, bfloat16, float16; default: what suits the device."),
        click.option("--device", default="auto", show_default=True, help="cuda, mps or cpu."),
        click.option("--model", "model_name", default="smollm2-135m", show_default=True,
                     help="A preset, hub id, folder or .gguf file."),
    ):  # fmt: skip
        command = option(command)
    return command


def explain_options(command: Callable) -> Callable:
    for option in (
        click.option("--method", default="attnlrp", show_default=True,
                     help="attnlrp, cp-lrp, pa-lrp, gxi, ... (README), or written out, AttnLRP(linear=Gamma(1))."),
        click.option("--at", type=int, help="The token whose label is explained, of a model that labels tokens."),
        click.option("--prefix", help="What the decoder of an encoder-decoder has written before the target."),
        click.option("--contrast", help="Explain the target against this token or label."),
        click.option("--target", help="The token or label to explain; default: the most probable one."),
    ):  # fmt: skip
        command = option(command)
    return command


def load(model_name: str, device: str, dtype: str | None, accept_terms: bool) -> Model:
    from concepts.models.loading import load_model

    return load_model(model_name, device=device, dtype=dtype, accept_terms=accept_terms)


def stdout() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=110)


def print_json(value: Any) -> None:
    """Strictly: JSON knows neither NaN nor infinity."""
    try:
        click.echo(json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False))
    except ValueError:
        raise NumericalError("A number of the result is NaN or infinite; try --dtype float32.") from None


def write_page(path: str, content: str | bytes) -> None:
    try:
        Path(path).write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}); choose another path.") from None
    click.echo(f"Wrote {path}", err=True)


def method_named(name: str) -> Any:
    from concepts.baselines.methods import named

    return named(name)
