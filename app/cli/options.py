"""Options: the table of shared options, records that click fills, and the records that several verbs have.

A verb's options are a frozen dataclass with a field for each. A field without a value is the shared option of its name.
Other fields are an `option` or an `argument`. A field whose type is such a record stands for all of its options.
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
    """A path in which `~` is the home folder, also where the shell does not expand it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(str(local(value)), param, ctx)


class Position(click.ParamType):
    """``last``, ``all`` or a token's position."""

    name = "position"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value in ("last", "all") else click.INT.convert(value, param, ctx)


FILE, FOLDER = File(dir_okay=False), File(file_okay=False)
AT_LEAST_1 = click.IntRange(min=1)

OPTIONS: dict[str, dict[str, Any]] = {
    # what is explained
    "--target": {"help": "Token or label to explain; default: the most probable one."},
    "--contrast": {"help": "Explain the target's difference to this token or label, a phrase's to this phrase."},
    "--target-text": {"help": "Explain a whole continuation instead of one token."},
    "--chat": {"is_flag": True, "help": "PROMPT is a user message; apply the model's chat template."},
    "--system": {"help": "System message before PROMPT, which then is a user message."},
    "--messages": {"type": FILE, "help": "Read the messages of a chat from a JSON file instead of PROMPT."},
    "--span": {"help": "Let the model answer, then explain part of the answer: a phrase, tokens 3:5, or all."},
    "--number": {
        "type": click.Choice(["log-odds", "logit"]),
        "show_default": "log-odds; logit with --contrast or --counterfactual",
        "help": "Objective: the target's log-odds against all other tokens, or its logit alone.",
    },
    "--max-new-tokens": {"default": 40, "type": AT_LEAST_1, "help": "Generate at most this many tokens."},
    "--prefix": {"help": "Text that the decoder of an encoder-decoder has generated before the target."},
    "--counterfactual": {
        "multiple": True,
        "help": "Prompt to compare with; repeat the option for the mean over several.",
    },
    "--base-model": {"help": "Base model to compare with on the same prompt; it must have the same shape."},
    "--at": {"type": int, "help": "Position of the token whose label is explained, for a token classifier."},
    "--method": {
        "show_default": "attnlrp; with --counterfactual difference",
        "help": "attnlrp, cp-lrp, gxi, gxi@prompt, ... (docs/explain.md), or written out: AttnLRP(linear=Gamma(1)).",
    },
    "--checkpoint": {
        "is_flag": True,
        "default": None,
        "help": "Use less memory and more time; default from 2,048 tokens.",
    },
    "--file": {"type": FILE, "help": "Read many prompts from a file instead of PROMPT, one JSON object per line."},
    "--prompt": {"help": "Instead of NEURONS, use the most relevant neurons for the prediction after this prompt."},
    "--image": {"type": FILE, "help": "Image to explain instead of PROMPT, for an image classifier."},
    # what is recorded and shown
    "--site": {"help": "Where neurons are read: ffn, attn, q, k, v, cross, router, or whole heads."},
    "--position": {
        "type": Position(),
        "help": "Rank neurons at these positions: last, all, or one token's position.",
        "show_default": "last; with --counterfactual all",
    },
    "--top": {"default": 20, "type": AT_LEAST_1, "help": "Number of rows to show, or of neurons to use."},
    "--annotate": {"is_flag": True, "help": "Attribute the examples to their tokens, and save that in the store."},
    "--nodes": {"default": 60, "type": AT_LEAST_1, "help": "Number of nodes (neuron and token) of a circuit."},
    "--max-neurons": {"default": 10, "type": AT_LEAST_1, "help": "Maximum number of neurons."},
    "--max-tokens": {"type": AT_LEAST_1, "help": "Truncate each text after this many tokens."},
    "--suppress": {
        "is_flag": True,
        "help": "Make the current answer disappear from the top tokens, or weaken a concept.",
    },
    "--ablate": {"is_flag": True, "help": "With --counterfactual: measure sufficiency and necessity, with controls."},
    "--temperature": {"default": 0.0, "type": click.FloatRange(min=0), "help": "Sampling temperature; 0 is greedy."},
    "--seed": {"default": 0, "type": click.IntRange(0, LAST_SEED), "help": "Random seed."},
    "--out": {
        "type": FOLDER,
        "required": True,
        "help": "Folder for results; run again with the same folder to resume.",
    },
    # where things are
    "--corpus": {
        "help": "wiki-summaries, imdb-reviews, a .txt, .jsonl, .json, .csv or .parquet file (also .gz), or the id of a "
        "Hugging Face dataset.  [default: wiki-summaries; for reviews imdb-reviews]"
    },
    "--store": {"default": "icebear.db", "help": "SQLite file of the index."},
    "--html": {"type": FILE, "help": "Write a self-contained HTML page to this file."},
    "--png": {"type": FILE, "help": "Write the picture to this file."},
    "--save": {"type": FILE, "help": "Write the result to this file."},
    "--json": {"is_flag": True, "help": "Print one JSON document to stdout."},
    # the model
    "--model": {"default": "smollm2-135m", "help": "Preset, hub id, folder or .gguf file."},
    "--device": {"default": "auto", "help": "cuda, mps or cpu."},
    "--device-map": {
        "help": "Instead of --device: auto splits the model over devices, memory and disk; disk offloads it."
    },
    "--bits": {"type": click.Choice([8, 4]), "help": "Quantize the weights to this many bits with bitsandbytes."},
    "--dtype": {"help": "float32, bfloat16 or float16; default: what suits the device."},
    "--attention": {"help": "Attention implementation, sdpa or eager; default: the model's own."},
    "--trust-remote-code": {"is_flag": True, "help": "Run code that a hub model brings."},
    "--accept-terms": {"is_flag": True, "help": "Accept the license terms of a preset that has them."},
}
"""Options of more than one verb; each name has one meaning. A verb may replace some values."""

ADVANCED = set(
    "--target-text --system --messages --number --prefix --at --checkpoint --file --image --seed --device --device-map "
    "--bits --dtype --attention --trust-remote-code --accept-terms".split()
)
"""The options that help lists last."""


class Option(click.Option):
    """An option that help lists last if it is advanced."""

    def __init__(self, *names: Any, advanced: bool = False, **how: Any) -> None:
        super().__init__(*names, **how)
        self.advanced = advanced


class Verb(click.Command):
    """A command whose help lists advanced options under a heading of their own."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, advanced in (("Options", False), ("Advanced", True)):
            shown = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
            rows = [one.get_help_record(ctx) for one in shown if getattr(one, "advanced", False) is advanced]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl([row for row in rows if row])


@dataclass_transform(kw_only_default=True, frozen_default=True)
def record(options: type[Record]) -> type[Record]:
    """Make a class of options a frozen dataclass."""
    return dataclass(frozen=True, kw_only=True, eq=False)(options)


def option(help: str | None = None, default: Any = ..., **how: Any) -> Any:
    """A field that is an option of one verb, or, without help, the shared option of its name with other values.

    how: the arguments of `click.Option`, and `advanced`.
    """
    own = {} if help is None else {"help": help}
    return field(metadata={**own, **({} if default is ... else {"default": default}), **how})


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
    """Return the click parameters of a record's fields, in their order."""
    hints = get_type_hints(options)
    rows: list[click.Parameter] = []
    for one in fields(options):
        kind = hints[one.name]
        rows += parameters(kind) if is_dataclass(kind) else [_parameter(one, kind)]
    return rows


def typed(kind: Any) -> dict[str, Any]:
    """Return the arguments of `click.Option` that follow from a field's type."""
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
    how = {**typed(kind), **how} if "help" in how else {"advanced": flag in ADVANCED, **OPTIONS[flag], **how}
    return Option([flag, one.name], **{"show_default": "default" in how, **how})


def filled(options: Any, values: dict[str, Any]) -> Any:
    """Return the record with the values that click read."""
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
    """The prompt: a text or a chat."""

    prompt: str | None = argument(required=False)
    chat: bool = option()
    system: str | None = option()
    messages: str | None = option()

    def read(self) -> Any:
        """Return the prompt, a text or a `Chat`. Raises `UsageError` without one."""
        if self.messages:
            if self.prompt is not None or self.chat or self.system:
                raise click.UsageError("--messages replaces PROMPT, --chat and --system; give it alone.")
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
    max_new_tokens: int = option(advanced=True)
    checkpoint: bool | None

    def load_method(self) -> Any:
        from icebear.concepts.methods.registry import method_of

        return None if self.method is None else method_of(self.method)

    def arguments(self, loading: ModelOptions) -> tuple[icebear.Model, dict[str, Any]]:
        """Return the model and the other arguments of `attribute`. With a span the model answers the prompt first."""
        prompt = self.image or self.prompt.read()
        counterfactuals = [other_prompt(prompt, text) for text in self.counterfactual]
        method = self.load_method()
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
        raise click.UsageError(f"Give either {', '.join(names)} or {last}.")


def lines(path: str) -> list[str]:
    """Return the lines of a file that are not empty. Raises `InputError` where there are none."""
    texts = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    if not texts:
        raise InputError(f"{path} has no text; write one text per line.")
    return texts
