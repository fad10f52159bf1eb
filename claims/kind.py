"""`Kind`: what a claim says and how it is measured. A new kind is a class in a file of `kinds/`."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from icebear.concepts.circuits.circuit_records import Node
from icebear.concepts.nodes.random_controls import RANDOM_DRAWS
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.models.text.prompts import prompt_json
from icebear.records import Neuron, Ranked
from icebear.values import shown

PromptText = str | tuple[dict[str, str], ...]
"""A text, or the messages of a chat."""

_NODE = re.compile(r"(.+)@(\d{1,9})")


@dataclass(frozen=True, order=True)
class NodeId:
    """A neuron or head at a token, written ``L29.ffn.860@5``."""

    neuron: Neuron
    position: int

    def __str__(self) -> str:
        return f"{self.neuron}@{self.position}"

    @classmethod
    def of(cls, node: Node | Ranked) -> NodeId:
        """Return the name of a node of a circuit or a ranking."""
        return cls(node.neuron, node.position)

    @property
    def ranked(self) -> Ranked:
        """The node without its numbers."""
        return Ranked(self.neuron, self.position, None, 0.0)

    @classmethod
    def parse(cls, text: str) -> NodeId:
        """Parse the name of a node. Raises `InputError` for any other text."""
        match = _NODE.fullmatch(text) if isinstance(text, str) else None
        if not match:
            raise InputError(f"{shown(text)} is not a node; write it like L29.ffn.860@5.")
        return cls(Neuron.parse(match[1]), int(match[2]))


@dataclass(frozen=True)
class Measured:
    """A claim, measured."""

    value: float
    control: float
    """The same number of what the claim is compared with."""
    error: float = 0.0
    """The standard error of the value."""
    broken_by: str = ""
    """What breaks the claim whatever the value is, in a sentence; empty if nothing does."""


@dataclass(frozen=True)
class Kind:
    """What a claim says. Its fields are read from a file of claims, and its docstring is in the schema."""

    kind: ClassVar[str]
    value_is: ClassVar[str]
    control_is: ClassVar[str]

    def measured(self, model: Model, seed: int = 0) -> Measured:
        """Measure it in a model. seed: of random controls. Raises `IcebearError` where it cannot be measured."""
        raise NotImplementedError


Draft = tuple[Kind, Measured | None]
"""What is claimed, and what it measures if that is known."""


def others_of(model: Model, neuron: Neuron, seed: int, count: int = RANDOM_DRAWS) -> list[Neuron]:
    """Return random other neurons of the same layer and site."""
    free = [index for index in range(model.width(neuron.site)) if index != neuron.index]
    drawn = random.Random(seed).sample(free, min(count, len(free)))
    return [replace(neuron, index=index) for index in drawn]


def claimed_prompt(prompt: Any) -> Any:
    """Return a prompt as a claim has it. Raises `InputError` for token ids."""
    plain = prompt_json(prompt)
    if isinstance(plain, str):
        return plain
    if isinstance(plain, list) and plain and isinstance(plain[0], dict):
        return tuple({key: str(value) for key, value in message.items()} for message in plain)
    raise InputError("A claim is about a text or a chat, not about token ids; leave out --claim.")
