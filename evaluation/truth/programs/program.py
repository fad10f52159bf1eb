"""What a program is: a function from a prompt to an answer at each token, with its variables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from icebear.evaluation.truth.programs.circuitry import Circuitry

Variables = dict[str, list[Any]]
BOS, END, PAD = "BOS", "END", "PAD"


@dataclass(frozen=True)
class Program:
    """A function from a prompt to an answer at each token."""

    name: str
    words: tuple[str, ...]
    outputs: tuple[str, ...]
    length: int
    causal: bool
    sample: Callable[[Random], list[str]]
    """Returns a prompt."""
    variables: Callable[[Sequence[str]], Variables]
    """Returns what the program computes from a prompt: variable -> its value at each token, None where it has none. The
    last variable, ``output``, is the answer."""
    build: Callable[[Circuitry], None]

    def answers(self, prompt: Sequence[str]) -> list[str | None]:
        return self.variables(prompt)["output"]

    def circuitry(self) -> Circuitry:
        made = Circuitry(self.words, self.outputs, self.length, self.causal)
        self.build(made)
        return made


def letters(count: int) -> tuple[str, ...]:
    return tuple("abcdefgh"[:count])


def drawn(words: Sequence[str], count: int) -> Callable[[Random], list[str]]:
    """Return a function that draws a prompt of random words after `BOS`."""
    return lambda random: [BOS, *random.choices(words, k=count)]


def at_the_end(value: Any, prompt: Sequence[str]) -> list[Any]:
    return [None] * (len(prompt) - 1) + [value]


def answer(made: Circuitry, layer: int, block: str, words: Sequence[str]) -> None:
    """Write the word that a block has to the output, with a neuron for each word."""
    features, outputs = made.block(block, len(made.words)), made.block("out", len(made.outputs))
    made.look_up(layer, [([features[made.words.index(word)]], outputs[made.outputs.index(word)]) for word in words])
