"""The verbs that let the model answer: answer, and chat."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from icebear.app.cli.options import CHAT, MODEL, conversation, likewise, load, options, print_json, stdout, write_page
from icebear.errors import IcebearError, InputError
from icebear.stopping import Stopped

if TYPE_CHECKING:
    from rich.console import Console

    from icebear.concepts.models.answer import Answer
    from icebear.concepts.models.chat import Chat
    from icebear.concepts.models.model import Model


@click.command()
@click.argument("prompt", required=False)
@options(*CHAT, "--span", "--counterfactual", "--max-new-tokens", "--checkpoint", "--json", *MODEL)
def answer(
    prompt: str | None,
    span: str | None,
    counterfactual: tuple[str, ...],
    max_new_tokens: int,
    checkpoint: bool | None,
    as_json: bool,
    **given: Any,
) -> None:
    """What the model answers to PROMPT, and where that came from: the context, the question, what it had said before.

    Then, for each of its sentences, the sentences that it rests on. With --counterfactual also what is lost when all
    FFN neurons are what they are there.

    \b
    Example:
      icebear answer --chat "Anna lives in Oslo. Tom lives in Rome. Where does Tom live?" --max-new-tokens 20
    """
    from icebear.app.cli.talking import matrix_table, origins_table, probabilities
    from icebear.concepts.attribution.matrix import matrix
    from icebear.concepts.attribution.sources import origins
    from icebear.concepts.models.provenance import provenance

    asked = conversation(prompt, given)
    if asked is None:
        raise click.UsageError("Give either a PROMPT or --messages.")
    if len(counterfactual) > 1:
        raise click.UsageError("An answer is compared with one other prompt; give --counterfactual once.")
    model = load(**given)
    said = model.answer(asked, max_new_tokens)
    other = likewise(asked, counterfactual[0]) if counterfactual else None
    parts = origins(model, said, None if span == "all" else span, other, checkpoint)
    sentences = matrix(model, said, checkpoint=checkpoint)
    if as_json:
        tokens = zip(said.ids, said.token_strings, said.probabilities, strict=True)
        print_json(
            {
                **provenance(model),
                "answer": said.text,
                "ended": said.ended,
                "tokens": [{"id": id, "text": text, "probability": share} for id, text, share in tokens],
                "origins": parts.to_dict(),
                "sentences": sentences.to_dict(),
            }
        )
        return
    stdout().print(probabilities(said), "", origins_table(parts), matrix_table(sentences))


@click.command()
@options("--system", "--messages", "--max-new-tokens")
@options("--temperature", "--seed", "--json", *MODEL)
def chat(
    system: str | None,
    messages: str | None,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    as_json: bool,
    **given: Any,
) -> None:
    """Talk to the model, and ask why about any words of its answer: /why WORDS, /help. --json prints all that was said.

    \b
    Example:
      icebear chat --system "Be brief."
    """
    from icebear.concepts.models.chat import Chat, template_of

    said = Chat.read(messages) if messages else None
    if system is not None:
        if said:
            raise click.UsageError("--messages has its own system message; leave --system out.")
        said = Chat([{"role": "system", "content": system}])
    model, console = load(**given), stdout()
    template_of(model)
    if not as_json:
        console.print(f"Talking to {model.name}. /why WORDS asks about the last answer; /help; /quit.", style="dim")
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    talk = _Talk(model, console, said, options)
    while (line := _line()) is not None and line != "/quit":
        try:
            talk.take(line)
        except IcebearError as error:  # such as of a phrase that the answer does not have
            click.echo(f"icebear: {error}", err=True)
    if as_json:
        print_json({"messages": [dict(message) for message in talk.said.messages] if talk.said else []})


def _line() -> str | None:
    try:
        return click.prompt("you", prompt_suffix="> ", default="", show_default=False, err=True).strip()
    except (click.Abort, Stopped):  # the end of what is typed
        return None


class _Talk:
    """A conversation so far."""

    def __init__(self, model: Model, console: Console, said: Chat | None, options: dict[str, Any]) -> None:
        self.model, self.console, self.said, self.options = model, console, said, options
        self.last: Answer | None = None

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
            phrase, _, rather = words.partition(" rather than ")
            self.console.print(why(self.model, self._answer(), phrase or "0:1", rather))
        elif command == "/from":
            self.console.print(origins_table(origins(self.model, self._answer())))
        else:
            raise InputError(f"{command} is no command; /help lists them.")

    def _ask(self, message: str) -> None:
        from icebear.app.cli.talking import stream
        from icebear.concepts.models.chat import Chat

        asked = {"role": "user", "content": message}
        said = Chat([*(self.said.messages if self.said else ()), asked])
        self.last = stream(self.console, self.model, said, **self.options)
        self.said = self.last.chat

    def _answer(self) -> Answer:
        if self.last is None:
            raise InputError("There is no answer yet; ask something.")
        return self.last

    def _save(self, path: str) -> None:
        if not path or self.said is None:
            raise InputError("Say something first, and name a file: /save chat.json.")
        write_page(str(Path(path).expanduser()), self.said.to_json() + "\n")


VERBS = (answer, chat)
