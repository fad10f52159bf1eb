"""Options: the table of shared options, records that click fills, and the records that several verbs have.

A verb's options are a frozen dataclass with a field for each. A field without a value is the shared option of its name.
Other fields are written as `option` or `argument`. A field whose type is such a record stands for all of its options.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from types import NoneType
from typing import Any, Literal, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

import click

import icebear
from icebear.concepts.models.chat import Chat, other_prompt
from icebear.errors import InputError
from icebear.paths import local, read_text
from icebear.values import LAST_SEED

Record = TypeVar("Record")


class File(click.Path):
    """A path in which `~` is the home folder, also where the shell does not say so."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(str(local(value)), param, ctx)


FILE, FOLDER = File(dir_okay=False), File(file_okay=False)
AT_LEAST_1 = click.IntRange(min=1)

OPTIONS: dict[str, dict[str, Any]] = {
    # what is explained
    "--target": {"help": "The token or label to explain; default: the most probable one."},
    "--contrast": {"help": "Explain the target against this token or label, a phrase against this phrase."},
    "--target-text": {"help": "Explain a whole continuation instead of one token."},
    "--chat": {"is_flag": True, "help": "PROMPT is a message; the model's own template makes a prompt of it."},
    "--system": {"help": "A system message before it; it is a chat then."},
    "--messages": {"type": FILE, "help": "A chat's messages instead of PROMPT: a JSON file."},
    "--span": {"help": "Let the model answer; explain these words of the answer, its tokens 3:5, or all."},
    "--number": {
        "type": click.Choice(["log-odds", "logit"]),
        "show_default": "log-odds; logit with --contrast or --counterfactual",
        "help": "Explain the target's logit against all other tokens by probability, or alone.",
    },
    "--max-new-tokens": {"default": 40, "type": AT_LEAST_1, "help": "How many tokens the model writes at most."},
    "--prefix": {"help": "What the decoder of an encoder-decoder has written before the target."},
    "--counterfactual": {
        "multiple": True,
        "help": "The prompt that this one is compared with; several times: the mean.",
    },
    "--base-model": {"help": "Another model of the same shape to compare with on the same prompt: base, fine-tuned."},
    "--at": {"type": int, "help": "The token whose label is explained, for a model that labels tokens."},
    "--method": {
        "show_default": "attnlrp; with --counterfactual difference",
        "help": "attnlrp, cp-lrp, gxi, gxi@prompt, ... (docs/explain.md), or written out, AttnLRP(linear=Gamma(1)).",
    },
    "--checkpoint": {
        "is_flag": True,
        "default": None,
        "help": "Less memory, more time; so by itself from 2,048 tokens on.",
    },
    "--file": {"type": FILE, "help": "Many prompts instead of a PROMPT: a file, a JSON object a line."},
    "--prompt": {"help": "Instead of NEURONS those that matter most to what follows this prompt."},
    # what is kept and shown
    "--image": {"type": FILE, "help": "An image instead of PROMPT, for an image classifier."},
    "--site": {"help": "Where neurons are read: ffn, attn, q, k, v, cross, router, or whole heads."},
    "--position": {
        "help": "Where neurons are ranked: last, all, or a token's position.",
        "show_default": "last; with --counterfactual all",
    },
    "--top": {"default": 20, "type": AT_LEAST_1, "help": "How many rows to show or take, from the top."},
    "--annotate": {"is_flag": True, "help": "Attribute the examples to their tokens, and keep that in the store."},
    "--nodes": {"default": 60, "type": AT_LEAST_1, "help": "How many (neuron, token) pairs a circuit has."},
    "--max-neurons": {"default": 10, "type": AT_LEAST_1, "help": "The most that a recipe may edit."},
    "--max-tokens": {"type": AT_LEAST_1, "help": "Truncate each text after this many tokens."},
    "--suppress": {
        "is_flag": True,
        "help": "Suppress instead: the current answer leaves the most probable tokens; less of a concept.",
    },
    "--ablate": {"is_flag": True, "help": "With --counterfactual: what the nodes carry, measured, beside controls."},
    "--temperature": {"default": 0.0, "type": click.FloatRange(min=0), "help": "0: greedy."},
    "--seed": {"default": 0, "type": click.IntRange(0, LAST_SEED), "help": "Of what is drawn by chance."},
    "--out": {
        "type": FOLDER,
        "required": True,
        "help": "The folder of results; an interrupted evaluation goes on in it.",
    },
    # where things are
    "--corpus": {
        "help": "wiki-summaries, imdb-reviews, a .txt, .jsonl, .json, .csv or .parquet file (also .gz), or the id of a "
        "Hugging Face data set.  [default: wiki-summaries; for reviews imdb-reviews]"
    },
    "--store": {"default": "icebear.db", "help": "The SQLite file of the index."},
    "--html": {"type": FILE, "help": "Write a self-contained page."},
    "--png": {"type": FILE, "help": "Write the picture."},
    "--save": {"type": FILE, "help": "Write the result to this file."},
    "--json": {"is_flag": True, "help": "One JSON document on stdout."},
    # the model
    "--model": {"default": "smollm2-135m", "help": "A preset, hub id, folder or .gguf file."},
    "--device": {"default": "auto", "help": "cuda, mps or cpu."},
    "--device-map": {"help": "Instead: auto shares the model among devices, memory and disk; disk keeps it there."},
    "--bits": {"type": click.Choice([8, 4]), "help": "Keep weights in so many, by bitsandbytes."},
    "--dtype": {"help": "float32, bfloat16, float16; default: what suits the device."},
    "--attention": {"help": "sdpa or eager; default: the model's own."},
    "--trust-remote-code": {"is_flag": True, "help": "Run the code that a model of the hub brings."},
    "--accept-terms": {"is_flag": True, "help": "Accept the terms of a preset that has them."},
}
"""Options of more than one verb, one meaning a name. A verb may give a name its own values (`shared`)."""

ADVANCED = set(
    "--target-text --system --messages --number --prefix --at --checkpoint --file --image --seed --device --device-map "
    "--bits --dtype --attention --trust-remote-code --accept-terms".split()
)
"""Those that few need."""


class Option(click.Option):
    """advanced: few need it, so help lists it apart."""

    def __init__(self, *names: Any, advanced: bool = False, **how: Any) -> None:
        super().__init__(*names, **how)
        self.advanced = advanced


class Verb(click.Command):
    """A command whose help lists advanced options last, under a heading."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, advanced in (("Options", False), ("Advanced", True)):
            shown = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
            rows = [one.get_help_record(ctx) for one in shown if getattr(one, "advanced", False) is advanced]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl([row for row in rows if row])


@dataclass_transform(kw_only_default=True, frozen_default=True)
def record(options: type[Record]) -> type[Record]:
    """A class of options, as a frozen dataclass."""
    return dataclass(frozen=True, kw_only=True, eq=False)(options)


def option(help: str, default: Any = None, **how: Any) -> Any:
    """A field that is an option of one verb. how: the arguments of `click.Option`, and `advanced`."""
    return field(metadata={"help": help, **({} if default is None else {"default": default}), **how})


def shared(**own: Any) -> Any:
    """A field that is the shared option of its name, with some of its values replaced."""
    return field(metadata={"shared": True, **own})


def argument(**how: Any) -> Any:
    """A field that is an argument. how: the arguments of `click.Argument`."""
    return field(metadata={"argument": True, **how})


def help_of(documented: Any) -> str:
    """A docstring as click's help; its last paragraph, the example, keeps its lines."""
    return (inspect.getdoc(documented) or "").replace("Example:\n", "\b\nExample:\n")


def verb(options: type[Record], group: click.Group | None = None) -> Callable[[Callable[[Record], None]], Verb]:
    """Make a command of a function of one record, whose docstring is the help; of a group, where one is named."""

    def decorate(run: Callable[[Record], None]) -> Verb:
        def callback(**values: Any) -> None:
            run(filled(options, values))

        command = Verb(run.__name__.strip("_"), params=parameters(options), help=help_of(run), callback=callback)
        if group is not None:
            group.add_command(command)
        return command

    return decorate


def parameters(options: Any) -> list[click.Parameter]:
    """The click parameters of a record's fields, in their order."""
    hints = get_type_hints(options)
    rows: list[click.Parameter] = []
    for one in fields(options):
        kind = hints[one.name]
        rows += parameters(kind) if is_dataclass(kind) else [_parameter(one, kind)]
    return rows


def typed(kind: Any) -> dict[str, Any]:
    """The arguments of `click.Option` that follow from a field's type."""
    kind = get_args(kind)[0] if NoneType in get_args(kind) else kind
    if kind is bool:
        return {"is_flag": True, "default": False}
    if get_origin(kind) is Literal:
        return {"type": click.Choice(get_args(kind))}
    return {"type": kind} if kind in (int, float) else {}


def _parameter(one: Any, kind: Any) -> click.Parameter:
    how = dict(one.metadata)
    if how.pop("argument", False):
        return click.Argument([one.name], **how)
    flag = f"--{one.name.strip('_').replace('_', '-')}"
    if not how or how.pop("shared", False):
        how = {"advanced": flag in ADVANCED, **OPTIONS[flag], **how}
    else:
        how = {**typed(kind), **how}
    return Option([flag, one.name], **{"show_default": "default" in how, **how})


def filled(options: Any, values: dict[str, Any]) -> Any:
    """The record of what click read."""
    hints = get_type_hints(options)
    return options(
        **{name: filled(kind, values) if is_dataclass(kind) else values[name] for name, kind in hints.items()}
    )


@record
class ModelOptions:
    """Which model, and how it is loaded: the arguments of `load_model`."""

    model: str
    device: str
    device_map: str | None
    bits: int | None
    dtype: str | None
    attention: str | None
    trust_remote_code: bool
    accept_terms: bool

    def load(self, name: str | None = None) -> icebear.Model:
        """Load this model, or another one with the same arguments."""
        return icebear.load_model(name or self.model, **self.arguments)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments other than the model's name."""
        return {key: value for key, value in asdict(self).items() if key != "model"}


@record
class PromptOptions:
    """A text, or a chat."""

    prompt: str | None = argument(required=False)
    chat: bool = shared()
    system: str | None = shared()
    messages: str | None = shared()

    def read(self) -> Any:
        """Return the prompt, a text or a `Chat`. Raises `UsageError` without one."""
        if self.messages:
            if self.prompt is not None or self.chat or self.system:
                raise click.UsageError("--messages stands for PROMPT, --chat and --system; give it alone.")
            return Chat.read(self.messages)
        if self.prompt is None:
            raise click.UsageError("Give either a PROMPT or --messages.")
        if not self.chat and self.system is None:
            return self.prompt
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        return Chat([*system, {"role": "user", "content": self.prompt}])


@record
class AttributionOptions:
    """The arguments of `attribute` that name the explained number and the method."""

    prompt: PromptOptions
    target: str | None
    contrast: str | None
    counterfactual: tuple[str, ...]
    base_model: str | None
    method: str | None
    span: str | None
    image: str | None
    target_text: str | None
    number: str | None
    prefix: str | None
    at: int | None
    max_new_tokens: int = shared(advanced=True)
    checkpoint: bool | None

    def arguments(self, loading: ModelOptions) -> tuple[icebear.Model, dict[str, Any]]:
        """Return the model and the other arguments of `attribute`. With a span the model answers the prompt first."""
        prompt = self.image or self.prompt.read()
        counterfactuals = [other_prompt(prompt, text) for text in self.counterfactual]
        method = method_named(self.method)
        base_model = loading.load(self.base_model) if self.base_model else None
        model = loading.load()
        if model.task.reads_text is bool(self.image):
            way = "images: give --image" if not self.image else "text: give a PROMPT"
            raise click.UsageError(f"{model.name} reads {way}.")
        names = ("target", "contrast", "target_text", "number", "prefix", "checkpoint")
        return model, {
            "prompt": prompt if self.span is None else answered(model, prompt, self.max_new_tokens),
            "span": None if self.span == "all" else self.span,
            "counterfactual": counterfactuals if len(counterfactuals) > 1 else next(iter(counterfactuals), None),
            "base_model": base_model,
            "method": method,
            "position": self.at,
            **{name: getattr(self, name) for name in names},
        }


def answered(model: icebear.Model, prompt: Any, count: int) -> icebear.Answer:
    """Let the model answer with at most so many tokens, or as many as its context has room for."""
    return model.answer(prompt, min(count, model.context_length - len(model.ids(prompt))))


def method_named(name: str | None) -> Any:
    from icebear.concepts.methods.registry import method_of

    return None if name is None else method_of(name)


def position_of(text: str | None) -> Any:
    """The value of --position as `icebear.concepts.attribution.ranking.Ranking` takes it. Raises `InputError`."""
    if text in (None, "last", "all"):
        return text
    try:
        return int(text)
    except ValueError:
        raise InputError(f"--position {text!r} is not last, all or a number.") from None


def recorded(site: str | None, top: int, position: Any) -> dict[str, Any]:
    """The arguments of `attribute` that record only the neurons that a ranking of a site needs. Without a site or a
    position that is everything that the method scores."""
    sites = {"sites": ("attn" if site == "head" else site,)} if site else {}
    if position == "all":
        return {**sites, "keep": "top", "k": top}
    return {**sites, "record": "last"} if position == "last" else sites


def exactly_one(choices: dict[str, Any]) -> None:
    """Raise `UsageError` unless exactly one of these options is given."""
    if sum(value is not None for value in choices.values()) != 1:
        *names, last = choices
        raise click.UsageError(f"Give either {', '.join(names)} or {last}.")


def lines(path: str) -> list[str]:
    """Return the lines of a file that are not empty. Raises `InputError` where there are none."""
    texts = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    if not texts:
        raise InputError(f"{path} has no text; write one a line.")
    return texts
