"""Options: the table of shared options, records that click fills, and the records that several verbs have.

A verb's options are a frozen dataclass with a field for each. A field without a value is the shared option of its name.
Other fields are an `option` or an `argument`. A field whose type is such a record stands for all of its options.
"""

from __future__ import annotations

import gc
import inspect
import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource

import icebear
from icebear.app.cli.progress import waiting
from icebear.errors import InputError, nearest
from icebear.models.text.chat import Chat, other_prompt
from icebear.paths import check_model_path, check_writable, local, read_text
from icebear.records import SITES_AND_HEADS
from icebear.values import LAST_SEED, one_of

Record = TypeVar("Record")


class File(click.Path):
    """A path in which `~` is the home folder, also where the shell does not expand it.

    check: raises for a path that is of no use, before the work.
    """

    def __init__(self, check: Callable[[str], Any] | None = None, **how: Any) -> None:
        super().__init__(**how)
        self.check = check

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = str(super().convert(str(local(value)), param, ctx))
        if self.check:
            self.check(path)
        return path


def check_claims(path: str) -> None:
    """Check a file to which claims are appended; one that exists is read."""
    check_writable(path)
    if Path(path).exists():
        from icebear.claims.claims_files import read_claims

        read_claims(path)


def check_store(path: str) -> None:
    """Check a store that is read. One that is named must exist; the default may be missing."""
    if is_given("store"):
        with icebear.open_store(path) as store:
            store.database  # noqa: B018 - which raises


def is_given(option: str) -> bool:
    """Return whether the user gave this option of the current command, even with the value of its default."""
    return click.get_current_context().get_parameter_source(option) is not ParameterSource.DEFAULT


def excluded(mode: str, names: Sequence[str]) -> None:
    """Raise `UsageError` if one of these options is given, which a mode of the current command would ignore."""
    for name in filter(is_given, names):
        raise click.UsageError(f"{mode} and --{name.replace('_', '-')} exclude each other; give one of them.")


def check_port(port: int) -> None:
    """Raise `InputError` if another process of this machine answers at a port."""
    with socket.socket() as probe:
        if probe.connect_ex(("localhost", port)) == 0:
            raise InputError(f"Port {port} is in use; choose another one with --port.")


def position(value: str) -> str | int:
    """Read ``last``, ``all`` or a token's position."""
    try:
        return value if value in ("last", "all") else int(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a position; give last, all or a number.") from None


def site(value: str) -> str:
    return one_of(value, "site", SITES_AND_HEADS)


class Choice(click.Choice):
    """A choice whose error names the nearest value."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        return super().get_invalid_choice_message(value, ctx) + nearest(value, map(str, self.choices))


TYPES: dict[str, click.ParamType[Any]] = {
    "file": File(dir_okay=False),
    "folder": File(file_okay=False),
    "path": File(),
    "output": File(check_writable, dir_okay=False),
    "claims": File(check_claims, dir_okay=False),
    "store": File(check_store, dir_okay=False),
    "site": click.types.FuncParamType(site),
    "port": click.IntRange(1, 65535),
    "count": click.IntRange(min=1),
    "position": click.types.FuncParamType(position),
    "not negative": click.FloatRange(min=0),
    "seed": click.IntRange(0, LAST_SEED),
}
"""Types of options and arguments by the name that `option`, `argument` and the table have for them."""
OPTIONS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""Options of more than one verb; each name has one meaning. A verb may replace some values. Without a type, it is that
of the field's annotation."""


class Option(click.Option):
    """An option that help lists last if it is advanced."""

    def __init__(self, *names: Any, advanced: bool = False, **how: Any) -> None:
        super().__init__(*names, **how)
        self.advanced = advanced


class Verb(click.Command):
    """A command whose help lists advanced options under a heading of their own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if error.message.startswith("Got unexpected extra argument"):
                raise click.UsageError(f"{error.message}; put a text that has spaces in quotes.", ctx) from None
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, advanced in (("Options", False), ("Advanced", True)):
            shown = [option for option in self.get_params(ctx) if isinstance(option, click.Option)]
            rows = [option.get_help_record(ctx) for option in shown if getattr(option, "advanced", False) is advanced]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl([row for row in rows if row])


class Verbs(click.Group):
    """Commands whose help lists each with its whole first sentence, which click would cut at the end of the line."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        names = self.list_commands(ctx)
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.commands[name].get_short_help_str(200)) for name in names])


@dataclass_transform(kw_only_default=True, frozen_default=True)
def record(options: type[Record]) -> type[Record]:
    """Make a class of options a frozen dataclass."""
    return dataclass(frozen=True, kw_only=True, eq=False)(options)


def option(help: str | None = None, default: Any = ..., **how: Any) -> Any:
    """A field that is an option of one verb, or, without help, the shared option of its name with other values.

    how: the arguments of `click.Option`, and `advanced`.
    """
    text = {} if help is None else {"help": help}
    return field(metadata={**text, **({} if default is ... else {"default": default}), **how})


def argument(**how: Any) -> Any:
    """A field that is an argument. how: the arguments of `click.Argument`."""
    return field(metadata={"argument": True, **how})


def help_of(documented: Any) -> str:
    """Return a docstring as click's help, in which the example keeps its lines."""
    return (inspect.getdoc(documented) or "").replace("Example:\n", "\b\nExample:\n")


def verb(options: type[Record], group: click.Group | None = None) -> Callable[[Callable[[Record], None]], Verb]:
    """Make a function of one record a command, and add it to a group. The function's docstring is the help."""

    def decorate(run: Callable[[Record], None]) -> Verb:
        def callback(**values: Any) -> None:
            run(filled(options, values))

        command = Verb(run.__name__.strip("_"), params=parameters(options), help=help_of(run), callback=callback)
        if group is not None:
            group.add_command(command)
        return command

    return decorate


def parameters(options: Any) -> list[click.Parameter]:
    hints = get_type_hints(options)
    rows: list[click.Parameter] = []
    for declared in fields(options):
        kind = hints[declared.name]
        rows += parameters(kind) if is_dataclass(kind) else [_parameter(declared, kind)]
    return rows


def click_type(kind: Any) -> dict[str, Any]:
    """Return the arguments of `click.Option` that follow from a field's type."""
    optional = NoneType in get_args(kind)
    kind = get_args(kind)[0] if optional else kind
    if kind is bool:
        return {"is_flag": True, "default": None if optional else False}
    if get_origin(kind) is Literal:
        return {"type": Choice(get_args(kind))}
    return {"type": kind} if kind in (int, float) else {}


def _parameter(declared: Any, kind: Any) -> click.Parameter:
    how = dict(declared.metadata)
    if how.pop("argument", False):
        return click.Argument([declared.name], **with_type(how))
    flag = f"--{declared.name.strip('_').replace('_', '-')}"
    how = {**click_type(kind), **({} if "help" in how else OPTIONS[flag]), **how}
    return Option([flag, declared.name], **{"show_default": "default" in how, **with_type(how)})


def with_type(how: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an option with its type, which may be a name in `TYPES`."""
    return {**how, "type": TYPES.get(how["type"], how["type"])} if "type" in how else how


def filled(options: Any, values: dict[str, Any]) -> Any:
    hints = get_type_hints(options)
    return options(
        **{name: filled(kind, values) if is_dataclass(kind) else values[name] for name, kind in hints.items()}
    )


@record
class ModelOptions:
    """The arguments of `load_model`."""

    model: str
    device: str
    device_map: str | None
    bits: Literal[8, 4] | None
    dtype: str | None
    attention: str | None
    trust_remote_code: bool
    accept_terms: bool
    config: str | None

    def load(self, name: str | None = None) -> icebear.Model:
        """Load this model, or another one with the same arguments. `icebear shell` loads each once, and keeps two."""
        name = self.model if name is None else name
        loaded = click.get_current_context().ensure_object(dict)
        key = (name, *self.arguments.items())
        if key not in loaded:
            check_model_path(name)
            with waiting(f"Loading {name}"):
                model = icebear.load_model(name, **self.arguments)
            for oldest in [*loaded][:-1]:
                del loaded[oldest]
            loaded[key] = model
            gc.freeze()  # what was imported stays
            gc.set_threshold(700)  # what follows makes graphs of tensors, which must go at once
        return loaded[key]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments other than the model's name."""
        return {key: value for key, value in asdict(self).items() if key != "model"}


@record
class PromptOptions:
    prompt: str | None = argument(required=False)
    pair: str | None = option()
    chat: bool = option()
    system: str | None = option()
    messages: str | None = option()
    template_option: tuple[str, ...] = option()

    @property
    def template(self) -> dict[str, Any]:
        """The switches of the chat template."""
        return template_switches(self.template_option)

    def read_or(self, image: str | None) -> Any:
        """Return the path of an image if there is one, or else the prompt. Raises `UsageError` for an image with
        options of a text."""
        if image is None:
            return self.read()
        if self.chat or self.system is not None or self.pair is not None or self.template_option:
            raise click.UsageError("--chat, --system, --pair and --template-option are of texts; leave them out.")
        return image

    def read(self) -> Any:
        """Return the prompt, a text or a `Chat`. Raises `UsageError` without one."""
        if self.messages:
            if self.prompt is not None or self.chat or self.system or self.pair is not None:
                raise click.UsageError("--messages replaces PROMPT, --pair, --chat and --system; leave these out.")
            chat = Chat.read(self.messages)
            return Chat(chat.messages, {**chat.template, **self.template})
        if self.prompt is None:
            raise click.UsageError("Give either a PROMPT or --messages.")
        if not self.chat and self.system is None:
            if self.template_option:
                raise click.UsageError("--template-option is a switch of a chat template; add --chat.")
            return self.prompt if self.pair is None else (self.prompt, self.pair)
        if self.pair is not None:
            raise click.UsageError("--pair is a second text for a classifier; leave out --chat and --system.")
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        return Chat([*system, {"role": "user", "content": self.prompt}], self.template)


def template_switches(options: Sequence[str]) -> dict[str, Any]:
    """Return NAME=VALUE options as a mapping; a value is JSON, or else a text."""
    switches: dict[str, Any] = {}
    for text in options:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.UsageError(f"{text!r} is no NAME=VALUE; give --template-option NAME=VALUE.")
        try:
            switches[name] = json.loads(value)
        except (ValueError, RecursionError):
            switches[name] = value
    return switches


@record
class AttributionOptions:
    """The prompt, and other arguments of `attribute`."""

    prompt: PromptOptions
    image: str | None
    target: str | None
    contrast: str | None
    counterfactual: tuple[str, ...]
    counterfactual_image: str | None
    examples: str | None
    others: str | None
    base_model: str | None
    method: str | None
    span: str | None
    target_text: str | None
    number: Literal["log-odds", "logit"] | None
    prefix: str | None
    at: int | None
    max_new_tokens: int = option(advanced=True)
    checkpoint: bool | None

    def load_method(self) -> Any:
        if self.method is None:
            return None
        from icebear.concepts.methods.registry import method_of

        return method_of(self.method)

    @property
    def alone(self) -> str | None:
        """The path of an image that is explained without a text."""
        return None if self.prompt.prompt is not None or self.prompt.messages else self.image

    def _prompt(self) -> Any:
        """Return the prompt, or the path of an image that is explained alone. Raises `UsageError` for one with options
        of a text."""
        if self.alone is None:
            return self.prompt.read()
        if self.counterfactual:
            raise click.UsageError("--counterfactual is a text; compare an image by --counterfactual-image.")
        return self.prompt.read_or(self.alone)

    def load_for_attribute(
        self, model_options: ModelOptions, answer: int | None = None
    ) -> tuple[icebear.Model, dict[str, Any]]:
        """Load the model, and the base model if one is named. Return the model and the other arguments of `attribute`.

        answer: explain the n-th answer of --messages as it stands. Else, with --span, the model first generates one.
        """
        prompt = self._prompt()
        counterfactuals = [other_prompt(prompt, text) for text in self.counterfactual]
        method = self.load_method()
        base_model = model_options.load(self.base_model) if self.base_model is not None else None
        model = model_options.load()
        check_input(model, self.alone)
        model = asked_by_examples(model, self.alone, self.examples, self.others)
        image = None if self.alone is not None else self.image
        if image is not None and answer is not None:
            raise click.UsageError("--answer is of texts alone; leave out --image.")
        other: Any = counterfactuals if len(counterfactuals) > 1 else next(iter(counterfactuals), None)
        if answer is not None:
            from icebear.models.text.answer import nth_answer

            prompt = nth_answer(model, prompt, answer)
        elif self.span is not None:
            prompt, image = answered(model, prompt, self.max_new_tokens, image), None
        names = ("target", "contrast", "counterfactual_image", "target_text", "number", "prefix", "checkpoint")
        return model, {
            "prompt": prompt,
            **({"image": image} if image is not None else {}),
            "span": None if self.span == "all" else self.span,
            "counterfactual": other,
            "base_model": base_model,
            "method": method,
            "position": self.at,
            **{name: getattr(self, name) for name in names},
        }


def check_input(model: icebear.Model, image: str | None) -> None:
    """Raise `UsageError` for a text that a model of images would read, or the other way round."""
    if model.task.reads_text is bool(image):
        way = "a text, or a text with an image; give a PROMPT" if image else "an image; give --image alone"
        raise click.UsageError(f"The input of {model.name} is {way}.")


def asked_by_examples(
    model: icebear.Model, image: str | None, examples: str | None, others: str | None
) -> icebear.Model:
    """Return the model, asked by two folders of images if they are given. Raises `UsageError` for only one of them."""
    if examples is None and others is None:
        return model
    if image is None or examples is None or others is None:
        raise click.UsageError("--examples and --others are two folders of images that --image is compared with.")
    with waiting("Reading the examples"):
        return icebear.by_examples(model, examples, others)


def answered(model: icebear.Model, prompt: Any, count: int, image: str | None = None) -> icebear.Answer:
    """Let the model answer with at most so many tokens, or as many as its context has room for. image: that the prompt
    is about, if it does not have it."""
    from icebear.models.text.prompt_images import with_image
    from icebear.models.text.prompts import Prompt

    prompt = Prompt.of(prompt)
    read = with_image(model, prompt if image is None else replace(prompt, image=image))
    return model.answer(replace(prompt, image=read.image), min(count, model.context_length - len(model.ids(read))))


def recorded(site: str | None, top: int, position: Any) -> dict[str, Any]:
    """Return the arguments of `attribute` that record only what a ranking of a site needs.

    Without a site and a position, record everything that the method scores.
    """
    sites = {"sites": ("attn" if site == "head" else site,)} if site else {}
    if position == "all":
        return {**sites, "keep": "top", "k": top}
    return {**sites, "record": "last"} if position == "last" else sites


def exactly_one(choices: dict[str, Any]) -> None:
    """Raise `UsageError` unless exactly one of these options is given."""
    if sum(value is not None for value in choices.values()) != 1:
        *names, last = choices
        raise click.UsageError(f"Give exactly one of {', '.join(names)} and {last}.")


def read_lines(path: str) -> list[str]:
    """Return the lines of a file that are not empty. Raises `InputError` where there are none."""
    texts = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    if not texts:
        raise InputError(f"{path} has no text; write one text per line.")
    return texts
