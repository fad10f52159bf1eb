"""`icebear chat`: a conversation in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import click

import icebear
from icebear.app.cli.options import ModelOptions, option, record, template_switches, verb
from icebear.app.cli.output import show, stdout, write_page
from icebear.errors import IcebearError, InputError
from icebear.models.text.chat import Chat, Turn, inside, template_of, turns_of
from icebear.stopping import Stopped

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.constrain import Constrain

    from icebear.concepts.stages.stages import Stages
    from icebear.steering.monitor.monitor import Verdict

OnTokens = Callable[[list[int]], None]

HELP = """/why WORDS [| CONTRAST]          show the tokens and neurons that contributed to words of the last answer
/why WORDS | CONTRAST | MESSAGE  show how the first word is computed, compared with the answer to another message
/from [WORDS]                    measure which sentences of the conversation the last answer (or WORDS of it) depends on
/from details                    show how much of the last answer came from the context, the question and its own words
/monitors                        show what --monitor read in the last message and its answer, token by token
/save FILE                       save the conversation as JSON, for --messages
/quit                            stop"""


@record
class Options:
    system: str | None = option(advanced=False)
    messages: str | None = option(advanced=False)
    template_option: tuple[str, ...] = option(advanced=True)
    max_new_tokens: int
    temperature: float
    seed: int
    monitor: tuple[str, ...] = option(
        "Read each message and each answer with a monitor of icebear concept monitor.", type="file", multiple=True
    )
    stop_on: bool = option("End an answer when a monitor flags it.")
    steer_on: str | None = option("Steer with this recipe from the token on that a monitor flags.", type="file")
    json: bool
    model: ModelOptions


@verb(Options)
def chat(options: Options) -> None:
    """Chat with the model. /why WORDS explains words of the model's last answer; /help lists all commands.

    --json prints all messages at the end.

    Example:
      icebear chat --system "Be brief."
    """
    if options.messages and options.system is not None:
        raise click.UsageError("--messages has its own system message; omit --system.")
    if (options.stop_on or options.steer_on) and not options.monitor:
        raise click.UsageError("--stop-on and --steer-on need a monitor; give --monitor FILE.")
    monitors = [icebear.Monitor.load(path) for path in options.monitor]
    recipe = icebear.Recipe.load(options.steer_on) if options.steer_on else None
    start = [] if options.system is None else [{"role": "system", "content": options.system}]
    chat = Chat.read(options.messages) if options.messages else None
    messages = list(chat.messages) if chat else start
    template = {**(chat.template if chat else {}), **template_switches(options.template_option)}
    model, console = options.model.load(), stdout()
    template_of(model)
    if not options.json:
        console.print(
            f"Chat with {model.name}. /why WORDS explains words of the last answer; /help; /quit.",
            style="dim",
            markup=False,
        )
    sampling = {name: getattr(options, name) for name in ("max_new_tokens", "temperature", "seed")}
    conversation = _Conversation(model, console, sampling, messages, template, monitors, recipe, options.stop_on)
    conversation.check()
    while (line := _line()) is not None and line != "/quit":
        try:
            conversation.read(line)
        except IcebearError as error:  # such as for a phrase that the answer does not have
            click.echo(f"icebear: {error}", err=True)
    document = {"messages": list(map(dict, conversation.messages)), "template": template}
    if monitors:
        document["verdicts"] = [verdict.to_dict() for verdict in conversation.verdicts]
    show(options.json, document)


def _line() -> str | None:
    try:
        return click.prompt("you", prompt_suffix="> ", default="", show_default=False, err=True).strip()
    except (click.Abort, Stopped):  # the end of what is typed
        return None


@dataclass
class _Conversation:
    model: icebear.Model
    console: Console
    sampling: dict[str, Any]
    messages: list[Any]
    template: dict[str, Any]
    monitors: list[icebear.Monitor]
    recipe: icebear.Recipe | None
    stop_on: bool
    last: icebear.Answer | None = None
    verdicts: list[Verdict] = field(default_factory=list)
    """Of all messages and answers, in order."""

    def check(self) -> None:
        """Raise `IcebearError` for a monitor or recipe of another model, before the first message."""
        for monitor in self.monitors:
            monitor.check(self.model)
        if self.recipe:
            self.recipe.check(self.model)

    def read(self, line: str) -> None:
        from icebear.app.cli.tables.steering import verdicts_report

        command, _, rest = line.partition(" ")
        if not line.startswith("/"):
            if line:
                self._ask(line)
        elif command == "/help":
            self.console.print(HELP, markup=False)
        elif command == "/save":
            if not rest or not self.messages:
                raise InputError("Send a message first, and name a file: /save chat.json.")
            write_page(rest, lambda: Chat(self.messages, self.template).to_json() + "\n")
        elif command == "/why":
            phrase, contrast, other, *_ = [*rest.split(" | ", 2), "", ""]
            words = phrase or "0:1", contrast or None
            self.console.print(self._compared(*words, other) if other else self._why(*words))
        elif command == "/from":
            self.console.print(self._sources(rest))
        elif command == "/monitors":
            self.console.print(verdicts_report(self.verdicts[-2 * len(self.monitors) :]))
        else:
            raise InputError(f"{command} is not a command; type /help for a list.")

    def _ask(self, message: str) -> None:
        shown = ""

        def show(ids: list[int]) -> None:
            nonlocal shown
            text = "".join(self.model.pieces(self._without_special(ids)))
            if not text.endswith("\ufffd"):  # a character that the next token completes
                new = "".join(sign for sign in text[len(shown) :] if sign.isprintable() or sign in "\n\t")
                self.console.print(new, end="", soft_wrap=True, markup=False, emoji=False)
                shown = text

        prompt = Chat([*self.messages, {"role": "user", "content": message}], self.template)
        if self.monitors:
            self.last = self._watched(prompt, message, show)
        else:
            self.last = self.model.answer(prompt, on_token=show, **self.sampling)
            self.console.print()
        self.messages = list(self.last.chat.messages)

    def _without_special(self, ids: Sequence[int]) -> list[int]:
        """Return the tokens of an answer without the one that ends it, and other special ones."""
        special = self.model.special_ids()
        ended = ids[-1:] and ids[-1] in self.model.ends
        return [token for token in (ids[:-1] if ended else ids) if token not in special]

    def _turns(self, question: Chat, strings: Sequence[str], begins: int) -> tuple[Turn, ...]:
        """Return the turns of a chat and of its answer, which begins at a position, in the texts of their tokens."""
        before = turns_of(self.model, question, strings[:begins])
        return (*before, Turn("assistant", before[-1].stop if before else 0, begins, len(strings), len(strings)))

    def _positions(self, turns: Sequence[Turn], strings: Sequence[str]) -> set[int]:
        """Return the positions of messages, without special tokens that the model wrote."""
        special = set(map(self.model.text, self.model.special_ids()))
        return inside(turns) - {at for at in range(turns[-1].text_start, len(strings)) if strings[at] in special}

    def _watched(self, prompt: Chat, message: str, on_token: OnTokens) -> icebear.Answer:
        """Answer while the monitors read, and print what they flag in the message and in the answer."""
        from icebear.app.cli.tables.steering import flag_line
        from icebear.steering.monitor.watching import read_message

        verdicts = read_message(self.model, self.monitors, message)
        flags = [(verdict.monitor, flag) for verdict in verdicts for flag in verdict.flags]
        self._print(f"Your message: {flag_line(*flag)}" for flag in flags)
        with ExitStack() as stack:
            log = stack.enter_context(icebear.watching(self.model, self.monitors))
            if self.recipe:
                stack.enter_context(icebear.steer(self.model, self.recipe, when=lambda: log.flagged))
            sampling = {**self.sampling, "stopping_criteria": [log] if self.stop_on else []}
            answer = self.model.answer(prompt, on_token=on_token, **sampling)
        self.console.print()
        written = [verdict for text in log.texts for verdict in text.values()]
        self.verdicts += [*verdicts, *written]
        flagged = [(verdict.monitor, flag) for verdict in written for flag in verdict.flags]
        self._print(f"The answer: {flag_line(*flag)}" for flag in flagged)
        return answer

    def _print(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.console.print(line, style="yellow", markup=False, highlight=False)

    def _answer(self) -> icebear.Answer:
        if self.last is None:
            raise InputError("There is no answer yet; send a message first.")
        return self.last

    def _sources(self, words: str) -> Any:
        """Measure what the last answer, or words of it, hangs on; of `details`, how much came from where."""
        from icebear.app.cli.measured_sources import measured_sources
        from icebear.app.cli.tables.explanations import breakdown_report, screen
        from icebear.concepts.answers.source_sentences import source_lines

        if words == "details":
            return breakdown_report(icebear.source_breakdown(self.model, self._answer()))
        return screen(source_lines(measured_sources(self.model, self._answer(), span=words or None)))

    def _why(self, phrase: str, contrast: str | None) -> Group:
        from rich.console import Group

        from icebear.app.cli.tables.explanations import message_units, relevance_report, units_table
        from icebear.app.cli.tables.nodes import nodes_table
        from icebear.concepts.answers.units import units_of
        from icebear.concepts.results.ranking import Ranking

        answer = self._answer()
        assert answer.question is not None
        relevance = icebear.attribute(self.model, answer, contrast=contrast, span=phrase, record="last")
        explanation = icebear.Explanation.of(self.model, relevance, Ranking(8, self.model.main_site))
        strings, begins = relevance.prompt.strings, len(answer.prompt_ids)
        turns = self._turns(answer.question, strings, begins)
        units, positions = units_of(strings, turns, begins, "word"), self._positions(turns, strings)
        return Group(
            relevance_report(relevance, units_table(message_units(relevance, units, positions)), positions),
            nodes_table(
                explanation,
                "FFN neurons where the model predicts these words, compared with their average on other texts",
            ),
        )

    def _compared(self, phrase: str, contrast: str | None, message: str) -> Constrain:
        """Explain the first of some words, compared with the same beginning of an answer to another message."""
        from icebear.app.cli.tables.explanations import explanation_screen

        answer = self._answer()
        assert answer.question is not None
        start, _ = answer.token_range(phrase)
        other = answer.question.asking(message)
        compared: dict[str, Any] = {"contrast": contrast, "counterfactual": other, "span": (start, start + 1)}
        explanation = icebear.explain(self.model, answer, **compared)
        strings, begins = explanation.relevance.prompt.strings, len(answer.prompt_ids)
        turns = self._turns(answer.question, strings, begins)
        if explanation.stages is None:
            return explanation_screen(explanation, positions=self._positions(turns, strings))
        others = explanation.stages.counterfactual.tokens
        other_turns = self._turns(other, others, begins + len(others) - len(strings))
        each = self._positions(turns[-2:], strings), self._positions(other_turns[-2:], others)
        return explanation_screen(replace(explanation, stages=_without_template(explanation.stages, *each)))


def _without_template(stages: Stages, positions: set[int], other_positions: set[int]) -> Stages:
    """Return stages that show the last message and the answer, without the template; other tokens that a line names are
    line breaks, apart from the last one. positions: of what is shown of the prompt, and of the counterfactual."""
    named = {at for part in stages.whole for at in part.positions}  # which are counted too

    def shown(tokens: Sequence[str], messages: set[int]) -> tuple[str, ...]:
        last = len(tokens) - 1
        known = messages | {last}
        breaks = named | {at for at in range(min(known), last) if at + 1 in messages}  # before the answer
        return tuple(text if at in known else "\n" * (at in breaks) for at, text in enumerate(tokens))

    rows = zip(stages.trace.positions, stages.trace.shares, strict=True)
    traced = [row for row in rows if row[0] in positions | {stages.position}]
    return replace(
        stages,
        prompt=replace(stages.prompt, tokens=shown(stages.prompt.tokens, positions)),
        counterfactual=replace(stages.counterfactual, tokens=shown(stages.counterfactual.tokens, other_positions)),
        trace=replace(
            stages.trace, positions=tuple(at for at, _ in traced), shares=tuple(shares for _, shares in traced)
        ),
    )
