"""`icebear shell`: one command after another, with the model loaded once."""

from __future__ import annotations

import re
import shlex
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import click

import icebear
from icebear.app.cli.options import ModelOptions, is_given, record, verb
from icebear.app.cli.streams import unfiltered
from icebear.cache import cache_folder
from icebear.stopping import interruptible

LONGEST = 100_000
"""The number of characters of a line; `shlex` takes the square of it, seconds from here on."""


@record
class Options:
    model: ModelOptions


@verb(Options)
def shell(options: Options) -> None:
    """Run one command after another without the wait: the model stays loaded.

    Commands are typed as in any terminal, with or without the word icebear. Ctrl-C ends a command, Ctrl-D or exit the
    shell. Model options of the shell apply to every command that does not give its own. Commands can also be piped in,
    one a line.

    Example:
      icebear shell
      cat commands.txt | icebear shell --model smollm2-135m
    """
    context = click.get_current_context()
    group = context.find_root().command
    assert isinstance(group, click.Group)
    models = context.ensure_object(dict)
    model = options.model.load()
    defaults = _default_map(group, {name: value for name, value in vars(options.model).items() if is_given(name)})
    typed = _typed(model) if sys.stdin.isatty() else iter(sys.stdin)
    with interruptible():
        succeeded = [_run(group, line, models, defaults) for line in typed]
    if not (sys.stdin.isatty() or all(succeeded)):
        sys.exit(1)


def _typed(model: icebear.Model) -> Iterator[str]:
    """Yield lines as they are typed, until the end."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.output import create_output

    click.echo(f"{model.name} is loaded. Type a command; help lists them; exit or Ctrl-D ends the shell.", err=True)
    session: PromptSession[str] = PromptSession(
        "icebear> ",
        history=FileHistory(str(cache_folder() / "shell-history")),
        output=create_output(unfiltered(sys.stderr)),
    )
    while True:
        try:
            line = session.prompt()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        if line.strip() in ("exit", "quit"):
            return
        yield line


def _run(group: click.Group, line: str, models: dict[Any, Any], defaults: dict[str, Any]) -> bool:
    """Run a command; return whether it succeeded. Nothing that fails in it ends the shell."""
    line = line.strip()
    if len(line) > LONGEST:
        limit = f"The line has {len(line):,} characters, and the shell reads at most {LONGEST:,}"
        click.echo(f"icebear: {limit}; give a long text in a file, such as with --messages.", err=True)
        return False
    try:
        words = shlex.split(re.sub(r"(python3? -m )?icebear\s+", "", line, count=1), comments=True)
    except ValueError as error:
        click.echo(f"icebear: {error}; close the quotation mark.", err=True)
        return False
    if not words:
        return True
    words = ["--help"] if words == ["help"] else words
    if not sys.stdin.isatty():  # which result is of which command
        click.echo(f"icebear> {shlex.join(words)}", err=True)
    try:
        group.main(words, "icebear", obj=models, default_map=defaults)
    except SystemExit as end:
        return not end.code
    except Exception:  # a fault of icebear's, which must not take the session along
        traceback.print_exc()
    return False


def _default_map(command: click.Command, defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the defaults of options, of a group for each of its commands."""
    if isinstance(command, click.Group):
        return {name: _default_map(inner, defaults) for name, inner in command.commands.items()}
    return defaults
