"""What the verbs share: the table of options, the model, the store that is optional, and printing."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TextIO, cast

import click
from click.core import ParameterSource

from icebear.errors import InputError, NumericalError, StoreError
from icebear.paths import local, read_text, write_file
from icebear.values import LAST_SEED

if TYPE_CHECKING:
    from rich.console import Console

    from icebear.concepts.models.model import Model
    from icebear.db.store import Store
    from icebear.records import Meaning, Neuron


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
    "--at": {
        "type": int,
        "help": "The token whose label is explained, for a model that labels tokens.",
    },
    "--method": {
        "show_default": "attnlrp; with --counterfactual difference",
        "help": "attnlrp, cp-lrp, gxi, gxi@prompt, ... (docs/explain.md), or written out, AttnLRP(linear=Gamma(1)).",
    },
    "--checkpoint": {
        "is_flag": True,
        "default": None,
        "help": "Less memory, more time; so by itself from 2,048 tokens on.",
    },
    "--image": {"type": FILE, "help": "An image instead of PROMPT, for an image classifier."},
    "--file": {"type": FILE, "help": "Many prompts instead of a PROMPT: a file, a JSON object a line."},
    "--prompt": {"help": "Instead of NEURONS those that matter most to what follows this prompt."},
    # what is kept and shown
    "--site": {"help": "Where neurons are read: ffn, attn, q, k, v, cross, router, or whole heads."},
    "--top": {"default": 20, "type": AT_LEAST_1, "help": "How many rows to show or take, from the top."},
    "--k": {"default": 32, "type": AT_LEAST_1, "help": "Examples of a neuron and sign."},
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
"""One meaning a name. A verb may give a name its own values (`options`), not another meaning."""

MODEL = (
    "--model",
    "--device",
    "--device-map",
    "--bits",
    "--dtype",
    "--attention",
    "--trust-remote-code",
    "--accept-terms",
)
EXPLAIN = (
    "--target",
    "--contrast",
    "--target-text",
    "--counterfactual",
    "--base-model",
    "--prefix",
    "--at",
    "--number",
    "--checkpoint",
)
CHAT = ("--chat", "--system", "--messages")
ARGUMENTS = {"--json": "as_json", "--model": "model_name", "--store": "store_path"}
"""What a verb's function calls them, where that is not the name itself."""


def options(*names: str, **own: Any) -> Callable[[Callable], Callable]:
    """Options of the table in this order; own: what this verb alone says of the one option that is named."""

    def decorate(command: Callable) -> Callable:
        for name in reversed(names):
            told = {"show_default": "default" in OPTIONS[name] or "default" in own, **OPTIONS[name], **own}
            command = click.option(name, *([ARGUMENTS[name]] if name in ARGUMENTS else []), **told)(command)
        return command

    assert len(names) == 1 or not own
    return decorate


def taken(given: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The arguments of these options, taken out of all that were given."""
    keys = [name.removeprefix("--").replace("-", "_") for name in names]
    return {key: given.pop(key) for key in keys}


def conversation(prompt: str | None, given: dict[str, Any]) -> Any:
    """The chat that `CHAT`'s options make of a prompt, or the prompt itself."""
    from icebear.concepts.models.chat import Chat

    chat, system, messages = taken(given, CHAT).values()
    if messages:
        if prompt is not None or chat or system:
            raise click.UsageError("--messages stands for PROMPT, --chat and --system; give it alone.")
        return Chat.read(messages)
    if prompt is None or not (chat or system is not None):
        return prompt
    before = [{"role": "system", "content": system}] if system is not None else []
    return Chat([*before, {"role": "user", "content": prompt}])


def likewise(asked: Any, other: str) -> Any:
    """Another prompt, of a chat with another message of the user at its end."""
    from icebear.concepts.models.chat import Chat

    return asked.asking(other) if isinstance(asked, Chat) else other


def load(model_name: str, **options: Any) -> Model:
    from icebear.concepts.models.loading import load_model

    return load_model(model_name, **options)


@contextmanager
def finished_store(path: str, model: Model) -> Iterator[Store]:
    """Raises `StoreError` for one that is not of this model, or not done."""
    from icebear.db.store import open_store

    with open_store(path) as store:
        store.check(model.fingerprint, model.name)
        store.facts.get("finished")
        yield store


@contextmanager
def store_if_any(path: str, model: Model) -> Iterator[Store | None]:
    """The store, for a verb that does without as well: the default one is passed over where it is not there, or is not
    of this model, which is said. Raises `StoreError` for one that was asked for."""
    source = click.get_current_context().get_parameter_source("store_path")
    wanted = source is not ParameterSource.DEFAULT
    with ExitStack() as stack:
        found = None
        try:
            if wanted or local(path).exists():
                found = stack.enter_context(finished_store(path, model))
        except StoreError as error:
            if wanted:
                raise
            click.echo(f"Without a store: {error}", err=True)
        yield found


def known_of(store: Store | None, pairs: Iterable[tuple[Neuron, str]]) -> list[Meaning]:
    """The automatic labels that hold, of neurons at polarities, where a store has them."""
    wanted = dict.fromkeys(pairs)
    found = store.labels.meanings(dict.fromkeys(neuron for neuron, _ in wanted)) if store else {}
    return [found[pair] for pair in wanted if pair in found and found[pair].clear]


def told_of(known: Sequence[Meaning]) -> dict[str, Any]:
    """For JSON."""
    return {"meanings": [meaning.to_dict() for meaning in known]} if known else {}


def stdout() -> Console:
    from rich.console import Console

    if sys.stdout.isatty():
        return Console(highlight=False)
    wanted = os.environ.get("COLUMNS", "")
    width = int(wanted) if re.fullmatch("[1-9][0-9]{1,2}", wanted) else 110
    return Console(highlight=False, width=width, file=cast(TextIO, _Trimmed()))


class _Trimmed:
    """stdout, without the spaces that fill a table's lines up."""

    def write(self, text: str) -> int:
        return sys.stdout.write(re.sub(" +\n", "\n", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)


def print_json(value: Any) -> None:
    """Strictly: JSON knows neither NaN nor infinity."""
    try:
        click.echo(json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False))
    except ValueError:
        raise NumericalError("A number of the result is NaN or infinite; try --dtype float32.") from None


def lines(path: str) -> list[str]:
    """A file's texts, one a line."""
    found = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    if not found:
        raise InputError(f"{path} has no text; write one a line.")
    return found


def write_page(path: str, content: str | bytes) -> None:
    write_file(path, content)
    click.echo(f"Wrote {path}", err=True)


def method_named(name: str) -> Any:
    from icebear.concepts.methods.registry import method_of

    return method_of(name)
