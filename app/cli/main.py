"""The `icebear` command: its verbs, and how their errors are shown."""

from __future__ import annotations

import errno
import os
import shlex
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import click

from icebear.app.cli import verbs
from icebear.app.cli.options import Verbs
from icebear.app.cli.output import log_to_stderr
from icebear.app.cli.streams import filtered
from icebear.errors import IcebearError, InputError, SameAnswer, known_error

ORDER = (
    "demo explain rank neuron search atlas index label circuit steer flip recipe concept chat evaluate check "
    "app shell mcp serve export doctor"
)
"""The verbs in the order of the help; others come last."""
ARGUMENTS = "icebear.arguments"
"""Where a context has the words of the command, which an error repeats."""


class MainGroup(Verbs):
    """Shows icebear's errors as one sentence, and lists the verbs in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[ARGUMENTS] = tuple(args)
        return super().parse_args(ctx, args)

    def main(self, *args: Any, **how: Any) -> Any:
        with filtered():
            return super().main(*args, **how)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            known = known_error(error) or _unwritable(error)
            if known is None:
                raise
            if os.environ.get("ICEBEAR_DEBUG"):
                traceback.print_exception(error)
            command = (
                ("icebear", *ctx.meta[ARGUMENTS], "--contrast", known.contrast) if isinstance(known, SameAnswer) else ()
            )
            click.echo(f"icebear: {known}" + f" Try: {shlex.join(command)}" * bool(command), err=True)
            sys.exit(1)


def _unwritable(error: Exception) -> IcebearError | None:
    """Return the error of a full disk behind stdout, which then takes nothing more, also at exit."""
    if not isinstance(error, OSError) or error.errno != errno.ENOSPC:
        return None
    with suppress(OSError, ValueError):  # of tests: no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return InputError("The output cannot be written because the disk is full; free some space, or write elsewhere.")


@click.group(cls=MainGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="icebear")
def main() -> None:
    """Find the neurons that a language model used for a prediction, interpret them, and steer the model with them."""
    log_to_stderr()


def add_verbs(group: click.Group) -> None:
    """Add the command of each module in `icebear.app.cli.verbs`; both have the same name."""
    order = ORDER.split()
    names = {module.name for module in iter_modules(verbs.__path__)}
    for name in sorted(names, key=lambda name: (order.index(name) if name in order else len(order), name)):
        group.add_command(getattr(import_module(f"{verbs.__name__}.{name}"), name), name)


add_verbs(main)
