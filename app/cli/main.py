"""The `icebear` command: the verbs of `icebear.app.cli`, and how their errors are shown."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from typing import Any

import click

from icebear.app.cli import circuit, concept, evaluate, explain, machine, steer, store, talk
from icebear.app.cli.launch import log_to_stderr
from icebear.errors import IcebearError, InputError, out_of_memory


class Group(click.Group):
    """Shows the toolkit's errors as one sentence, keeps the verbs in the order they are written."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            known = error if isinstance(error, IcebearError) else out_of_memory(error) or _unwritable(error)
            if known is None:
                raise
            click.echo(f"icebear: {known}", err=True)
            sys.exit(1)


def _unwritable(error: Exception) -> IcebearError | None:
    """A full disk behind stdout; it will not take what is left, nor need another error be told for that."""
    if not isinstance(error, OSError) or error.errno != errno.ENOSPC:
        return None
    with suppress(OSError, ValueError):  # of tests: no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return InputError("The output cannot be written: no space is left where it goes; make room, or write elsewhere.")


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="icebear")
def main() -> None:
    """Find the neurons a language model used, see what they mean, and turn them."""
    log_to_stderr()


LOOK, MACHINE = (machine.demo, machine.models), (machine.app, machine.mcp, machine.doctor)
for verb in (
    *LOOK,
    *explain.VERBS,
    *talk.VERBS,
    *circuit.VERBS,
    *steer.VERBS,
    *concept.VERBS,
    *store.VERBS,
    evaluate.evaluate,
    *MACHINE,
):
    main.add_command(verb)
