"""`icebear chat`: a conversation in the terminal."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from icebear.app.cli.options import ModelOptions, record, shared, verb
from icebear.app.cli.output import print_json, stdout, write_page
from icebear.errors import IcebearError, InputError
from icebear.stopping import Stopped

if TYPE_CHECKING:
    from rich.console import Console

    from icebear.concepts.models.answer import Answer
    from icebear.concepts.models.chat import Chat
    from icebear.concepts.models.model import Model


@record
class Options:
    system: str | None = shared(advanced=False)
    messages: str | None = shared(advanced=False)
    max_new_tokens: int
    temperature: float
    seed: int
    json: bool
    model: ModelOptions

    def start(self) -> Chat | None:
        """The messages before the first line."""
        from icebear.concepts.models.chat import Chat

        if self.messages:
            if self.system is not None:
                raise click.UsageError("--messages has its own system message; leave --system out.")
            return Chat.read(self.messages)
        return None if self.system is None else Chat([{"role": "system", "content": self.system}])


@verb(Options)
def chat(options: Options) -> None:
    """Talk to the model, and ask why about any words of its answer: /why WORDS, /help. --json prints all messages.

    \b
    Example:
      icebear chat --system "Be brief."
    """
    from icebear.concepts.models.chat import template_of

    start = options.start()
    model, console = options.model.load(), stdout()
    template_of(model)
    if not options.json:
        console.print(f"Talking to {model.name}. /why WORDS asks about the last answer; /help; /quit.", style="dim")
    sampling = {name: getattr(options, name) for name in ("max_new_tokens", "temperature", "seed")}
    talk = _Talk(model, console, sampling, start)
    while (line := _line()) is not None and line != "/quit":
        try:
            talk.take(line)
        except IcebearError as error:  # such as of a phrase that the answer does not have
            click.echo(f"icebear: {error}", err=True)
    if options.json:
        print_json({"messages": [dict(message) for message in talk.chat.messages] if talk.chat else []})


def _line() -> str | None:
    try:
        return click.prompt("you", prompt_suffix="> ", default="", show_default=False, err=True).strip()
    except (click.Abort, Stopped):  # the end of what is typed
        return None


@dataclass
class _Talk:
    """A conversation so far."""

    model: Model
    console: Console
    sampling: dict[str, Any]
    chat: Chat | None
    last: Answer | None = field(default=None)

    def take(self, line: str) -> None:
        """One line: a message, or a command."""
        from icebear.app.cli.talking import HELP, origins_table, why
        from icebear.concepts.attribution.sources import origins

        command, _, words = line.partition(" ")
        if not line.startswith("/"):
            if line:
                self._ask(line)
        elif command == "/help":
            self.console.print(HELP, markup=False)
        elif command == "/save":
            self._save(words)
        elif command == "/why":
            phrase, _, contrast = words.partition(" rather than ")
            self.console.print(why(self.model, self._answer(), phrase or "0:1", contrast))
        elif command == "/from":
            self.console.print(origins_table(origins(self.model, self._answer())))
        else:
            raise InputError(f"{command} is no command; /help lists them.")

    def _ask(self, message: str) -> None:
        from icebear.app.cli.talking import stream
        from icebear.concepts.models.chat import Chat

        chat = Chat([*(self.chat.messages if self.chat else ()), {"role": "user", "content": message}])
        self.last = stream(self.console, self.model, chat, **self.sampling)
        self.chat = self.last.chat

    def _answer(self) -> Answer:
        if self.last is None:
            raise InputError("There is no answer yet; ask something.")
        return self.last

    def _save(self, path: str) -> None:
        if not path or self.chat is None:
            raise InputError("Say something first, and name a file: /save chat.json.")
        write_page(str(Path(path).expanduser()), self.chat.to_json() + "\n")
