"""What may follow in a line of `icebear shell`: verbs, options and their values, files, and neurons of the model."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
from click.shell_completion import ShellComplete, split_arg_string
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document

from icebear.models.model import Model

NEURON = re.compile(r"L(?P<layer>\d+)\.((?P<site>\w+)\.)?\w*|L\d*")
SHOWN_INDICES = 64
"""Neurons of a layer that are offered; nobody picks one out of thousands by its number."""


class Completions(Completer):
    """Completes the last word of a line."""

    def __init__(self, group: click.Group, model: Model) -> None:
        self.shell, self.model = ShellComplete(group, {}, "icebear", ""), model

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        typed = document.text_before_cursor
        words = split_arg_string(typed)
        before, last = (words, "") if not typed or typed[-1].isspace() else (words[:-1], words[-1])
        for name in neuron_names(self.model, last):
            yield Completion(name, -len(last))
        for completed in self.shell.get_completions(before, last):
            if completed.type == "plain":
                yield Completion(completed.value, -len(last), display_meta=completed.help)
            else:
                paths = PathCompleter(expanduser=True, only_directories=completed.type == "dir")
                yield from paths.get_completions(Document(last), complete_event)


def neuron_names(model: Model, begun: str) -> list[str]:
    """Return how a neuron's name may go on, by one part at a time: L21 -> L21.ffn -> L21.ffn.780."""
    match = NEURON.fullmatch(begun)
    if match is None:
        return []
    layer, site = match["layer"], match["site"]
    sites = [*model.sites, *(["head"] if "attn" in model.sites else [])]
    if layer is None:
        names = [f"L{number}." for number in range(model.layers)]
    elif site is None:
        names = [f"L{layer}.{known}." for known in sites]
    else:
        count = model.width(site) if site in sites else 0
        names = [f"L{layer}.{site}.{number}" for number in range(count if count <= SHOWN_INDICES else 0)]
    return [name for name in names if name.startswith(begun)]
